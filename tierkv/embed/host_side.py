"""The part of an `EngineCache` that runs on the event loop of the cache service.

The code here finds blocks that the engine can load, reserves host slots for blocks that the engine
saves, and publishes and claims prompts by tickets. A promise is a set of host blocks that are
protected from eviction for one request until the engine has loaded them.

The engine's layers form cache groups (layers with the same layout and the same rule of which blocks
are needed). The service's index lists the blocks of the first cache group of full attention. The
blocks of each other cache group are in a `GroupTier`.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np

from tierkv.cache.groups import (
    CacheGroup,
    FlatBlock,
    GroupKind,
    longest_of_all,
    main_group,
    slots_of,
)
from tierkv.cache.index import Lease
from tierkv.cache.keys import TOKEN_BYTES, Fingerprint, Prompt, StoredKey
from tierkv.cache.layout import Layout
from tierkv.cache.node import CopyState, Ids, Tier, TreeNode
from tierkv.config import all_above_zero, all_at_least_one
from tierkv.embed.group_tier import GroupLookup, GroupTier, group_fingerprint
from tierkv.embed.host_names import HostNames
from tierkv.errors import (
    ConfigError,
    HandoffError,
    OutOfBlocksError,
    StoreUnavailableError,
    TierKVError,
)
from tierkv.gpu.protocol import Event, HostSlots
from tierkv.observe import Stats
from tierkv.pd.claims import acknowledge, claim_budget, wait_for_ticket
from tierkv.pd.handoff import Published, PublishStream
from tierkv.pd.source import Supply
from tierkv.pd.tickets import HandoffProblem, Ticket, TicketLedger
from tierkv.sched.budget import Budget
from tierkv.sched.copies import HASHED_BLOCKS, Beyond, stored_beyond
from tierkv.sched.events import CacheEvent, CacheEventKind, ExternalId
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import Transfer
from tierkv.service import Service
from tierkv.storage.protocol import GetOutcome
from tierkv.tasks import both
from tierkv.transfer.storage_io import are_all_present

log = logging.getLogger(__name__)

_CLOSING_S = 5.0  # time to store the last saved blocks at the end
_MIN_SLOTS = 2  # one to be promised and one to be saved
_MAX_ROUNDS = 4  # plans of a lookup: storage may lose a block between plan and fetch
_MIN_ASKED = 64  # smallest number of a group's blocks in the first question to storage
_MORE_ASKED = 4  # factor by which each further question is larger
_ALL_ASKED = 1024  # blocks of all groups up to which storage is asked for the whole prompt
_SESSION = "session:"  # before a session's id, in the name of its pin
_MAX_SESSIONS = 10_000
_MAX_EVENTS = 4096  # unread events
_MIN_NAMES = 65_536  # smallest limit of remembered names of blocks


class EngineCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of an engine's host tier.

    Attributes:
        max_promised: largest share of the host slots, 0 to 1, with blocks that are protected
            because lookups have found them and the engine has not loaded them yet.
        promise_ttl_s: seconds for which found blocks are protected from eviction.
        save_blocks: number of free host slots kept ready for saves.
        event_tokens: true to put the tokens of blocks, which are the content of prompts, into
            events.
    """

    max_promised: float = 0.5
    promise_ttl_s: float = 30.0
    save_blocks: int = 256
    event_tokens: bool = False

    def __post_init__(self) -> None:
        all_above_zero("engine_cache", self, "max_promised", "promise_ttl_s")
        all_at_least_one("engine_cache", self, "save_blocks")
        if self.max_promised > 1:
            raise ConfigError(
                f"engine_cache.max_promised is {self.max_promised}, and a share is at most 1: "
                "lower it"
            )


def whole_fingerprint(fingerprint: Fingerprint, groups: Sequence[CacheGroup]) -> Fingerprint:
    """Return an engine's fingerprint, extended by a description of its cache groups.

    Engines share blocks only if the results are equal. If full attention is the only cache group,
    the result is `fingerprint` itself.

    Args:
        fingerprint: the engine's fingerprint.
        groups: the engine's cache groups.
    """
    if len(groups) == 1 and groups[0].kind is GroupKind.FULL:
        return fingerprint  # keys stored by earlier versions stay valid
    return replace(fingerprint, groups="; ".join(map(str, groups)))


