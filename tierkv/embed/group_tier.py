"""One group of an engine's blocks on the host and in storage, by key: beside the radix tree, which
has the blocks of the first group of full attention.

Everything here runs on the service's loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tierkv.cache.eviction import WritePolicy, WriteRule
from tierkv.cache.groups import CacheGroup, FlatBlock, FlatBlocks, GroupKind
from tierkv.cache.keys import Fingerprint, KeyRun, Prompt, StoredKey
from tierkv.cache.node import Ids
from tierkv.errors import ShuttingDownError, StoreUnavailableError
from tierkv.sched.events import BlockRun, Happening
from tierkv.service.service import GroupMemory, Service
from tierkv.storage.protocol import GetStatus, PutStatus
from tierkv.tasks import abandonable
from tierkv.transfer.storage_io import StorageIO

_AT_ONCE = 32  # blocks that one exchange with the store moves, as elsewhere


def group_fingerprint(whole: Fingerprint, number: int, group: CacheGroup) -> Fingerprint:
    """Of one group's blocks, which never meet those of another."""
    return replace(whole, layout=group.layout, group=str(number))


@dataclass(slots=True, eq=False)
class GroupLook:
    """What can be had of a prompt in one group. prompt: in the group's own blocks. stored: by
    position, a block that storage has, and how many of the prompt's tokens it serves. lost: what it
    was said to have, and did not bring. held: blocks that are kept on the host in this `round`."""

    prompt: Prompt
    keys: KeyRun
    stored: dict[int, tuple[StoredKey, int]] = field(default_factory=dict)
    lost: set[bytes] = field(default_factory=set)
    held: list[FlatBlock] = field(default_factory=list)
    round: int = 0

    def tokens(self, position: int) -> bytes:
        return self.prompt.block(position)


