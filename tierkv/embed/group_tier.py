"""The blocks of one cache group on the host and in storage, found by key.

The index (a radix tree) has only the blocks of the first cache group of full attention. Every other
cache group (sliding windows, recurrent states, further full attention) has a `GroupTier`. All code
here runs on the service's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import numpy as np

from tierkv.cache.eviction import WritePolicy, WriteRule
from tierkv.cache.groups import CacheGroup, FlatBlock, FlatBlocks, GroupKind, TokensAt
from tierkv.cache.keys import Fingerprint, KeyRun, Prompt, StoredKey
from tierkv.errors import ShuttingDownError, StoreUnavailableError
from tierkv.sched.events import BlockRun, CacheEventKind
from tierkv.sched.log_throttle import LogThrottle
from tierkv.service.service import GroupMemory, Service
from tierkv.storage.protocol import GetStatus, PutStatus
from tierkv.tasks import abandonable
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger(__name__)

_AT_ONCE = 32  # blocks of one exchange with the store
_MAX_KNOWN = 64  # number of prompts with remembered keys


def group_fingerprint(whole: Fingerprint, number: int, group: CacheGroup) -> Fingerprint:
    """Return the fingerprint of one cache group, from which the keys of its blocks are made.

    Args:
        whole: the engine's fingerprint.
        number: number of the cache group.
        group: the cache group; its layout replaces that of `whole`.
    """
    return replace(whole, layout=group.layout, group=str(number))


@dataclass(slots=True, eq=False)
class GroupLookup:
    """The state of a lookup of one prompt in one cache group.

    Attributes:
        prompt: the prompt, cut into blocks of the cache group's size.
        keys: key of each block.
        asked: numbers of the prompt's blocks that were looked up in storage.
        tails_asked: numbers of the prompt's blocks for which partial blocks with the same first
            tokens were looked up in storage.
        stored: by number of the prompt's block, the key of a stored block, and how many of the
            prompt's tokens that block has.
        lost: keys of blocks that storage has listed but did not return.
        problem: reason why nothing more is looked up in storage; None while storage is used.
        held: blocks that the lookup protects from eviction.
        round: number of times that `GroupTier.release` has released this lookup's blocks. If the
            number changes during a fetch, the blocks that arrive are not protected for this lookup.
    """

    prompt: Prompt
    keys: KeyRun
    asked: set[int] = field(default_factory=set)
    tails_asked: set[int] = field(default_factory=set)
    stored: dict[int, tuple[StoredKey, int]] = field(default_factory=dict)
    lost: set[bytes] = field(default_factory=set)
    problem: str | None = None
    held: list[FlatBlock] = field(default_factory=list)
    round: int = 0


class _UnknownError(Exception):
    """A block must be looked up in storage before the prompt's usable length is known.

    Its argument is the position of the block in the prompt.
    """


class _Asked(Enum):
    """Assumptions about blocks that are not on the host and not yet looked up in storage."""

    HOST_ALONE = "host"  # only blocks on the host count
    HOPES = "hopes"  # they count as stored with all tokens
    RAISES = "raises"  # reading one raises _UnknownError


class _Valid:
    """Number of first tokens on host or in storage, for each block of a prompt.

    An item is computed when it is read, because a sliding window or a recurrent state needs only
    the last blocks.

    Args:
        tier: the cache group's tier.
        lookup: the prompt's lookup in this cache group.
        limit: number of the prompt's leading tokens to consider.
        unknown: the assumption about blocks that were not looked up in storage yet.
    """

    def __init__(self, tier: GroupTier, lookup: GroupLookup, limit: int, unknown: _Asked) -> None:
        self._tier, self._lookup, self._unknown = tier, lookup, unknown
        self._length = -(-limit // tier.group.block_size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int, /) -> int:
        lookup = self._lookup
        _, num_tokens = self._tier.here(lookup, at)
        if self._unknown is _Asked.HOST_ALONE or num_tokens == lookup.keys[at].num_tokens:
            return num_tokens
        if at in lookup.stored:
            return max(num_tokens, lookup.stored[at][1])
        if at not in lookup.asked and self._tier.storage is not None and lookup.problem is None:
            if self._unknown is _Asked.RAISES:
                raise _UnknownError(at)
            return lookup.keys[at].num_tokens
        return num_tokens


class GroupTier:
    """The host slots and stored blocks of one cache group.

    Args:
        service: the service that stores the cache group's blocks and publishes events about them.
        number: number of the cache group.
        group: layout of the cache group's blocks, and the rule of which blocks a prompt needs.
        memory: the cache group's host slots, and the reader and writer of its stored blocks.
    """

    def __init__(
        self,
        service: Service,
        number: int,
        group: CacheGroup,
        memory: GroupMemory,
    ) -> None:
        self.group = group
        self.number = number
        self.host = memory.host
        evicted = partial(self._publish, CacheEventKind.EVICTED)
        self.blocks = FlatBlocks(f"group {number}", memory.host.num_slots, evicted)
        self._service = service
        self.io = memory.io
        settings = service.settings
        self._rule = WriteRule(settings.storage_write, settings.storage_after_hits)
        self._roots: dict[str, bytes] = {}
        self._known: OrderedDict[int, tuple[Prompt, Prompt, KeyRun]] = OrderedDict()
        self._coming: dict[bytes, asyncio.Future[None]] = {}
        self._to_store: deque[FlatBlock] = deque()
        self._is_storing = False
        self._not_stored = LogThrottle(log, "a block was not stored (x%d): %s")

    @property
    def storage(self) -> StorageIO | None:
        """The reader and writer of stored blocks; None while no store is attached."""
        return self.io if self._service.store is not None else None

    # Looking up

    def begin_lookup(self, prompt: Prompt) -> GroupLookup:
        """Return a new lookup of `prompt` in this cache group, with the keys of its blocks.

        The keys of recent prompts are not computed again.
        """
        known = self._known.get(id(prompt))  # each chunk that is saved has the same prompt
        if known is None:
            root = self._roots.get(prompt.space)
            if root is None:
                whole = self._service.fingerprint_of(prompt.space)
                root = group_fingerprint(whole, self.number, self.group).root()
                self._roots[prompt.space] = root
            cut = prompt.cut_into(self.group.block_size)
            known = self._known[id(prompt)] = (prompt, cut, KeyRun.of(cut, root))
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        _, cut, keys = known
        return GroupLookup(cut, keys)

    def valid(self, lookup: GroupLookup, limit: int) -> TokensAt:
        """Return the number of leading tokens that the host has of each block of a prompt.

        `CacheGroup.longest` computes from these numbers how many leading tokens of the prompt are
        usable.

        Args:
            lookup: the lookup of the prompt in this cache group.
            limit: number of the prompt's leading tokens to consider.
        """
        return _Valid(self, lookup, limit, _Asked.HOST_ALONE)

    def here(self, lookup: GroupLookup, at: int) -> tuple[FlatBlock | None, int]:
        """Return the host block that shares most leading tokens with the prompt's block `at`.

        Args:
            lookup: the prompt's lookup in this cache group.
            at: number of the block in the prompt.

        Returns:
            The host block and the number of shared tokens; None and 0 if no host block shares any.
        """
        key = lookup.keys[at]
        block = self.blocks.get(key.digest)
        if block is not None:
            return block, key.num_tokens
        if self.group.has_prefixes:
            wanted, extra = lookup.prompt.block(at), lookup.prompt.extra(at)
            return self.blocks.best(lookup.keys.parent_of(at), wanted, extra)
        return None, 0

    async def longest(self, lookup: GroupLookup, limit: int) -> int:
        """Return the largest number of a prompt's leading tokens that host and storage may have.

        Blocks that were not looked up in storage yet are assumed to be stored. The number is exact
        once `to_ask`, which lists the blocks to look up, returns []. The first block that is
        missing may have a stored partial copy; this method looks for one.

        Args:
            lookup: the prompt's lookup in this cache group.
            limit: largest result, in tokens.
        """
        size = self.group.block_size
        while True:
            length = self.group.longest(limit, _Valid(self, lookup, limit, _Asked.HOPES))
            at = length // size
            if length == limit or length % size or not await self._asks_for_tail(lookup, at):
                return length

    def to_ask(self, lookup: GroupLookup, limit: int, max_asked: int) -> list[int]:
        """Return blocks to look up in storage, to find out if `limit` tokens can be reused.

        Args:
            lookup: the prompt's lookup in this cache group so far.
            limit: number of leading tokens of the prompt.
            max_asked: largest number of blocks to return. If the reuse of `limit` tokens needs more
                blocks, that number replaces `max_asked`.

        Returns:
            Consecutive numbers of the prompt's blocks. Full attention: the first block that must be
                looked up, and blocks after it. Sliding window and recurrent state: the last such
                block, and blocks before it. [] if no more lookup is needed.
        """
        try:
            self.group.longest(limit, _Valid(self, lookup, limit, _Asked.RAISES))
        except _UnknownError as unknown:
            [at] = unknown.args
        else:
            return []
        count = max(len(self.group.needed(limit)), max_asked)
        if self.group.kind is GroupKind.FULL:
            return list(range(at, min(at + count, len(lookup.keys))))
        return list(range(max(at + 1 - count, 0), at + 1))

    def missing(self, lookup: GroupLookup, positions: Sequence[int]) -> list[int]:
        """Return those of `positions` at which the host does not have the whole block.

        Args:
            lookup: the prompt's lookup in this cache group.
            positions: numbers of blocks in the prompt.
        """
        return [at for at in positions if self.here(lookup, at)[1] < lookup.keys[at].num_tokens]

    def note_answer(
        self, lookup: GroupLookup, missing: Sequence[int], there: Sequence[bool]
    ) -> None:
        """Record in `lookup` which blocks storage has.

        Args:
            lookup: the prompt's lookup in this cache group.
            missing: numbers of the prompt's blocks that were looked up.
            there: for each of these blocks, True if storage has it.
        """
        for at, is_there in zip(missing, there, strict=True):
            if is_there:
                key = lookup.keys[at]
                lookup.stored[at] = (key, key.num_tokens)

    async def _asks_for_tail(self, lookup: GroupLookup, at: int) -> bool:
        """Return True if storage has more tokens of the partial block `at` than the host."""
        if (
            not self.group.has_prefixes
            or self.storage is None
            or lookup.problem is not None
            or at >= len(lookup.keys)
            or at in lookup.tails_asked
            or at in lookup.stored
            or self.here(lookup, at)[1] == lookup.keys[at].num_tokens
        ):
            return False
        lookup.tails_asked.add(at)
        parent, extra = lookup.keys.parent_of(at), lookup.prompt.extra(at)
        missing = {lookup.keys[at].digest, *lookup.lost}
        found = await self.io.tails.best(
            parent, lookup.prompt.block(at), extra, lookup.prompt.space, missing=missing
        )
        if found is None or found.num_shared <= self.here(lookup, at)[1]:
            return False
        lookup.stored[at] = (found.key, found.num_shared)
        return True

    # Fetching and protecting

    def hold(self, lookup: GroupLookup, num_tokens: int) -> tuple[int, list[FlatBlock]]:
        """Protect from eviction the host blocks that the first `num_tokens` tokens need.

        Args:
            lookup: the prompt's lookup in this cache group.
            num_tokens: a number of leading tokens, for which all needed blocks are on the host.

        Returns:
            The number of the first of these blocks in the prompt, and the blocks. The caller ends
                their protection with this tier's `blocks.release`.
        """
        needed = self.group.needed(num_tokens)
        blocks = []
        for at in needed:
            block, _ = self.here(lookup, at)
            assert block is not None, "it was found a moment ago"
            blocks.append(block)
        self.blocks.hold(blocks)
        for block in blocks:
            block.hits += 1
            self._write_down(block)
        return needed.start, blocks

    def release(self, lookup: GroupLookup) -> None:
        """End the protection of this lookup's blocks from eviction, which `fetch_missing` began."""
        lookup.round += 1
        held, lookup.held = lookup.held, []
        self.blocks.release(held)

    async def fetch_missing(self, lookup: GroupLookup, num_tokens: int) -> str | None:
        """Fetch to the host the stored blocks that the first `num_tokens` tokens need.

        All blocks on the host that these tokens need are protected from eviction until
        `release(lookup)` is called.

        Args:
            lookup: the prompt's lookup in this cache group.
            num_tokens: number of leading tokens of the prompt.

        Returns:
            The reason why a block did not arrive; None if all arrived.
        """
        wanted: list[int] = []
        for at in self.group.needed(num_tokens):
            most = min(num_tokens - at * self.group.block_size, self.group.block_size)
            block, count = self.here(lookup, at)
            if block is not None and count >= most:
                self.blocks.hold([block])
                lookup.held.append(block)
            elif at in lookup.stored:
                wanted.append(at)
        problem, left = None, wanted
        while left and problem is None:
            coming = {
                other for at in left if (other := self._coming.get(lookup.stored[at][0].digest))
            }
            if coming:
                await asyncio.wait(coming)
            else:
                problem = await self._fetched(lookup, left)
            left = [at for at in left if at in lookup.stored and not self._has(lookup, at)]
        came = [block for at in wanted if (block := self._has(lookup, at)) is not None]
        for block in came:  # also blocks that other lookups have fetched
            if block not in lookup.held:
                self.blocks.hold([block])
                lookup.held.append(block)
        return problem

    def _has(self, lookup: GroupLookup, at: int) -> FlatBlock | None:
        return self.blocks.get(lookup.stored[at][0].digest) if at in lookup.stored else None

    async def _fetched(self, lookup: GroupLookup, wanted: Sequence[int]) -> str | None:
        try:
            return await abandonable(
                self._service.tiers.work.started,
                partial(self._fetch, lookup, wanted),
                "tierkv-fetch-group",
            )
        except ShuttingDownError as error:
            return str(error)

    async def _fetch(self, lookup: GroupLookup, wanted: Sequence[int]) -> str | None:
        storage, round_ = self.io, lookup.round
        # Another lookup may already be fetching some of these blocks.
        wanted = [at for at in wanted if lookup.stored[at][0].digest not in self._coming]
        keys = [lookup.stored[at][0] for at in wanted]
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._coming[key.digest] = arrived
        slots = self.blocks.allocate(len(keys))
        problem = None
        if len(slots) < len(keys):
            problem = f"the host has no room for {len(keys)} blocks of group {self.number}"
        left = set(slots)
        try:
            for at in range(0, len(slots), _AT_ONCE):
                some = slice(at, min(at + _AT_ONCE, len(slots)))
                outcomes = await storage.fetch(keys[some], np.array(slots[some], np.int32))
                for place, outcome in zip(range(some.start, some.stop), outcomes, strict=True):
                    if outcome.status is not GetStatus.HIT:
                        problem = problem or outcome.reason or "not in storage"
                        lookup.lost.add(keys[place].digest)
                        lookup.stored.pop(wanted[place], None)
                        continue
                    block = self._made(lookup, wanted[place], keys[place], slots[place])
                    block.is_stored = True
                    if self.blocks.put(block):
                        left.discard(slots[place])
                        self._publish(CacheEventKind.STORED, block)
                        if lookup.round == round_:
                            self.blocks.hold([block])
                            lookup.held.append(block)
        finally:
            for key in keys:
                del self._coming[key.digest]
            arrived.set_result(None)
            self.blocks.free(sorted(left))
        return problem

    def _made(self, lookup: GroupLookup, at: int, key: StoredKey, slot: int) -> FlatBlock:
        tokens = lookup.prompt.block(at) if key.tail is None else key.tail.tokens
        return FlatBlock(key, lookup.keys.parent_of(at), tokens, lookup.prompt.extra(at), at, slot)

    # Saves

    def keep(
        self, prompt: Prompt, positions: Sequence[int], slots: Sequence[int]
    ) -> tuple[int, tuple[int, ...]]:
        """Add blocks of `prompt` that the engine has copied to the host; lookups then find them.

        Args:
            prompt: the prompt of the blocks.
            positions: numbers of the blocks in the prompt, in order.
            slots: host slot of each block.

        Returns:
            The number of blocks given, and the slots that were not used because the host already
                has their blocks in other slots. The caller must free these slots.
        """
        lookup, unused = self.begin_lookup(prompt), []
        pairs = list(zip(positions, slots, strict=True))
        for at, slot in reversed(pairs):  # the prompt's first block is evicted last
            block = self._made(lookup, at, lookup.keys[at], slot)
            if self.blocks.put(block):
                self._publish(CacheEventKind.STORED, block)
                self._write_down(block)
            else:
                unused.append(slot)
        if self.group.kind is GroupKind.FULL:
            last = pairs[-1][0]
            self.blocks.use([key.digest for key in lookup.keys[: last + 1]])
        return len(pairs), tuple(unused)

    # Storing

    def _write_down(self, block: FlatBlock) -> None:
        """Start to store a block if the write policy requires that now.

        With write-back a block is also stored at once, because evictions here wait for no store.
        """
        is_due = self._rule.writes_now(block.hits) or self._rule.policy is WritePolicy.WRITE_BACK
        if is_due and not block.is_stored and self.storage is not None:
            block.is_stored = True
            self._to_store.append(block)
            if not self._is_storing:
                self._is_storing = True
                with suppress(ShuttingDownError):
                    self._service.tiers.work.start(self._store_all(), "tierkv-store-group")

    async def _store_all(self) -> None:
        try:
            while self._to_store:
                count = min(len(self._to_store), _AT_ONCE)
                some = [self._to_store.popleft() for _ in range(count)]
                whole = [one for one in some if self.blocks.get(one.key.digest) is one]
                for problem in await self._flush(whole):
                    self._not_stored.warn(problem)
        finally:
            self._is_storing = False

    async def _flush(self, blocks: Sequence[FlatBlock]) -> list[str]:
        if any(self.blocks.get(block.key.digest) is not block for block in blocks):
            return ["the cache was deleted before the blocks were stored"] * len(blocks)
        self.blocks.hold(blocks)
        try:
            keys = [block.key for block in blocks]
            slots = np.array([block.slot for block in blocks], np.int32)
            # A state is of no use to a prompt that shares only its beginning.
            notes = self.group.has_prefixes
            outcomes = await self.io.flush(keys, slots, notes_tails=notes)
        finally:
            self.blocks.release(blocks)
        problems = []
        for block, outcome in zip(blocks, outcomes, strict=True):
            block.is_stored = outcome.status in (PutStatus.STORED, PutStatus.EXISTED)
            if not block.is_stored:
                problems.append(outcome.reason)
        return problems

    async def store_missing(self, blocks: Sequence[FlatBlock]) -> None:
        """Store those of the given blocks that storage does not have.

        Args:
            blocks: blocks that the caller protects from eviction.

        Raises:
            StoreUnavailableError: a block was not stored.
        """
        present = await self.io.are_present([block.key for block in blocks])
        missing = [block for block, there in zip(blocks, present, strict=True) if not there]
        for at in range(0, len(missing), _AT_ONCE):
            flush = partial(self._flush, missing[at : at + _AT_ONCE])
            problems = await abandonable(
                self._service.tiers.work.started, flush, "tierkv-publish-group"
            )
            if problems:
                raise StoreUnavailableError(
                    f"a block of group {self.number} was not stored: {problems[0]}"
                )

    # Checks and events

    def findings(self, num_holds: int) -> list[str]:
        """Check the bookkeeping of this cache group; return a sentence for each error.

        Call this while no copy is running.

        Args:
            num_holds: expected number of holds. A hold protects a block from eviction; a block with
                two holds counts twice.
        """
        wrong = self.blocks.findings()
        if self._coming or self._is_storing:
            wrong.append(f"group {self.number}: blocks are on their way")
        elif self.blocks.num_holds != num_holds:
            wrong.append(
                f"group {self.number}: {self.blocks.num_holds} blocks are held, not {num_holds}"
            )
        return wrong

    def runs(self) -> list[BlockRun]:
        """Return each block of the cache group as a `BlockRun` of one block, for events."""
        return [_run(block, self.number) for block in self.blocks]

    def _publish(self, what: CacheEventKind, block: FlatBlock) -> None:
        self._service.events.publish_run(what, "host", _run(block, self.number))


def _run(block: FlatBlock, group: int) -> BlockRun:
    parent, key = block.parent if block.position else b"", block.key
    return BlockRun(
        key.space, block.position, [key.digest], parent, block.tokens, key.is_tail, group
    )