@dataclass(frozen=True, slots=True)
class HostSizes:
    """The cache groups of a host tier, and the number of host slots of each.

    Attributes:
        fingerprint: the engine's fingerprint, extended by a description of its cache groups.
        groups: the cache groups.
        num_slots: number of host slots of each cache group.
        main: number of the main cache group: the first one of full attention, or 0 if there is
            none. The fingerprint has its layout.
    """

    fingerprint: Fingerprint
    groups: tuple[CacheGroup, ...]
    num_slots: tuple[int, ...]
    main: int

    @classmethod
    def of(
        cls,
        fingerprint: Fingerprint,
        groups: Sequence[CacheGroup],
        host_bytes: int,
        shards: Sequence[Layout] = (),
    ) -> HostSizes:
        """Return the sizes of a host tier of `host_bytes` bytes.

        Args:
            fingerprint: the engine's fingerprint.
            groups: the engine's cache groups.
            host_bytes: bytes of all host slots together.
            shards: layout of each rank's part of a block, if storage has a separate value for each
                part; () otherwise. A host slot has the parts side by side.

        Raises:
            ConfigError: the fingerprint's layout is not that of the main cache group, or there is
                no room for two blocks of each cache group.
        """
        number = main_group(groups)
        main = groups[number]
        if main.layout.digest != fingerprint.layout.digest:
            raise ConfigError(
                f"the fingerprint's layout differs from the layout of group {number}, "
                "which it must have"
            )
        num_slots = tuple(slots_of(groups, host_bytes))
        if shards:
            num_slots = (host_bytes // sum(shard.block_bytes for shard in shards),)
        if min(num_slots) < _MIN_SLOTS:
            raise ConfigError(
                f"host_bytes is {host_bytes}, too little for two blocks of each group: raise it"
            )
        return cls(whole_fingerprint(fingerprint, groups), tuple(groups), num_slots, number)

    @classmethod
    def for_blocks(
        cls, fingerprint: Fingerprint, groups: Sequence[CacheGroup], num_blocks: int
    ) -> HostSizes:
        """Return sizes with room for `num_blocks` blocks of the main cache group.

        The main cache group is the first one of full attention, or the first one if there is none.

        Args:
            fingerprint: the engine's fingerprint.
            groups: the engine's cache groups.
            num_blocks: number of blocks of the main cache group; each other cache group gets room
                for as many tokens.

        Raises:
            ConfigError: the fingerprint's layout is not that of the main cache group, or there is
                no room for two blocks of each cache group.
        """
        size = groups[main_group(groups)].block_size
        of_block = sum(-(-one.layout.block_bytes * size // one.block_size) for one in groups)
        return cls.of(fingerprint, groups, num_blocks * of_block)

    @property
    def indexed(self) -> int | None:
        """Position in `groups` of the cache group whose blocks are in the radix tree (the index).

        None if no cache group has full attention.
        """
        return self.main if self.groups[self.main].kind is GroupKind.FULL else None

    def settings(self, cache: CacheSettings) -> CacheSettings:
        """Return `cache` with the number of host slots of the cache group in the index.

        The device tier gets one block, which is not used.
        """
        in_index = 1 if self.indexed is None else self.num_slots[self.main]
        return msgspec.structs.replace(
            cache,
            block_size=self.fingerprint.layout.block_size,
            device_blocks=1,
            host_blocks=in_index,
            host_max_blocks=0,
        )

    def max_reserved(self, settings: EngineCacheSettings, num_engines: int = 1) -> list[int]:
        """Return, by cache group, how many free slots are kept ready for one engine's saves.

        The number is `settings.save_blocks`, but no more than the engine's share of a quarter of
        the slots, and at least 1.

        Args:
            settings: limits of the host tier; `save_blocks` is read.
            num_engines: number of engines that share the quarter equally.
        """
        most, parts = settings.save_blocks, 4 * num_engines
        return [max(min(most, count // parts), 1) for count in self.num_slots]

    def other_groups(self) -> list[tuple[Fingerprint, int]]:
        """Return the fingerprint and the number of slots of each cache group outside the index."""
        return [
            (group_fingerprint(self.fingerprint, number, group), self.num_slots[number])
            for number, group in enumerate(self.groups)
            if number != self.indexed
        ]


@dataclass(frozen=True, slots=True)
class HeldRun:
    """Protected host slots of consecutive blocks of one cache group.

    Attributes:
        first: number of the first block in the prompt.
        slots: host slot of each block.
    """

    first: int
    slots: array[int]


@dataclass(slots=True, eq=False)
class HostPromise:
    """Host blocks of a prompt's beginning, protected until an engine has loaded them.

    Attributes:
        num_tokens: number of the prompt's leading tokens in these blocks.
        parts: by cache group, host slots of the blocks; the last block may be partial.
        lease: the lease of the blocks that are in the index; None if there are none.
        held: the protected blocks of cache groups outside the index, by number of the group.
        ticket: the ticket that was claimed; None without one.
        problem: the error that prevented more tokens; None without an error.
        storage_tokens: number of tokens that were fetched from storage for this promise.
        num_blocks: number of blocks by cache group, to compare the sum of all promises with the
            limit `EngineCacheSettings.max_promised`.
        timer: ends the promise when it expires.
        owner: has one element until the promise ends. A thread that ends the promise first removes
            the element, which only one thread can.
    """

    num_tokens: int
    parts: list[HeldRun] = field(default_factory=list)
    lease: Lease | None = None
    held: dict[int, list[FlatBlock]] = field(default_factory=dict)
    ticket: Ticket | None = None
    problem: str | None = None
    storage_tokens: int = 0
    num_blocks: list[int] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    owner: deque[None] = field(default_factory=lambda: deque([None]))

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return self.ticket.first_tokens if self.ticket is not None else ()

    @property
    def is_over(self) -> bool:
        """True if the promise was loaded or released, or has expired."""
        return not self.owner

    def claim(self) -> bool:
        """End the promise, if it has not ended yet. Thread-safe.

        Returns:
            True if this call has ended the promise; the caller must then release the blocks. False
                if the promise had ended before.
        """
        if not self.owner:  # the common case: an exception would cost as much as a lookup
            return False
        try:
            self.owner.popleft()
        except IndexError:
            return False
        return True


class _OnHost(NamedTuple):
    """The leading tokens of a prompt whose blocks are on the host, according to the index.

    Attributes:
        num_tokens: number of these tokens.
        node: the tree node with the last of their blocks; None if the index is not used.
        stop: number of their blocks.
    """

    num_tokens: int
    node: TreeNode | None
    stop: int


@dataclass(frozen=True, slots=True)
class Copied:
    """Blocks of one cache group that the engine has copied to host slots.

    Attributes:
        group: number of the cache group.
        positions: number of each block in its prompt.
        slots: host slot of each block.
        external_ids: the engine's name of each block; () if the engine passed no names.
    """

    group: int
    positions: Sequence[int]
    slots: array[int]
    external_ids: tuple[ExternalId | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of adding blocks that an engine has saved to the host tier.

    Attributes:
        num_blocks: for each saved prompt, the number of its blocks that were added, and that
            lookups find now.
        unused: by cache group, the host slots that the engine may use for other saves: their blocks
            were on the host already, or were refused.
    """

    num_blocks: tuple[int, ...]
    unused: tuple[tuple[int, ...], ...]


class _Planned(NamedTuple):
    """The longest beginning of a prompt that every cache group has on the host or in storage.

    Attributes:
        num_tokens: number of tokens of this beginning.
        problem: the error because of which storage was not asked for more; None without an error.
        known: stored blocks of the cache group whose blocks are in the index; None if storage was
            not asked for them.
    """

    num_tokens: int
    problem: str | None
    known: Beyond | None = None


@dataclass(slots=True, eq=False)
class _PromiseFetch:
    """The fetch that fills one promise with blocks from storage.

    Attributes:
        budget: the time that the request may still wait for storage.
        promise: the promise to fill; None once it is filled, or once the request no longer waits
            for it.
        is_timed: True if the blocks of all cache groups are fetched under one time limit.
        host_tokens: number of the prompt's leading tokens that the host had before the fetch.
        is_try: True if the blocks are fetched only to measure the speed of storage.
        is_late: True if the fetch continues although the request no longer waits for it.
    """

    budget: Budget
    promise: HostPromise | None = None
    is_timed: bool = False
    host_tokens: int = 0
    is_try: bool = False
    is_late: bool = False
    has_answered: bool = False
    transfer: Transfer | None = None


class HostSide:
    """The host tier of one or more `EngineCache`s: finds, fetches, saves and publishes blocks.

    Construct the object in the thread of the service's event loop, and call all methods there; only
    `take_events` may be called from any thread.

    Args:
        service: a running service that was made with the same `sizes`. It has the index, the host
            slots and the store.
        sizes: the cache groups, and the number of host slots of each.
        settings: limits of promises, saves and events.
    """

    def __init__(self, service: Service, sizes: HostSizes, settings: EngineCacheSettings) -> None:
        self.max_reserved: Sequence[int] = sizes.max_reserved(settings)
        self._service = service
        self._groups = groups = sizes.groups
        self._main = main = sizes.indexed  # None if no group is of full attention
        others = [number for number in range(len(groups)) if number != main]
        self._tiers = {
            number: GroupTier(service, number, groups[number], memory)
            for number, memory in zip(others, service.groups, strict=True)
        }
        # A promise of more blocks than this is possible while there is no other promise.
        self._max_promised = [max(int(settings.max_promised * n), 1) for n in sizes.num_slots]
        self._promises: set[HostPromise] = set()
        self._promised_blocks = [0] * len(groups)
        # The call that waits for room has the lock; later calls wait for the lock, in order.
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._lent: dict[int, Ids] = {}  # slots that are reserved for saves, or being written
        # The generation of the cache in which each slot (group, slot) was reserved.
        self._reserved_in: dict[tuple[int, int], int] = {}
        self._publishes: dict[int, tuple[PublishStream, SavedPrompt]] = {}
        self._sessions: OrderedDict[str, None] = OrderedDict()  # in the order of their last turns
        # Names of the index's blocks; None if the engine has no group of full attention.
        self.names = None if main is None else HostNames(main)
        self._listening = ExitStack()
        events = service.events
        events.groups, events.indexed = groups, main or 0
        events.other_blocks = lambda: [run for tier in self._tiers.values() for run in tier.runs()]
        events.max_names = _MIN_NAMES + 4 * sum(host.num_slots for host in self.slots)
        subscription = events.subscribe(_MAX_EVENTS, wants_tokens=settings.event_tokens)
        self._events = self._listening.enter_context(subscription)
        if self.names is not None:
            self._listening.enter_context(events.subscribed(self.names))
        service.flat_blocks = [tier.blocks for tier in self._tiers.values()]

    @property
    def slots(self) -> list[HostSlots]:
        """The host slots of each cache group."""
        return [
            self._service.host_slots if number == self._main else self._tiers[number].host
            for number in range(len(self._groups))
        ]

    def take_events(self) -> list[CacheEvent]:
        """Return the cache events since the last call, with the engine's names of blocks.

        Any thread may call this.
        """
        return self._events.drain()

    # Promises

    async def promise(
        self,
        prompt: Prompt,
        ticket_id: str | None,
        promise_ttl_s: float,
        limit: int | None = None,
        external_ids: Sequence[Sequence[ExternalId | None]] = (),
    ) -> HostPromise:
        """Fetch missing blocks of `prompt` from storage, and protect its host blocks from eviction.

        A cancelled call protects no block.

        Args:
            prompt: the prompt to look up.
            ticket_id: id of a ticket to wait for; None for none.
            promise_ttl_s: seconds after which the promise expires.
            limit: largest number of leading tokens to protect; None for all.
            external_ids: by cache group, the engine's names of the prompt's blocks from the first
                on.

        Returns:
            The promise, with the protected blocks.

        Raises:
            HandoffError: the ticket does not come, or is for another prompt.
        """
        for number, names in enumerate(external_ids):
            for at in range(0, len(names), HASHED_BLOCKS):
                if at:  # other tasks run in between: a name costs the hash of its block
                    await asyncio.sleep(0)
                some = names[at : at + HASHED_BLOCKS]
                self._note_names(prompt, number, range(at, at + len(some)), some)
        ticket: Ticket | None = None
        keys: Sequence[StoredKey] = ()
        budget = self._service.budget()
        if ticket_id is not None:
            deadline_s = self._service.handoff_settings.claim_deadline_s
            budget = claim_budget(
                deadline_s,
                step_s=self._service.settings.fetch_deadline_s,
                estimator=self._service.estimator,
            )
            ticket, keys = await self._ticket(ticket_id, prompt, budget, deadline_s)
            budget.arrived()
        async with self._room(self._max_needed(prompt)) as promise:
            promise.ticket = ticket
            bound = prompt.num_tokens if limit is None else min(limit, prompt.num_tokens)
            fetch = _PromiseFetch(budget, promise)
            is_one_group = not self._tiers or self._service.store is None
            # A fetch of one group decides by itself whether storage is worth the wait.
            fetch_blocks = self._fetch_missing if is_one_group else self._fetch_all_groups
            problem = await fetch_blocks(prompt, keys, fetch, bound)
            promise.problem = problem if promise.num_tokens < prompt.num_tokens else None
            if not promise.num_tokens:  # no block is protected
                self._expire(promise)
            else:
                loop = asyncio.get_running_loop()
                promise.timer = loop.call_later(promise_ttl_s, self._expire, promise)
        return promise

    def _max_needed(self, prompt: Prompt) -> list[int]:
        """Return, by cache group, the most host blocks that a promise of `prompt` may protect."""
        most = []
        for group in self._groups:
            whole = group.needed(prompt.num_tokens)
            in_window = -(-group.window // group.block_size) + 1
            is_window = group.kind is GroupKind.WINDOW
            most.append(min(whole.stop, in_window) if is_window else len(whole))
        return most

    async def _ticket(
        self, ticket_id: str, prompt: Prompt, budget: Budget, deadline_s: float
    ) -> tuple[Ticket, Sequence[StoredKey]]:
        handoff = self._service.require_handoff()
        try:
            return await wait_for_ticket(
                handoff.tickets,
                ticket_id,
                prompt,
                budget,
                deadline_s=deadline_s,
                estimator=self._service.estimator,
                fetch=self._fetch_ahead,
                near=Supply(),
            )
        except HandoffError:
            handoff.stats.claims_without_ticket += 1
            raise

    async def _fetch_ahead(self, prompt: Prompt) -> bool:
        """Fetch blocks of `prompt` from storage to the host before its ticket is written.

        Only blocks of the cache group that is in the index are fetched. Return True if all of them
        arrived.
        """
        step_s = self._service.settings.fetch_deadline_s
        fetch = _PromiseFetch(Budget(step_s, step_s=step_s))
        async with self._fetched(prompt, (), fetch) as problem:
            return problem is None

    async def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record that the engine computed `num_tokens` prompt tokens in `seconds` seconds.

        From this speed, later lookups decide if fetching blocks from storage is worth the wait.
        """
        self._service.note_prefill(num_tokens, seconds)

    # What all groups have

    def _begin_lookups(self, prompt: Prompt) -> dict[int, GroupLookup]:
        return {number: tier.begin_lookup(prompt) for number, tier in self._tiers.items()}

    async def _plan(
        self, prompt: Prompt, lookups: dict[int, GroupLookup], bound: int, num_promised: int = 0
    ) -> _Planned:
        """Return the longest beginning of `prompt` that all cache groups have.

        The result has at most `bound` tokens. A block counts if it is on the host or in storage.
        Storage is not asked for the first `num_promised` indexed blocks, which a ticket lists as
        stored.
        """
        if self._main is None:
            await self._ask(lookups, self._first_asked(lookups, bound))
            return _Planned(await self._longest(lookups, bound), _problem_of(lookups))
        service, size, problem = self._service, prompt.block_size, None
        storage, match = service.tiers.copies.storage, service.index.match(prompt)
        first, asking = match.num_blocks, self._ask(lookups, self._first_asked(lookups, bound))
        known = Beyond(range(first, first))
        if storage is None or num_promised:
            await asking
            num_tokens = min(num_promised * size, prompt.num_tokens) - first * size
            known = Beyond(range(first, max(num_promised, first)), None, max(num_tokens, 0))
        else:
            beyond = stored_beyond(service.index, storage, prompt, match)
            try:
                known, _ = await both(beyond, asking)
            except StoreUnavailableError:
                problem = "storage did not answer"
        here = first * size
        if match.partial is not None and not known.num_tokens:  # else storage has more of the block
            here += match.partial.num_tokens
        length = await self._longest(lookups, min(bound, here + known.num_tokens))
        return _Planned(length, problem or _problem_of(lookups), None if problem else known)

    def _first_asked(self, lookups: dict[int, GroupLookup], bound: int) -> dict[int, Sequence[int]]:
        """Return, for each cache group, the numbers of the blocks to look up in storage first.

        For a short prompt, these can be all blocks, so that no second lookup is needed.
        """
        tiers = {n: self._tiers[n] for n in lookups if self._tiers[n].storage is not None}
        whole = {n: range(-(-bound // tier.group.block_size)) for n, tier in tiers.items()}
        if self._main is not None and sum(map(len, whole.values())) <= _ALL_ASKED:
            return {**whole}
        return {n: tier.to_ask(lookups[n], bound, _MIN_ASKED) for n, tier in tiers.items()}

    async def _ask(
        self, lookups: dict[int, GroupLookup], wanted: Mapping[int, Sequence[int]]
    ) -> None:
        """Look up the `wanted` blocks of all cache groups in storage in one batch.

        The answers are recorded in `lookups`. Blocks that were looked up before are skipped.
        """
        missing: dict[int, list[int]] = {}
        for number, positions in wanted.items():
            lookup = lookups[number]
            unknown = [at for at in positions if at not in lookup.asked]
            lookup.asked.update(unknown)
            missing[number] = self._tiers[number].missing(lookup, unknown)
        asked = [
            (self._tiers[number], lookups[number], of_group)
            for number, of_group in missing.items()
            if of_group
        ]
        if not asked:
            return
        questions = [(tier.io, [lookup.keys[at] for at in some]) for tier, lookup, some in asked]
        try:
            answers = await are_all_present(questions)
        except StoreUnavailableError as error:
            for _, lookup, _ in asked:
                lookup.problem = str(error)
            return
        for (tier, lookup, some), there in zip(asked, answers, strict=True):
            tier.note_answer(lookup, some, there)

    async def _longest(self, lookups: dict[int, GroupLookup], bound: int) -> int:
        """Return how many leading tokens every group in `lookups` has on the host or in storage.

        The result is at most `bound`; storage is asked for all cache groups at once.
        """
        length, most = bound, _MIN_ASKED
        while True:
            before = -1
            while length != before:
                before = length
                for number, lookup in lookups.items():
                    length = await self._tiers[number].longest(lookup, length)
            wanted = {
                number: positions
                for number, lookup in lookups.items()
                if (positions := self._tiers[number].to_ask(lookup, length, most))
            }
            if not wanted:
                return length
            await self._ask(lookups, wanted)
            most *= _MORE_ASKED

    def _longest_here(self, lookups: dict[int, GroupLookup], bound: int) -> int:
        valid = [
            (self._groups[number], self._tiers[number].valid(lookup, bound))
            for number, lookup in lookups.items()
        ]
        return longest_of_all(valid, bound)

    async def _fetch_all_groups(
        self, prompt: Prompt, keys: Sequence[StoredKey], fetch: _PromiseFetch, bound: int
    ) -> str | None:
        """Fetch missing blocks of the first `bound` tokens to the host, unless computing is faster.

        Wait at most for the time left in `fetch.budget`; return the reason why blocks were not
        fetched, or None.
        """
        service, budget, promise = self._service, fetch.budget, fetch.promise
        assert promise is not None, "its request waits"
        here, tier = self._all_here(prompt, bound), service.estimator.tier
        verdict = budget.restrict(bound - here, is_answered=bool(keys)) if here < bound else None
        if verdict is None or not verdict.is_asked:
            service.tiers.decisions.recompute_storage += verdict is not None
            self._hold(prompt, self._begin_lookups(prompt), promise, here)
            return verdict.reason if verdict is not None else None
        fetch.is_timed, fetch.host_tokens = True, here
        fetch.is_try = verdict.is_try
        tier.num_tries += fetch.is_try
        answered: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        work = self._fetch_in_time(prompt, keys, fetch, bound, answered)
        task = service.tiers.work.started(work, "tierkv-fetch-groups")

        def ended(_: asyncio.Task[None] | None) -> None:
            tier.num_tries -= fetch.is_try
            tier.num_late -= fetch.is_late
            fetch.is_try = fetch.is_late = False
            _answer(answered, "this service is closing")  # no effect if there is an answer

        task.add_done_callback(ended)
        try:
            async with budget.limit():
                problem = await asyncio.shield(answered)
        except TimeoutError:
            problem = "storage took too long"
            service.tiers.decisions.recompute_late += 1
            if not task.done():
                fetch.is_late = budget.may_compute
                tier.num_late += fetch.is_late
                if not fetch.is_late:
                    task.cancel()
        except asyncio.CancelledError:
            fetch.promise = None
            task.cancel()
            ended(None)  # the next request need not wait for its end
            raise
        if fetch.promise is not None:
            fetch.promise = None
            self._hold(prompt, self._begin_lookups(prompt), promise, self._all_here(prompt, bound))
        return problem

    async def _fetch_in_time(
        self,
        prompt: Prompt,
        keys: Sequence[StoredKey],
        fetch: _PromiseFetch,
        bound: int,
        answered: asyncio.Future[str | None],
    ) -> None:
        """Fetch the missing blocks of a lookup, and set `answered` when the fetch ends.

        The result of `answered` is the reason why blocks are still missing, such as the deadline,
        or None.
        """
        service, time = self._service, asyncio.get_running_loop().time
        tier, began_at = service.estimator.tier, time()
        most_s = service.settings.fetch_deadline_s if fetch.budget.may_compute else None
        try:
            async with asyncio.timeout(most_s):
                problem = await self._fetch_missing(prompt, keys, fetch, bound)
        except TimeoutError:
            problem = "storage took too long"
        except TierKVError as error:
            problem = str(error)
        finally:
            if not fetch.has_answered:
                tier.note_silence(time() - began_at)
            if fetch.transfer is not None:  # the wait for missing blocks counts, too
                tier.end(fetch.transfer, time(), is_late=True)
        _answer(answered, problem)

    def _all_here(self, prompt: Prompt, bound: int) -> int:
        return self._longest_here(
            self._begin_lookups(prompt), self._on_host(prompt, bound).num_tokens
        )

    async def _fetch_missing(
        self,
        prompt: Prompt,
        keys: Sequence[StoredKey],
        fetch: _PromiseFetch,
        bound: int,
    ) -> str | None:
        """Fetch the missing blocks of the first `bound` tokens, and fill `fetch.promise`.

        Return the reason why a block did not arrive; None if all arrived.
        """
        lookups, problem, estimator = self._begin_lookups(prompt), None, self._service.estimator
        time = asyncio.get_running_loop().time
        began_at = time()
        for left in reversed(range(_MAX_ROUNDS)):
            try:
                length, known = bound, None
                if lookups:
                    num_promised = len(keys) if left == _MAX_ROUNDS - 1 else 0
                    planned = await self._plan(prompt, lookups, bound, num_promised)
                    length, known = planned.num_tokens, planned.known
                    problem = problem or planned.problem
                if fetch.is_timed and not fetch.has_answered:
                    fetch.has_answered = True
                    self._note_answer(fetch, length - fetch.host_tokens, time() - began_at)
                wanted = prompt.first_blocks(-(-length // prompt.block_size)) if lookups else prompt
                async with self._fetched(wanted, keys, fetch, known) as outcome:
                    problem = problem or (outcome.reason if outcome is not None else None)
                    length = self._on_host(prompt, length).num_tokens
                    length = await self._longest(lookups, length)
                    for number, lookup in lookups.items():
                        problem = await self._tiers[number].fetch_missing(lookup, length) or problem
                        if fetch.promise is not None:
                            fetch.budget.arrived()
                    found = self._on_host(prompt, length).num_tokens
                    found = self._longest_here(lookups, found)
                    if fetch.transfer is not None:
                        num_bytes = max(found - fetch.host_tokens, 0) * estimator.bytes_per_token
                        estimator.tier.arrived(fetch.transfer, num_bytes)
                    if found == length or not left or fetch.promise is None:
                        if fetch.promise is not None:
                            self._hold(prompt, lookups, fetch.promise, found)
                            fetch.promise = None
                        break
            finally:
                for number, lookup in lookups.items():
                    self._tiers[number].release(lookup)
        return problem

    def _note_answer(self, fetch: _PromiseFetch, num_tokens: int, seconds: float) -> None:
        """Record how long storage took to answer a lookup, and start to measure its fetch.

        `num_tokens` is the number of tokens that storage has and the host does not. `seconds` is
        the time to the answer.
        """
        estimator = self._service.estimator
        estimator.tier.note_answer(seconds, has_found=num_tokens > 0)
        if num_tokens > 0:
            now = asyncio.get_running_loop().time()
            num_bytes = num_tokens * estimator.bytes_per_token
            fetch.transfer = estimator.tier.begin(num_bytes, now)
        if fetch.promise is not None:
            fetch.budget.arrived()

    @asynccontextmanager
    async def _fetched(
        self,
        prompt: Prompt,
        keys: Sequence[StoredKey],
        fetch: _PromiseFetch,
        known: Beyond | None = None,
    ) -> AsyncIterator[GetOutcome | None]:
        """Fetch the prompt's blocks for the cache group in the index, and yield the first problem.

        The fetched blocks are protected from eviction until the `async with` block ends. The
        problem is the outcome of the first block that did not arrive; None if all arrived, or
        nothing was to be fetched.
        """
        service = self._service
        if service.tiers.copies.storage is None or self._main is None or not prompt.num_tokens:
            yield None
            return
        budget = fetch.budget
        if fetch.is_timed:  # `_fetch_all_groups` has decided to wait
            deadline_s = service.settings.fetch_deadline_s
            budget = Budget(deadline_s, step_s=deadline_s)
        fetched = await service.fetcher.fetch(
            prompt,
            budget,
            promised=keys[: -(-prompt.num_tokens // prompt.block_size)],
            is_part=fetch.is_timed,
            known=known,
        )
        if fetch.promise is not None:
            fetch.promise.storage_tokens += len(fetched.tokens)
        try:
            yield fetched.first_problem
        finally:
            fetched.release()

    def _on_host(self, prompt: Prompt, bound: int) -> _OnHost:
        if self._main is None:
            return _OnHost(bound, None, 0)
        index, size, group = self._service.index, prompt.block_size, self._groups[self._main]
        match = index.match(prompt, bound)
        num_tokens, node, stop = match.num_blocks * size, match.node, match.num_blocks
        partial = match.partial
        if partial is not None:
            [state] = index.states(Tier.HOST, partial.node, partial.block, partial.block + 1)
            is_all = partial.node.is_tail and (
                len(partial.node.tokens) == partial.num_tokens * TOKEN_BYTES
            )
            if state is CopyState.READY and (group.has_prefixes or is_all):
                num_tokens += partial.num_tokens
                node, stop = partial.node, partial.block + 1
        return _OnHost(num_tokens, node, stop)

    def _hold(
        self, prompt: Prompt, lookups: dict[int, GroupLookup], promise: HostPromise, num_tokens: int
    ) -> None:
        """Protect for `promise` the blocks of the first `num_tokens` tokens in all cache groups.

        `lookups` has the prompt's lookup for each cache group, by the group's number. The caller
        has just checked, with no await since then, that the host has these blocks.
        """
        promise.num_tokens = num_tokens
        promise.parts = [HeldRun(0, array("i")) for _ in self._groups]
        here = self._on_host(prompt, num_tokens)
        if self._main is not None and here.node is not None and here.stop:
            index = self._service.index
            promise.lease = lease = index.hold(here.node, here.stop)
            index.count_hit(lease)
            self._service.tiers.copies.write_down(lease.node, here.stop)
            slots = index.slots(Tier.HOST, lease.node, 0, here.stop)
            promise.parts[self._main] = HeldRun(0, array("i", slots.tobytes()))
        for number, lookup in lookups.items():
            first, blocks = self._tiers[number].hold(lookup, num_tokens)
            promise.held[number] = blocks
            promise.parts[number] = HeldRun(first, array("i", [block.slot for block in blocks]))
        self._recount(promise, [len(part.slots) for part in promise.parts])

    @asynccontextmanager
    async def _room(self, num_blocks: list[int]) -> AsyncIterator[HostPromise]:
        """Wait until `num_blocks` more host blocks can be protected; yield a promise for them.

        `num_blocks` has a number for each cache group. The promise is released if the `async with`
        block raises.
        """
        promise = HostPromise(0)
        async with self._turn:
            while any(self._promised_blocks) and not self._fits(num_blocks):
                self._freed.clear()
                await self._freed.wait()
            self._promises.add(promise)
            self._recount(promise, num_blocks)
        try:
            yield promise
        except BaseException:  # a cancellation too: no caller has the promise
            self._release(promise)
            raise

    def _fits(self, num_blocks: Sequence[int]) -> bool:
        sums = zip(self._promised_blocks, num_blocks, self._max_promised, strict=True)
        return all(promised + more <= most for promised, more, most in sums)

    def _recount(self, promise: HostPromise, num_blocks: list[int]) -> None:
        for number, count in enumerate(num_blocks):
            before = promise.num_blocks[number] if promise.num_blocks else 0
            self._promised_blocks[number] += count - before
        promise.num_blocks = num_blocks
        self._freed.set()

    def _expire(self, promise: HostPromise) -> None:
        if promise.claim():
            self._release(promise)

    async def free(self, promise: HostPromise) -> None:
        """Release the host blocks of a promise that the request will not load.

        Args:
            promise: the promise. The caller must have ended it with `HostPromise.claim`, which
                returned True.
        """
        self._release(promise)

    async def loaded(self, promise: HostPromise, failed: Sequence[Sequence[int]]) -> None:
        """Release the host blocks of a promise after its load.

        If the prompt was claimed by a ticket and all its blocks were loaded, the prefill node gets
        an acknowledgement.

        Args:
            promise: the promise with the loaded blocks.
            failed: for each cache group, the numbers of the prompt's blocks that were not loaded;
                () if all blocks were loaded.
        """
        self._release(promise)
        handoff = self._service.handoff
        if promise.ticket is not None and not failed and handoff is not None:
            handoff.stats.claimed_prompts += 1
            acknowledging = acknowledge(handoff.tickets, promise.ticket)
            self._service.tiers.work.start(acknowledging, "tierkv-acknowledge")

    def _release(self, promise: HostPromise) -> None:
        self._promises.discard(promise)
        if promise.timer is not None:
            promise.timer.cancel()
        self._release_copies(promise)
        self._recount(promise, [0] * len(self._groups))

    def _release_copies(self, promise: HostPromise) -> None:
        if promise.lease is not None:
            self._service.index.release(promise.lease)
            promise.lease = None
            self._service.tiers.work.capacity_changed()
        for number, blocks in promise.held.items():
            self._tiers[number].blocks.release(blocks)
        promise.held = {}

    # Saves

    async def reserve(self, counts: Sequence[int]) -> list[list[int]]:
        """Reserve host slots for saves, if necessary by evicting blocks.

        Args:
            counts: by cache group, the number of slots wanted.

        Returns:
            The reserved slots by cache group; fewer than wanted if not enough could be freed.
        """
        found = [
            self._reserve(count)
            if number == self._main
            else self._tiers[number].blocks.allocate(max(count, 0))
            for number, count in enumerate(counts)
        ]
        self._note_reserved(found)
        return found

    def _note_reserved(self, slots: Sequence[Sequence[int]]) -> None:
        generation = self._service.deletions.generation
        for group, some in enumerate(slots):
            self._reserved_in.update(dict.fromkeys([(group, slot) for slot in some], generation))

    def _reserve(self, count: int) -> list[int]:
        tiers, found = self._service.tiers, []
        count = min(count, tiers.eviction.available(Tier.HOST))
        if count > 0:
            with suppress(OutOfBlocksError):
                found = tiers.eviction.acquire(Tier.HOST, count).tolist()
        for slot in found:
            self._lent[slot] = np.array([slot], np.int32)
            tiers.slots.lend(Tier.HOST, self._lent[slot])
        return found

    async def keep(self, saves: Sequence[tuple[Prompt, Sequence[Copied]]]) -> Kept:
        """Add blocks that the engine has copied to the host, so that lookups find them.

        A block is refused if the prompt's block before it has been evicted from the index, or if
        the cache was emptied after the block's slot was reserved.

        Args:
            saves: each prompt with its copied blocks.

        Returns:
            The number of added blocks of each prompt, and the host slots that were not needed.
        """
        num_blocks = [0] * len(saves)
        unused: list[list[int]] = [[] for _ in self._groups]
        for number, (prompt, copied) in enumerate(saves):
            if self._are_of_old(copied):
                for some in copied:
                    unused[some.group] += some.slots
                continue
            for some in copied:
                slots = np.frombuffer(some.slots, np.int32)
                if some.group == self._main:
                    count, left = self._keep(prompt, some.positions[0], slots, some.external_ids)
                else:
                    self._note_names(prompt, some.group, some.positions, some.external_ids)
                    count, left = self._tiers[some.group].keep(prompt, some.positions, some.slots)
                num_blocks[number] += count
                unused[some.group] += left
        for stream, saved in self._publishes.values():
            stream.advance(saved.grow())
        self._note_reserved(unused)
        return Kept(tuple(num_blocks), tuple(map(tuple, unused)))

    def _are_of_old(self, copied: Sequence[Copied]) -> bool:
        """Return True if all values were deleted after one of the slots was reserved.

        The slots are also removed from the record of reserved slots.
        """
        generation, is_of_old = self._service.deletions.generation, False
        for some in copied:
            for slot in some.slots:
                is_of_old |= self._reserved_in.pop((some.group, slot), generation) != generation
        return is_of_old

    def _keep(
        self, prompt: Prompt, first: int, slots: Ids, names: Sequence[ExternalId | None]
    ) -> tuple[int, tuple[int, ...]]:
        index, tiers = self._service.index, self._service.tiers
        match = index.match(prompt, first * prompt.block_size)
        if match.num_blocks < first:
            return 0, tuple(slots.tolist())
        lease = index.hold(match.node, first)
        stop = min(first + len(slots), prompt.num_blocks)
        owned = np.ones(len(slots), np.bool_)
        if stop > first:
            refused = index.insert(Tier.HOST, lease, prompt, stop, slots[: stop - first])
            owned[list(refused)] = False
            if names:  # the index computes each key once, the prompt once for each save
                self._name(index.digests(lease.node, stop, start=first), names)
            tiers.events.publish(CacheEventKind.STORED, "host", lease.node, first, stop)
        end = lease.node
        if first + len(slots) > stop:
            end, is_new = index.insert_tail(Tier.HOST, lease, prompt, int(slots[-1]))
            owned[-1] = is_new
            if is_new:
                tiers.events.publish(CacheEventKind.STORED, "host", end, stop, stop + 1)
        for slot in slots[owned].tolist():
            tiers.slots.unlend(Tier.HOST, self._lent.pop(slot))
        tiers.copies.write_down(end, end.end)
        index.release(lease)
        tiers.work.capacity_changed()
        return len(slots), tuple(slots[~owned].tolist())

    def _note_names(
        self,
        prompt: Prompt,
        group: int,
        positions: Iterable[int],
        names: Sequence[ExternalId | None],
    ) -> None:
        """Record the engine's names of blocks, because later events carry these names."""
        if not names:
            return
        if group == self._main:
            keys: Sequence[StoredKey] = self._service.tiers.copies.prompt_keys(prompt)
        else:
            keys = self._tiers[group].begin_lookup(prompt).keys
        pairs = [pair for pair in zip(positions, names, strict=True) if pair[0] < len(keys)]
        self._name((keys[at].digest for at, _ in pairs), [name for _, name in pairs])

    def _name(self, digests: Iterable[bytes], names: Iterable[ExternalId | None]) -> None:
        for digest, name in zip(digests, names, strict=False):
            if name is not None:
                self._service.events.note_name(digest, name)

    async def name_blocks(self, prompt: Prompt, names: Sequence[ExternalId | None]) -> None:
        """Record the engine's names of cached blocks, so that the engine finds the blocks by name.

        Only blocks of `prompt` that the index has on the host get a name.

        Args:
            prompt: the prompt of the named blocks.
            names: the engine's name of each block, from the first on; None for a block without a
                name.
        """
        index = self._service.index
        for first in range(0, len(names), HASHED_BLOCKS):
            stop = min(first + HASHED_BLOCKS, len(names))
            match = index.match(prompt)
            stop = min(stop, match.num_blocks)
            if self.names is None or stop <= first:
                return
            digests = index.digests(match.node, stop, start=first)
            self._name(digests, names[first:stop])
            self.names.add(digests, names[first:stop])
            await asyncio.sleep(0)  # other tasks run in between

    async def free_reserved(self, slots: Sequence[Iterable[int]]) -> None:
        """Free reserved host slots that were not used for saves.

        Args:
            slots: by cache group, the slots; no copy may still write them.
        """
        for number, some in enumerate(slots):
            if number != self._main:
                self._tiers[number].blocks.free(list(some))
                continue
            tiers, free = self._service.tiers, list(some)
            for slot in free:
                tiers.slots.unlend(Tier.HOST, self._lent.pop(slot))
            tiers.slots.free(Tier.HOST, np.array(free, np.int32))
            tiers.work.capacity_changed()

    # Sessions

    async def keep_session(self, session: str, prompt: Prompt, ttl_s: float) -> None:
        """Mark the host blocks of a session: they are evicted after all other host blocks.

        Only blocks of full attention layers, which are in the index, are marked. A later call for
        the same session replaces its mark. Beyond 10,000 sessions, the mark of the session with the
        oldest call ends.

        Args:
            session: id of the conversation.
            prompt: the last turn's prompt and answer; only cached blocks are marked.
            ttl_s: seconds until the mark ends; 0 to end it now.
        """
        pins = self._service.tiers.pins
        self._sessions.pop(session, None)
        if ttl_s <= 0 or self._main is None:
            pins.unpin(_SESSION + session)
            return
        pins.pin(_SESSION + session, prompt, ttl_s, is_soft=True)
        self._sessions[session] = None
        if len(self._sessions) > _MAX_SESSIONS:
            oldest, _ = self._sessions.popitem(last=False)
            pins.unpin(_SESSION + oldest)

    # Tickets

    async def publish(self, number: int, prompt: Prompt, ticket_id: str) -> Published:
        """Store the blocks of `prompt` as the engine saves them, then a ticket for them.

        Blocks that storage has already are not stored again. The ticket, by which another engine
        finds the prompt, is written after `finish` was called with the same number.

        Args:
            number: the engine's number of this publish, which `finish` and `fail` name.
            prompt: the prompt that another engine will claim.
            ticket_id: id by which the other engine asks for the ticket.

        Returns:
            The published ticket.

        Raises:
            HandoffError: there is no storage, or not all blocks of the prompt were saved.
            DuplicateRequestError: nodes can still claim a different prompt by this ticket id.
        """
        service, promise = self._service, HostPromise(0)
        handoff, deadline_s = service.require_handoff(), service.handoff_settings.publish_deadline_s
        keys = [] if self._main is None else service.tiers.copies.prompt_keys(prompt)
        saved = SavedPrompt(self, service, self._tiers, keys, prompt, promise)
        stream = PublishStream(handoff, saved, ticket_id, deadline_s=deadline_s)
        self._promises.add(promise)
        self._publishes[number] = stream, saved
        try:
            await service.check_ticket_is_free(ticket_id, prompt)
            stream.advance(saved.grow())
            return await stream.run()
        finally:
            del self._publishes[number]
            self._release(promise)

    async def finish(self, number: int, first_tokens: Sequence[int]) -> None:
        """Let a publish write its ticket. Called after the last save of the publish's prompt.

        Args:
            number: the number that `publish` was called with.
            first_tokens: tokens that follow the prompt, for the ticket.
        """
        if number in self._publishes:
            stream, _ = self._publishes[number]
            stream.finish(first_tokens)

    async def fail(self, number: int, reason: str) -> None:
        """End a publish without a ticket, because the rest of its prompt will not be saved.

        Args:
            number: the number that `publish` was called with.
            reason: the sentence for the error that `publish` then raises.
        """
        if number in self._publishes:
            stream, _ = self._publishes[number]
            stream.fail(reason)

    def hold_saved(self, promise: HostPromise, prompt: Prompt) -> int:
        """Protect from eviction the full blocks of `prompt` that the index has on the host now.

        Args:
            promise: holds the lease on the protected blocks until the publish ends. A later call
                replaces the lease only if more blocks are on the host.
            prompt: the prompt that is published.

        Returns:
            Number of leading prompt tokens in protected blocks.
        """
        size, before = prompt.block_size, promise.lease
        held = before.num_blocks if before is not None else 0
        here = self._on_host(prompt, prompt.num_blocks * size)
        num_blocks = here.num_tokens // size if here.node is not None else 0
        if here.node is None or num_blocks <= held:
            return held * size
        promise.lease = self._service.index.hold(here.node, num_blocks)
        if before is not None:
            self._service.index.release(before)
        return num_blocks * size

    def hold_whole(self, promise: HostPromise, prompt: Prompt) -> None:
        """Protect from eviction all host blocks that `prompt` needs, in every cache group.

        Args:
            promise: holds the protected blocks until the publish ends.
            prompt: the prompt that is published.

        Raises:
            HandoffError: a block is not on the host.
        """
        lookups, whole = self._begin_lookups(prompt), prompt.num_tokens
        found = self._longest_here(lookups, self._on_host(prompt, whole).num_tokens)
        if found < whole:
            raise HandoffError(
                HandoffProblem.UNAVAILABLE.value,
                f"only {found} of {whole} prompt tokens are in host memory for every group",
            )
        self._release_copies(promise)
        self._hold(prompt, lookups, promise, whole)

    # The whole host tier

    async def stats(self) -> Stats:
        return self._service.stats()

    async def verify(self) -> list[str]:
        """Return a sentence for each contradiction in the host tier's records; [] if there is none.

        The records are those of protected blocks, of promises, and of the engine's own names of
        blocks.
        """
        leases = sum(one.lease is not None for one in self._promises)
        wrong = self._service.verify(num_leases=leases)
        counted = [one.num_blocks for one in self._promises if one.num_blocks]
        sums = [sum(of_group) for of_group in zip(*counted, strict=True)]
        if (sums or [0] * len(self._groups)) != self._promised_blocks:
            wrong.append(f"{self._promised_blocks} blocks are promised, not {sums}")
        for number, tier in self._tiers.items():
            held = sum(len(one.held.get(number, ())) for one in self._promises)
            wrong += tier.findings(held)
        gone = self.names.digests - self._host_digests() if self.names is not None else set()
        if gone:
            wrong.append(f"{len(gone)} blocks have a name and are not on the host")
        return wrong

    def _host_digests(self) -> set[bytes]:
        index, found = self._service.index, set[bytes]()
        for node in index.spaces.nodes():
            if not node.is_tail:
                keys = index.digests(node, node.end, start=node.start)
                states = index.states(Tier.HOST, node, node.start, node.end)
                found |= {key for key, state in zip(keys, states, strict=True)
                          if state is CopyState.READY}  # fmt: skip
        return found

    async def forget(self) -> int:
        """Remove all unused blocks of all cache groups from the host.

        Return how many blocks are left.
        """
        if self.names is not None:
            self.names.clear()  # also names of blocks that are in use and stay
        return await self._service.forget()

    async def release_all(self) -> None:
        """Release all promises and reserved slots, because the engine closes its cache.

        The method first waits, for at most 5 s, until running copies and writes to storage have
        ended.
        """
        work = self._service.tiers.work
        try:
            async with asyncio.timeout(_CLOSING_S):
                while work.num_tasks:
                    await work.next_change()
        except TimeoutError:
            log.warning("the last saved blocks were not all stored within %g s and are lost from "
                "storage",
                        _CLOSING_S)  # fmt: skip
        for stream, _ in self._publishes.values():
            stream.fail("the engine's cache was closed")
        for promise in list(self._promises):
            self._release(promise)
        groups = range(len(self._groups))
        await self.free_reserved(
            [[*self._lent] if number == self._main else [] for number in groups]
        )
        self._listening.close()
        self._service.flat_blocks = ()


@dataclass(slots=True, eq=False)
class SavedPrompt:
    """The host blocks of a prompt that an engine is saving, for a publish that runs meanwhile.

    The publish stores the blocks for other nodes while the engine saves further blocks. The main
    cache group is the first one with full attention, whose blocks are in the index.

    Attributes:
        side: the host tier that has the blocks.
        service: the service whose index has the blocks of the main cache group.
        tiers: the host tiers of the other cache groups, by number of the group.
        keys: keys of the prompt's blocks in the main cache group; empty if there is no such group.
        prompt: the prompt that is published.
        promise: protects the prompt's host blocks from eviction until the publish ends.
    """

    side: HostSide
    service: Service
    tiers: Mapping[int, GroupTier]
    keys: Sequence[StoredKey]
    prompt: Prompt
    promise: HostPromise

    @property
    def lease(self) -> Lease | None:
        """The lease on the prompt's blocks in the index; None if no block is protected."""
        return self.promise.lease

    def grow(self) -> int:
        """Protect from eviction the full blocks of the prompt that are on the host by now.

        Return the number of tokens in the protected blocks.
        """
        return self.side.hold_saved(self.promise, self.prompt)

    def check_whole(self) -> None:
        """Protect from eviction all blocks of the prompt, including a partial last block.

        Raises:
            HandoffError: a block is not on the host.
        """
        self.side.hold_whole(self.promise, self.prompt)

    def offer(self, _ticket_id: str, _ledger: TicketLedger) -> None:
        """Do nothing: other nodes fetch an engine's blocks from storage, not from its memory."""

    def show(self, start: int, stop: int) -> None:
        """Do nothing, because all saved blocks are on the host already.

        Other kinds of `PromptBlocks` copy blocks from the device to the host in this method, for
        claiming nodes to read.
        """

    @asynccontextmanager
    async def on_host(self, blocks: range, _after: Sequence[Event]) -> AsyncIterator[Ids]:
        """Protect `blocks` from eviction, and yield their host slots.

        The protection lasts until the `with` block ends, even if the promise ends before. The
        events are ignored, because saved blocks are complete.
        """
        index, lease = self.service.index, self.promise.lease
        assert lease is not None, "blocks are published that are held"
        slots = index.slots(Tier.HOST, lease.node, blocks.start, blocks.stop)
        held = index.hold_as_is(lease.node)
        try:
            yield slots
        finally:
            index.release(held)
            self.service.tiers.work.capacity_changed()

    async def store_rest(self) -> None:
        """Store the prompt's blocks of all cache groups except the main one, if storage lacks them.

        Raises:
            StoreUnavailableError: a block was not stored.
        """
        for number, blocks in self.promise.held.items():
            await self.tiers[number].store_missing(blocks)


def _problem_of(lookups: dict[int, GroupLookup]) -> str | None:
    return next((lookup.problem for lookup in lookups.values() if lookup.problem), None)


def _answer(answered: asyncio.Future[str | None], problem: str | None) -> None:
    if not answered.done():
        answered.set_result(problem)