class GroupTier:
    """memory: of this group alone. is_bad: whether a block's loads failed too often."""

    def __init__(
        self,
        service: Service,
        number: int,
        group: CacheGroup,
        memory: GroupMemory,
        *,
        is_bad: Callable[[bytes], bool],
    ) -> None:
        self.group = group
        self.number = number
        self.host = memory.host
        self.blocks = FlatBlocks(f"group {number}", memory.host.num_slots, self._evicted)
        self._service = service
        self._is_bad = is_bad
        self._storage = memory.io
        settings = service.settings
        self._rule = WriteRule(settings.storage_write, settings.storage_after_hits)
        self._roots: dict[str, bytes] = {}
        self._coming: dict[bytes, asyncio.Future[None]] = {}
        self._to_store: deque[FlatBlock] = deque()
        self._is_storing = False

    @property
    def storage(self) -> StorageIO | None:
        """None while no store is attached."""
        return self._storage if self._service.store is not None else None

    # Looking

    def look(self, prompt: Prompt) -> GroupLook:
        cut = prompt.cut_into(self.group.block_size)
        root = self._roots.get(prompt.space)
        if root is None:
            whole = self._service.fingerprint_of(prompt.space)
            root = group_fingerprint(whole, self.number, self.group).root()
            self._roots[prompt.space] = root
        return GroupLook(cut, KeyRun.of(cut, root))

    def valid(self, look: GroupLook, limit: int, *, stored: bool) -> list[int]:
        """For each position before `limit`, how many of the prompt's tokens there can be had; see
        `CacheGroup.longest`. stored: from storage, too, as far as `ask` has found it there."""
        found = []
        for at in range(-(-limit // self.group.block_size)):
            _, num_tokens = self._here(look, at)
            if stored and at in look.stored:
                num_tokens = max(num_tokens, look.stored[at][1])
            found.append(num_tokens)
        return found

    def _here(self, look: GroupLook, at: int) -> tuple[FlatBlock | None, int]:
        """The block on the host that serves most tokens of position `at`, and how many."""
        key = look.keys[at]
        block = self.blocks.get(key.digest)
        if block is not None and not self._is_bad(key.digest):
            return block, key.num_tokens
        if self.group.has_prefixes:
            wanted, extra = look.tokens(at), look.prompt.extra(at)
            block, shared = self.blocks.best(look.keys.parent_of(at), wanted, extra)
            if block is not None and not self._is_bad(block.key.digest):
                return block, shared
        return None, 0

    async def ask(self, look: GroupLook, limit: int) -> str | None:
        """Find out which blocks before `limit` storage has; why it does not say, if so."""
        storage, size = self.storage, self.group.block_size
        if storage is None:
            return None
        stop = min(-(-limit // size), len(look.keys))
        missing = [at for at in range(stop) if self._here(look, at)[1] < look.keys[at].num_tokens]
        if not missing:
            return None
        try:
            there = await storage.are_present([look.keys[at] for at in missing])
        except StoreUnavailableError as error:
            return str(error)
        look.stored.clear()
        for at, is_there in zip(missing, there, strict=True):
            key = look.keys[at]
            if is_there and not self._is_bad(key.digest) and key.digest not in look.lost:
                look.stored[at] = (key, key.num_tokens)
        if self.group.has_prefixes:
            await self._ask_for_beginning(storage, look, stop)
        return None

    async def _ask_for_beginning(self, storage: StorageIO, look: GroupLook, stop: int) -> None:
        """Find a tail in storage that serves the block after the last that is somewhere."""
        valid = self.valid(look, stop * self.group.block_size, stored=True)
        whole = [at for at, count in enumerate(valid) if count == look.keys[at].num_tokens]
        at = whole[-1] + 1 if whole else 0
        if at >= stop:
            return
        parent, extra = look.keys.parent_of(at), look.prompt.extra(at)
        missing = {look.keys[at].digest, *look.lost}
        found = await storage.tails.best(
            parent, look.tokens(at), extra, look.prompt.space, missing=missing
        )
        is_more = found is not None and found.num_shared > valid[at]
        if found is not None and is_more and not self._is_bad(found.key.digest):
            look.stored[at] = (found.key, found.num_shared)

    # Bringing and holding

    def hold(self, look: GroupLook, num_tokens: int) -> tuple[int, list[FlatBlock]]:
        """Keep on the host what the first `num_tokens` tokens need, which is there; the first
        position, and the blocks."""
        needed = self.group.needed(num_tokens)
        blocks = []
        for at in needed:
            block, _ = self._here(look, at)
            assert block is not None, "it was found a moment ago"
            blocks.append(block)
        self.blocks.hold(blocks)
        for block in blocks:
            block.hits += 1
            self._write_down(block)
        return needed.start, blocks

    def let_go(self, look: GroupLook) -> None:
        """What was brought for this look may go."""
        look.round += 1
        held, look.held = look.held, []
        self.blocks.release(held)

    async def bring(self, look: GroupLook, num_tokens: int) -> str | None:
        """Bring to the host, and hold, what storage has of what the first `num_tokens` tokens need;
        why not all of it, if so."""
        wanted: list[int] = []
        for at in self.group.needed(num_tokens):
            most = min(num_tokens - at * self.group.block_size, self.group.block_size)
            block, count = self._here(look, at)
            if block is not None and count >= most:
                self.blocks.hold([block])
                look.held.append(block)
            elif at in look.stored:
                wanted.append(at)
        while wanted:
            coming = {
                other for at in wanted if (other := self._coming.get(look.stored[at][0].digest))
            }
            if not coming:
                break
            await asyncio.wait(coming)
            wanted = [at for at in wanted if self.blocks.get(look.stored[at][0].digest) is None]
        if not wanted:
            return None
        try:
            return await abandonable(
                self._service.tiers.work.started,
                partial(self._fetch, look, wanted),
                "tierkv-fetch-group",
            )
        except ShuttingDownError as error:
            return str(error)

    async def _fetch(self, look: GroupLook, wanted: Sequence[int]) -> str | None:
        storage, round_ = self._storage, look.round
        keys = [look.stored[at][0] for at in wanted]
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._coming[key.digest] = arrived
        slots = self.blocks.take(len(keys))
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
                        look.lost.add(keys[place].digest)
                        continue
                    block = self._made(look, wanted[place], keys[place], slots[place])
                    block.is_stored = True
                    if self.blocks.put(block):
                        left.discard(slots[place])
                        self._tell(Happening.STORED, block)
                        if look.round == round_:
                            self.blocks.hold([block])
                            look.held.append(block)
        finally:
            for key in keys:
                del self._coming[key.digest]
            arrived.set_result(None)
            self.blocks.give(sorted(left))
        return problem

    def _made(self, look: GroupLook, at: int, key: StoredKey, slot: int) -> FlatBlock:
        tokens = look.tokens(at) if key.tail is None else key.tail.tokens
        return FlatBlock(key, look.keys.parent_of(at), tokens, look.prompt.extra(at), at, slot)

    # Saves

    def keep(self, prompt: Prompt, positions: Ids, slots: Ids) -> tuple[int, tuple[int, ...]]:
        """Let lookups find blocks of `prompt` whose bytes are in these slots; how many that are,
        and which slots were not needed."""
        look, unused = self.look(prompt), []
        pairs = list(zip(positions.tolist(), slots.tolist(), strict=True))
        for at, slot in reversed(pairs):  # the first goes last
            block = self._made(look, at, look.keys[at], slot)
            if self.blocks.put(block):
                self._tell(Happening.STORED, block)
                self._write_down(block)
            else:
                unused.append(slot)
        if self.group.kind is GroupKind.FULL:
            last = pairs[-1][0]
            self.blocks.use([key.digest for key in look.keys[: last + 1]])
        return len(pairs), tuple(unused)

    # Storing

    def _write_down(self, block: FlatBlock) -> None:
        """Store it if the rule says so by now. One that is to be stored when it is evicted is
        stored at once: an eviction here waits for nothing."""
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
                await self._flush([one for one in some if self.blocks.get(one.key.digest) is one])
        finally:
            self._is_storing = False

    async def _flush(self, blocks: Sequence[FlatBlock]) -> list[str]:
        """Store them; what went wrong with those that are not stored now."""
        self.blocks.hold(blocks)
        try:
            keys = [block.key for block in blocks]
            slots = np.array([block.slot for block in blocks], np.int32)
            # A state is of no use to a prompt that shares only its beginning.
            notes = self.group.has_prefixes
            outcomes = await self._storage.flush(keys, slots, notes_tails=notes)
        finally:
            self.blocks.release(blocks)
        problems = []
        for block, outcome in zip(blocks, outcomes, strict=True):
            block.is_stored = outcome.status in (PutStatus.STORED, PutStatus.EXISTED)
            if not block.is_stored:
                problems.append(outcome.reason)
        return problems

    async def publish(self, blocks: Sequence[FlatBlock]) -> None:
        """Have all of these, which are held, in storage. Raises StoreUnavailableError."""
        present = await self._storage.are_present([block.key for block in blocks])
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

    # What is known of it

    def findings(self, num_holds: int) -> list[str]:
        """What is wrong, in words, if promises hold so many blocks and nothing is on its way."""
        wrong = self.blocks.findings()
        if self._coming or self._is_storing:
            wrong.append(f"group {self.number}: blocks are on their way")
        elif self.blocks.num_holds != num_holds:
            wrong.append(
                f"group {self.number}: {self.blocks.num_holds} blocks are held, not {num_holds}"
            )
        return wrong

    def _evicted(self, block: FlatBlock) -> None:
        self._tell(Happening.EVICTED, block)

    def _tell(self, what: Happening, block: FlatBlock) -> None:
        parent = block.parent if block.position else b""
        key = block.key
        run = BlockRun(
            key.space,
            block.position,
            [key.digest],
            parent,
            block.tokens,
            key.is_tail,
            self.number,
        )
        self._service.events.tell_run(what, "host", run)
