"""Host and Storage tiers for an engine that has its own device blocks and block tables.

The engine may reuse a device block as soon as no running plan copies it (`EngineCache.fence`).

    engine's thread                     service's thread              engine's thread, in each rank
    lookup(key)  None, or Found  <----  fetches blocks from storage,
                                        leases them on the host
    load(key, blocks)  Plan  ------------ in the engine's own step ->  start_loads(plan, after)
    save(key, blocks)  Plan  ------------ in the engine's own step ->  start_saves(plan, after)
    poll(finished)  <--------------------------------------------- -   finished()
                                   -->  lookups find saved blocks;
                                        they are stored and published

A plan lists the host slots and device blocks to copy between. The engine records an event on its
stream where it starts the copies of a plan, and the copies wait for this event: a save never copies
what a later step writes.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

import msgspec
import numpy as np

from tierkv.cache.groups import CacheGroup, GroupKind, as_groups, main_group
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.cache.layout import Layout
from tierkv.cache.shards import Shard
from tierkv.embed.exchange import Call
from tierkv.embed.external import NodeHost
from tierkv.embed.host_names import HostNames, num_leading
from tierkv.embed.host_side import (
    Copied,
    EngineCacheSettings,
    HostPromise,
    HostSide,
    HostSizes,
    Kept,
)
from tierkv.embed.thread import EmbedSettings, ServiceThread
from tierkv.errors import BadRequestError, ConfigError, DeviceFailedError, TierKVError
from tierkv.gpu.cpu import CpuDevice
from tierkv.observe import Stats
from tierkv.pd.handoff import Published
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.ranks.link import Plan
from tierkv.ranks.memory import SharedCpuDevice, SharedSlots, side_by_side
from tierkv.ranks.worker_planes import Finished, RankSocket, WorkerPlanes
from tierkv.sched.events import CacheEvent, ExternalId
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.service.kv_events import EventsSection
from tierkv.storage.protocol import Store
from tierkv.transfer.tier import StorageOptions

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

_CLOSE_S = 60.0
_LAST_REPORTS_S = 1.0  # ranks that are not closing send no report
_ID_BYTES = 4  # of a block or slot in a plan
_MAX_CALLS = 1 << 20  # only this cache makes calls, and promises are bounded


@dataclass(slots=True)
class Found:
    """The blocks that a lookup has found and that can be loaded. Immutable.

    Attributes:
        num_tokens: number of prompt tokens that can be loaded, after those that the engine has in
            device blocks.
        first_tokens: first output tokens, from the ticket of the node that computed the prompt; ()
            without a ticket.
        problem: the error that prevented more tokens from being found; None without an error.
        blocks: for each cache group, the numbers of the prompt's blocks to load. Block n has the
            tokens from n * block_size on, with the cache group's own block size.
        num_there: number of the prompt's leading tokens on the host, including those that the
            engine also has in device blocks.
        storage_tokens: number of tokens that this lookup fetched from storage. They are the last of
            the found tokens. Always 0 with a `NodeHost`.
    """

    num_tokens: int
    first_tokens: tuple[int, ...] = ()
    problem: str | None = None
    blocks: tuple[range, ...] = field(default=(), compare=False)
    num_there: int = field(default=0, compare=False)
    storage_tokens: int = field(default=0, compare=False)


@dataclass(slots=True)
class Polled:
    """The copies and publishes that have ended since the last poll.

    Attributes:
        loaded: (key, failed) for each load that has ended, with the key of its request. If the load
            succeeded, failed is (). Otherwise failed has, for each cache group, the numbers of all
            prompt blocks of the load; the device blocks for them may hold any bytes.
        saved: keys of requests that have no running save any more: their device blocks may be
            reused.
        stored: (key, n) for each save that has succeeded, with the key of its request. Lookups now
            find n blocks of the save, counted over all cache groups.
        published: (key, result) for each publish that has ended: the ticket, or the error that
            prevented it.
    """

    loaded: list[tuple[str, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    stored: list[tuple[str, int]] = field(default_factory=list)
    published: list[tuple[str, Published | TierKVError]] = field(default_factory=list)


class LocalHost:
    """The host tier of an `EngineCache` in this process, on a thread of its own.

    `NodeHost` has the same methods for a host tier in another process.

    Args:
        build: makes the service; called on the thread.
        sizes: cache groups and numbers of host slots.
        settings: limits of the host tier.
    """

    def __init__(
        self,
        build: Callable[[], Service],
        sizes: HostSizes,
        settings: EngineCacheSettings,
    ) -> None:
        # No descriptor for ranks to keep open: this process owns the host memory.
        self.life: int | None = None
        self._thread = ServiceThread(build, EmbedSettings(max_calls=_MAX_CALLS))
        self.calls = self._thread.exchange
        self._sizes = sizes
        self._settings = settings

    @property
    def is_open(self) -> bool:
        """True if the host tier answers calls."""
        return self._thread.is_open

    def open(self, _fingerprint: Fingerprint, _groups: Sequence[CacheGroup]) -> None:
        """Start the thread, and return when the host memory is allocated.

        Args:
            _fingerprint: ignored; `sizes` has the fingerprint.
            _groups: ignored; `sizes` has the cache groups.

        Raises:
            ConfigError: a setting is wrong, or there is too little memory.
            StoreUnavailableError: the store cannot be used.
        """
        self._thread.open()
        sizes, settings = self._sizes, self._settings

        async def begin(service: Service) -> HostSide:
            return HostSide(service, sizes, settings)

        opening = self._thread.run("begin", begin)
        try:
            self._side: HostSide = opening.wait(_CLOSE_S)
        except BaseException:  # Ctrl-C too: `close` is not called after a failed `open`
            self._thread.close()
            raise
        self.slots, self.max_reserved = self._side.slots, self._side.max_reserved
        # The engine's ids of blocks of the first cache group of full attention; None without one.
        self.names: HostNames | None = self._side.names

    def call(
        self,
        method: Callable[[HostSide, *Ts], Awaitable[T]],
        *args: *Ts,
    ) -> Call[T]:
        """Call a method of the host tier on its thread. Never blocks.

        Args:
            method: an asynchronous method of `HostSide`.
            args: arguments of the method.

        Returns:
            The call. Its result comes later.
        """
        work = partial(method, self._side, *args)
        return self.calls.submit(method.__name__, "", work)

    def take_events(self) -> list[CacheEvent]:
        """Return the cache events (a block was stored, evicted ...) since the last call."""
        return self._side.take_events()

    def close(self) -> None:
        """Release all blocks and slots of the engine, and end the thread.

        Call this only after all ranks have stopped copying.
        """
        try:
            self.call(HostSide.release_all).wait(_CLOSE_S)
        finally:
            self._thread.close()


@dataclass(slots=True, eq=False)
class _Part:
    """The blocks of one cache group that a plan copies.

    Attributes:
        group: number of the cache group.
        positions: number of each block in the prompt.
        blocks: device block of each.
        slots: host slot of each.
        external_ids: the engine's name of each; () if the engine passed no names.
    """

    group: int
    positions: Sequence[int]
    blocks: array[int]
    slots: array[int]
    external_ids: tuple[ExternalId | None, ...] = ()


@dataclass(slots=True, eq=False)
class _Publish:
    ticket: str
    number: int
    first_tokens: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class _RequestState:
    """State of one request of the engine.

    Attributes:
        ticket: id of the ticket that the lookups wait for; None without one.
        call: the running lookup; None without one.
        promise: the host blocks that a lookup has found and protected from eviction.
        nothing: the result of the last lookup if it found no block. Lookups return it again,
            without a search, until `asks_again_at` (seconds of the monotonic clock).
        limit: largest number of tokens that lookups may find, so that blocks whose load has failed
            are not found again; None for no limit.
        saved: by number of the cache group, how many leading blocks of `saved_of` are saved or
            being saved.
        saved_of: the prompt of the last save.
        num_saves: number of running saves.
        published: id of the last published ticket.
        is_of_old: True if the cache was reset after the request began; no block of the request is
            saved any more.
    """

    prompt: Prompt
    ticket: str | None
    call: Call[HostPromise] | None = None
    promise: HostPromise | None = None
    nothing: Found | None = None
    asks_again_at: float = 0.0
    limit: int | None = None
    saved: dict[int, int] = field(default_factory=dict)
    saved_of: Prompt | None = None
    num_saves: int = 0
    publish: _Publish | None = None
    published: str | None = None
    is_of_old: bool = False

    def goes_on_with(self, prompt: Prompt) -> bool:
        """Return True if `prompt` continues the prompt saved before, or is a beginning of it."""
        mine = self.saved_of
        if mine is None or mine is prompt:
            return True
        short, long = sorted((mine.tokens, prompt.tokens), key=len)
        if mine.space != prompt.space or not long.startswith(short):
            return False
        if mine.extras == prompt.extras:
            return True
        whole = min(mine.num_blocks, prompt.num_blocks)  # a tail may name fewer media
        return all(
            mine.extras.get(at) == prompt.extras.get(at)
            for at in mine.extras.keys() | prompt.extras.keys()
            if at < whole
        )

    def has_nothing_beyond(self, have_tokens: int) -> bool:
        """Return True if the last lookup found nothing, and it is too early for another one.

        After a preemption the result is False: the engine has only the first `have_tokens` tokens,
        and the host may have the blocks after them.
        """
        nothing = self.nothing
        is_so = nothing is not None and have_tokens >= nothing.num_there
        return is_so and time.monotonic() < self.asks_again_at


@dataclass(slots=True, eq=False)
class _Step:
    """A running plan: the ranks copy the blocks that it lists, all of one request.

    Attributes:
        parts: the plan's blocks, by cache group; a group without blocks has no part.
        missing: numbers of the ranks that have not reported the end of the plan.
        promise: the protected host blocks of a load; None for a save.
        problem: the first failure that a rank reported; None without one.
    """

    key: str
    known: _RequestState
    prompt: Prompt
    plan: Plan
    parts: list[_Part]
    missing: set[int]
    promise: HostPromise | None = None
    problem: str | None = None


class EngineCache:
    """Host and storage tiers for an engine that owns its device blocks.

    One thread, that of the engine's scheduler, must call all methods except `open`, `close` and
    `read_events`. All methods except `open`, `close`, `wait` and `wait_for_lookup` return within
    microseconds. In all methods, `key` is the engine's name of a request.
    """

    def __init__(  # noqa: PLR0913 - what a service is made of
        self,
        fingerprint: Fingerprint,
        groups: Sequence[CacheGroup | Layout],
        *,
        host_bytes: int = 0,
        cache: CacheSettings | None = None,
        node: NodeHost | None = None,
        store: Callable[[], Store | None] = lambda: None,
        planes: WorkerPlanes | None = None,
        ranks: RankSocket | None = None,
        settings: EngineCacheSettings | None = None,
        handoff: HandoffSettings | None = None,
        storage: StorageOptions | None = None,
        kv_events: EventsSection | None = None,
        name: str = "tierkv",
    ) -> None:
        """Build the cache; `open` starts it.

        Args:
            fingerprint: identity of the engine's blocks, with the layout of the main cache group.
                The main cache group is the first one of full attention; without full attention, the
                first one. Engines with equal fingerprints share stored blocks.
            groups: cache groups of the engine's layers, in the engine's order. A layout stands for
                a cache group of full attention. Prompts must have the main cache group's block
                size.
            host_bytes: bytes of the host tier.
            cache: settings of eviction, copies and fetches. Its sizes are ignored: `host_bytes`
                decides on the host tier, and there is no device tier.
            node: connection to another process that has the host tier and the store; None to have
                both in this process. With a node, `host_bytes`, `cache`, `store`, `handoff`,
                `kv_events` and `name` are ignored.
            store: returns the store, or None for no storage tier; called on the service's thread.
            planes: planes of the rank in this process. None if all ranks are in other processes.
            ranks: socket over which ranks in other processes get the host memory; None without such
                ranks.
            settings: limits of the host tier.
            handoff: settings of hand-off to other nodes (tickets).
            storage: options of the storage tier.
            kv_events: addresses at which cache events are published. The events have the engine's
                own block hashes if the engine passes these as external ids.
            name: name of this node.

        Raises:
            ConfigError: the fingerprint's layout is not that of the main cache group, there is no
                room for two blocks of each cache group, the ranks' layouts together are not a cache
                group's layout, or `planes`, `ranks` and `node` cannot be combined.
        """
        self.groups = as_groups(groups)
        self._main = main_group(self.groups)
        self.settings = settings or EngineCacheSettings()
        self._fingerprint = fingerprint
        self._layouts = [one.layout for one in self.groups]  # of host slots
        main = self.groups[self._main]
        is_alone = len(self.groups) == 1 and main.kind is GroupKind.FULL
        shards: Sequence[Layout] = ()
        num_ranks = 1 if ranks is None else ranks.num_ranks
        if ranks is not None:
            shards = _slices_of(main.layout, ranks.shards(0), storage) if is_alone else ()
            if shards:
                self._layouts = [side_by_side(shards)]
            ranks.check(self._layouts)
            if planes is not None:
                raise ConfigError(
                    "planes cannot be combined with ranks: a rank in this process "
                    "connects to the socket as every other rank does"
                )
        if (
            len(self.groups) > 1
            and storage is not None
            and {num_ranks, *storage.peer_tensor_parallel} > {num_ranks}
        ):
            log.warning(
                "peer_tensor_parallel has no effect for a model with several groups of layers: "
                "only blocks stored by engines of %d ranks are found",
                num_ranks,
            )
        if node is not None and shards:
            raise ConfigError(
                "with node=, the layout must be that of the node's host slots: pass "
                "side_by_side(shards) as the layout"
            )
        if node is None:
            sizes = HostSizes.of(fingerprint, self.groups, host_bytes, shards)

            def build() -> Service:
                return Service(
                    CpuDevice() if ranks is None else SharedCpuDevice(shards),
                    sizes.fingerprint,
                    sizes.settings(cache or CacheSettings()),
                    # Claims bring an engine's blocks from storage: no node reads its memory.
                    msgspec.structs.replace(handoff or HandoffSettings(), direct=DirectPath.OFF),
                    store(),
                    storage=storage,
                    name=name,
                    other_groups=sizes.other_groups(),
                    kv_events=kv_events,
                )

            self._host: LocalHost | NodeHost = LocalHost(build, sizes, self.settings)
        else:
            self._host = node
        self._planes = planes
        self._socket = ranks
        self._ranks = frozenset(range(num_ranks))
        self._numbers = itertools.count(1)
        self._known: dict[str, _RequestState] = {}
        self._steps: dict[int, _Step] = {}
        self._joined: dict[int, tuple[int, ...]] = {}  # by joined plan, its parts
        self._num_saving: Counter[str] = Counter()  # running saves, by key
        # By cache group: device blocks that running plans read or write. None: must be recounted.
        self._touched: list[set[int]] | None = None
        # By cache group: host slots reserved for saves.
        self._reserve = [array("i") for _ in self.groups]
        self._wanted: Call[list[list[int]]] | None = None
        # Copied blocks that `HostSide.keep` was not called with yet: key, prompt, blocks.
        self._copied: list[tuple[str, tuple[Prompt, list[Copied]]]] = []
        # Names of copied blocks of the main group, by the call that lets lookups find them.
        self._keeping: dict[Call[Any], set[ExternalId | None]] = {}
        # Names of the main group's blocks in running saves; the number of saves with each name.
        self._being_saved: Counter[ExternalId | None] = Counter()
        self._jobs: dict[Call[Any], list[str]] = {}  # the keys of each call
        self._polled = Polled()
        self.num_unsaved_blocks = 0  # blocks without a free host slot when they were saved

    # Opening and closing

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start the service's thread or connect to the node, and map the host memory.

        Raises:
            ConfigError: a setting is wrong, there is too little memory, or no node listens.
            StoreUnavailableError: the store cannot be used.
        """
        self._host.open(self._fingerprint, self.groups)
        try:
            if self._planes is not None:
                self._planes.attach(self._host.slots)
            self._refill()
            if self._wanted is not None:
                self._wanted.wait(_CLOSE_S)
                self._collect_reserve()
            if self._socket is not None:
                shared = [slots for slots in self._host.slots if isinstance(slots, SharedSlots)]
                self._socket.open(self._layouts, shared, life=self._host.life)
        except BaseException:  # Ctrl-C too: `close` is not called after a failed `open`
            self.close()
            raise

    def close(self) -> None:
        """Wait for running copies, release all blocks and memory, and end the service's thread.

        Blocks that the ranks have copied to the host are stored first, if the store accepts them
        within 5 s. A second call of `close` does nothing.
        """
        if not self._host.is_open:
            return
        if self._planes is not None:
            self._planes.close()
            self.poll()
        if self._socket is not None:
            if self._steps:  # ranks that close first, as vLLM's do, report the last copies
                self._socket.wait_until_lost(_LAST_REPORTS_S)
                self.poll()
            self._socket.close()
        for key in list(self._known):
            self._release(key, "the engine's cache was closed")
        self._host.close()

    # Looking up

    def lookup(
        self,
        key: str,
        prompt: Prompt,
        have_tokens: int = 0,
        *,
        ticket: str | None = None,
        promise_ttl_s: float | None = None,
        external_ids: Sequence[Sequence[ExternalId | None]] = (),
    ) -> Found | None:
        """Search host and storage for a request's blocks after its first `have_tokens` tokens.

        A lookup needs no device block, and may find the whole prompt. Found blocks stay on the host
        until they are loaded, `release` is called, or `promise_ttl_s` is over.

        Args:
            key: name of the request.
            prompt: prompt of the request.
            have_tokens: number of leading tokens that the engine has in device blocks.
            ticket: id of a ticket: the search waits for the ticket and the blocks that it names.
                None to wait for no ticket.
            promise_ttl_s: seconds for which found blocks are protected from eviction; None for
                `EngineCacheSettings.promise_ttl_s`.
            external_ids: for each cache group, the engine's names of the prompt's blocks from the
                first on; () for no names. Events about blocks that this lookup fetches carry these
                names.

        Returns:
            The found blocks. None while the search runs, or waits because too many host blocks are
                protected for other requests: call again in the next step.

        Raises:
            BadRequestError: external ids are not given for each cache group.
        """
        if external_ids and len(external_ids) != len(self.groups):
            raise BadRequestError(
                f"external_ids must have one sequence for each of {len(self.groups)} "
                f"groups, not {len(external_ids)}"
            )
        if self._socket is not None and self._socket.lost:
            return Found(0, problem=self._socket.failure)
        known = self._known_of(key, prompt, ticket)
        expires = self.settings.promise_ttl_s if promise_ttl_s is None else promise_ttl_s
        promise = known.promise
        if promise is None or promise.is_over:
            if known.has_nothing_beyond(have_tokens):
                return known.nothing
            promise = known.promise = self._ask(known, expires, external_ids)
            if promise is None:
                return known.nothing
        num_tokens = promise.num_tokens
        found = Found(
            max(num_tokens - have_tokens, 0),
            promise.first_tokens,
            promise.problem,
            tuple([group.needed(num_tokens, have_tokens) for group in self.groups]),
            num_tokens,
            promise.storage_tokens,
        )
        if not found.num_tokens:
            self._free(promise)
            known.promise = None
            known.nothing, known.asks_again_at = found, time.monotonic() + expires
        return found

    def _known_of(self, key: str, prompt: Prompt, ticket: str | None) -> _RequestState:
        known = self._known.get(key)
        if known is not None:
            is_same = known.prompt is prompt or known.prompt == prompt
            if is_same and known.ticket == ticket:
                return known
            self.release(key)
        known = self._known[key] = _RequestState(prompt, ticket)
        return known

    def _ask(
        self,
        known: _RequestState,
        promise_ttl_s: float,
        names: Sequence[Sequence[ExternalId | None]],
    ) -> HostPromise | None:
        """Start the lookup of request `known` if none runs; return its result once it has ended.

        The result is None while the lookup runs, and if the lookup failed. After a failure,
        `known.nothing` has the reason.
        """
        call = known.call
        if call is None:
            known.nothing = None
            known.call = call = self._host.call(
                HostSide.promise, known.prompt, known.ticket, promise_ttl_s, known.limit, names
            )
        if not call.is_done:
            return None
        known.call = None
        try:
            return call.result()
        except TierKVError as error:
            known.nothing = Found(0, problem=str(error))
            known.asks_again_at = time.monotonic() + promise_ttl_s
            return None

    def wait_for_lookup(self, key: str, timeout_s: float) -> None:
        """Block until the request's lookup has an answer.

        An engine that has nothing else to do calls this.

        Args:
            key: key of the request, as given to `lookup`.
            timeout_s: longest time to block, in seconds.
        """
        known = self._known.get(key)
        if known is not None and known.call is not None:
            with suppress(TierKVError):  # too late or refused: `lookup` returns the reason
                known.call.wait(timeout_s)

    @property
    def sees_host(self) -> bool:
        """True if `num_on_host` and `num_saved` count blocks; otherwise both return 0.

        False if the host tier is in another process, or if no cache group has full attention.
        """
        return self._host.names is not None

    def num_on_host(self, names: Sequence[ExternalId]) -> int:
        """Return the number of a prompt's leading blocks that are on the host now.

        The method does not wait for the service's thread. A block counts only if its name was
        passed to `save`, to the `lookup` that fetched it, or to `name_blocks`.

        Args:
            names: the engine's names of the prompt's blocks in the first cache group of full
                attention, from the first block on.
        """
        return self._num_leading(names, ())

    def num_saved(self, names: Sequence[ExternalId]) -> int:
        """Return the number of a prompt's leading blocks that are on the host or being saved.

        A block counts only if the engine has passed its name to this cache.

        Args:
            names: the engine's names of the prompt's blocks in the first cache group of full
                attention, from the first block on.
        """
        return self._num_leading(names, self._being_saved)

    def _num_leading(
        self, names: Sequence[ExternalId], saving: Collection[ExternalId | None]
    ) -> int:
        """Return how many leading blocks of `names` are on the host or in `saving`."""
        known, keeping = self._host.names, self._keeping
        if known is None:
            return 0
        if not keeping and not saving:
            return num_leading(names, known.__contains__)
        return num_leading(
            names,
            lambda name: (
                name in known or name in saving or any(name in some for some in keeping.values())
            ),
        )

    def name_blocks(self, prompt: Prompt, names: Sequence[ExternalId | None]) -> None:
        """Record the engine's ids of a prompt's host blocks, so that `num_on_host` counts them.

        The call is needed only for blocks that were fetched from storage without such an id.

        Args:
            prompt: the prompt.
            names: the engine's ids of the prompt's blocks in the first cache group of full
                attention, from the prompt's start; None for a block without an id.
        """
        self._host.call(HostSide.name_blocks, prompt, names)

    # Moving

    def load(
        self,
        key: str,
        block_ids: Sequence[Sequence[int]],
        first_blocks: Sequence[int] = (),
    ) -> Plan | None:
        """Return a plan that copies the host blocks found by `lookup` into device blocks.

        After one lookup, one load is possible. A partial block is copied as a whole block, in which
        only the prompt's tokens are valid.

        Args:
            key: key of the request.
            block_ids: for each cache group, a list of device blocks for consecutive blocks of the
                prompt; NO_BLOCK for a block that is not to be loaded. `Found.blocks` lists the
                blocks that can be loaded.
            first_blocks: for each cache group, the number of the prompt's block that the first
                entry of its list in `block_ids` is for; () if all lists begin with block 0.

        Returns:
            The plan, for the ranks; None if the found blocks are no longer protected, or there is
                nothing to load.

        Raises:
            DeviceFailedError: a rank is lost.
            BadRequestError: `lookup` did not find one of the blocks.
        """
        self._check_ranks()
        known = self._known.get(key)
        promise = None if known is None else known.promise
        given = self._given(block_ids, first_blocks)
        if known is None or promise is None or not given:
            return None
        parts = []
        for group, positions, blocks in given:
            held = promise.parts[group]
            first, stop = positions[0] - held.first, positions[-1] + 1 - held.first
            if first < 0 or stop > len(held.slots):
                raise BadRequestError(
                    f"blocks {positions[0]} to {positions[-1]} of group {group} cannot "
                    f"be loaded: lookup promised blocks {held.first} to "
                    f"{held.first + len(held.slots) - 1} to {key!r}"
                )
            slots = held.slots[first:stop]
            if len(slots) > len(positions):  # some positions have NO_BLOCK
                slots = array("i", [held.slots[at - held.first] for at in positions])
            parts.append(_Part(group, positions, blocks, slots))
        if not promise.claim():
            return None
        known.promise = None
        return self._begin(key, known, known.prompt, parts, promise)

    def save(  # noqa: PLR0913 - which blocks of what, where they are, and the ticket
        self,
        key: str,
        prompt: Prompt,
        block_ids: Sequence[Sequence[int]],
        first_blocks: Sequence[int] = (),
        *,
        ticket: str | None = None,
        first_tokens: Sequence[int] = (),
        external_ids: Sequence[Sequence[ExternalId | None]] = (),
    ) -> Plan | None:
        """Return a plan that copies computed blocks of `prompt` to the host.

        A partial last block is copied too. Lookups find the blocks once the copies are done. Blocks
        that this request has saved before are skipped, so the engine can pass all blocks in each
        step. If a block gets no host slot, because none is free, later blocks of its cache group
        are not copied now either.

        If `prompt` is neither a beginning nor a continuation of the prompt that was last saved
        under this key, a new request begins, and the old one is released first.

        Args:
            key: key of the request.
            prompt: the tokens of the blocks.
            block_ids: for each cache group, a list of device blocks for consecutive blocks of the
                prompt; NO_BLOCK for a block of the prompt that has no device block.
            first_blocks: for each cache group, the number of the prompt's block to which the first
                element of its list in `block_ids` belongs; () if all lists begin with block 0.
            ticket: id under which the prompt is published to other engines; None to publish
                nothing. Other engines can fetch saved blocks while later ones are computed. The
                save that reaches the prompt's end in the first cache group of full attention ends
                the publish, and `poll` then returns the ticket.
            first_tokens: first output tokens; only the save that reaches the prompt's end needs
                them.
            external_ids: for each list of `block_ids`, the engine's names of its blocks, used in
                events about the blocks; None for a block without a name. () for no names.

        Returns:
            The plan, for the ranks; None if there is nothing to copy.

        Raises:
            DeviceFailedError: a rank is lost.
            BadRequestError: the blocks do not match the prompt or the cache groups.
        """
        self._check_ranks()
        given = self._given(block_ids, first_blocks)
        names = [tuple(of_group) for of_group in external_ids]
        if names and [len(one) for one in names] != [len(ids) for ids in block_ids]:
            raise BadRequestError(
                f"external_ids must have one entry for each block id: "
                f"{[len(one) for one in names]} entries for "
                f"{[len(ids) for ids in block_ids]} blocks"
            )
        self._check_saves(key, prompt, given)
        known = self._known.get(key)
        if known is not None and not known.goes_on_with(prompt):
            self._release(key, "another prompt is saved under its request's key")
            known = None
        if known is None:
            known = self._known[key] = _RequestState(prompt, None)
        known.saved_of = prompt
        parts = [
            part
            for group, positions, blocks in given
            if not known.is_of_old
            and (part := self._saved_part(known, prompt, group, positions, blocks))
        ]
        for part in parts if names else ():
            first = first_blocks[part.group] if first_blocks else 0
            of_group = names[part.group]
            part.external_ids = tuple([of_group[at - first] for at in part.positions])
        plan = None
        if parts:
            known.num_saves += 1
            self._num_saving[key] += 1
            self._being_saved.update(self._names_in(parts))
            plan = self._begin(key, known, prompt, parts)
        self._refill()
        if ticket is not None and ticket != known.published:
            publish = known.publish
            if publish is None:
                publish = known.publish = self._begin_to_publish(key, prompt, ticket)
            if self._reaches_end(prompt, block_ids, first_blocks):
                publish.first_tokens = tuple(first_tokens)
            self._finish_if_saved(known)
        return plan

    def _check_saves(
        self, key: str, prompt: Prompt, given: Sequence[tuple[int, Sequence[int], array[int]]]
    ) -> None:
        if prompt.block_size != self.groups[self._main].block_size:
            raise BadRequestError(
                f"the prompt of {key!r} has blocks of {prompt.block_size} tokens, but "
                f"group {self._main} has blocks of "
                f"{self.groups[self._main].block_size}: make the prompt with that "
                "block size"
            )
        for group, positions, _ in given:
            whole = -(-prompt.num_tokens // self.groups[group].block_size)
            if positions[-1] >= whole:
                raise BadRequestError(
                    f"block {positions[-1]} of group {group} cannot be saved: the prompt "
                    f"of {key!r} has blocks 0 to {whole - 1}"
                )
            is_full = self.groups[group].kind is GroupKind.FULL
            if is_full and positions[-1] - positions[0] >= len(positions):
                raise BadRequestError(
                    f"the blocks of group {group} of {key!r} have a gap (a negative block "
                    "id): full attention needs every block"
                )

    def _saved_part(
        self,
        known: _RequestState,
        prompt: Prompt,
        group: int,
        positions: Sequence[int],
        blocks: array[int],
    ) -> _Part | None:
        """Choose blocks of one cache group to save now, and a free host slot for each.

        Blocks that were saved before are left out. If host slots are too few, the last blocks are
        left out. The chosen full blocks count as saved from now on. The result is None if no block
        is chosen.
        """
        full = prompt.num_tokens // self.groups[group].block_size
        saved = known.saved.get(group, 0)
        if positions[0] < saved:
            at = bisect_left(positions, saved)
            positions, blocks = positions[at:], blocks[at:]
        reserve = self._reserve[group]
        count = min(len(blocks), len(reserve))
        self.num_unsaved_blocks += len(blocks) - count
        if not count:
            return None
        slots = reserve[:count]
        del reserve[:count]
        # A tail is not a block of a longer prompt: it is saved again when it has grown.
        known.saved[group] = max(saved, min(positions[count - 1] + 1, full))
        return _Part(group, positions[:count], blocks[:count], slots)

    def join(self, plans: Sequence[Plan]) -> Plan:
        """Return one plan for the ranks that replaces all the given plans of saves.

        Ranks start one large copy faster than many small ones. If the joined copy fails, all of
        these saves have failed.

        Args:
            plans: one or more plans that `save` returned; none of them was joined before or sent to
                a rank.
        """
        if len(plans) == 1:
            return plans[0]
        first = plans[0]
        self._joined[first.number] = tuple([plan.number for plan in plans])
        if not first.groups:
            source, target = (plan.source for plan in plans), (plan.target for plan in plans)
            return Plan(first.number, first.kind, b"".join(source), b"".join(target))
        parts: list[tuple[list[bytes], list[bytes]]] = [([], []) for _ in first.groups]
        for plan in plans:
            at = 0
            for (sources, targets), count in zip(parts, plan.groups, strict=True):
                end = at + count * _ID_BYTES
                sources.append(plan.source[at:end])
                targets.append(plan.target[at:end])
                at = end
        return Plan(
            first.number,
            first.kind,
            b"".join(itertools.chain.from_iterable(sources for sources, _ in parts)),
            b"".join(itertools.chain.from_iterable(targets for _, targets in parts)),
            tuple([sum(of_group) for of_group in zip(*(p.groups for p in plans), strict=True)]),
        )

    def _begin_to_publish(self, key: str, prompt: Prompt, ticket: str) -> _Publish:
        number = next(self._numbers)
        call = self._host.call(HostSide.publish, number, prompt, ticket)
        self._jobs[call] = [key]
        return _Publish(ticket, number)

    def _given(
        self, block_ids: Sequence[Sequence[int]], first_blocks: Sequence[int]
    ) -> list[tuple[int, Sequence[int], array[int]]]:
        """Return (cache group, positions, device blocks) for each group, without NO_BLOCK ids."""
        if len(block_ids) != len(self.groups) or len(first_blocks) not in (0, len(block_ids)):
            raise BadRequestError(
                "block_ids and first_blocks must have one entry for each of "
                f"{len(self.groups)} groups, not {len(block_ids)} and "
                f"{len(first_blocks)}"
            )
        found = []
        for group, ids in enumerate(block_ids):
            first = first_blocks[group] if first_blocks else 0
            if first < 0:
                raise BadRequestError(
                    f"the first block of group {group} must be at least 0, not {first}"
                )
            blocks = ids.tolist() if isinstance(ids, np.ndarray) else ids
            positions: Sequence[int] = range(first, first + len(blocks))
            if blocks and min(blocks) < 0:
                positions = [at for at, block in zip(positions, blocks, strict=True) if block >= 0]
                blocks = [block for block in blocks if block >= 0]
            if blocks:
                found.append((group, positions, array("i", blocks)))
        return found

    def _reaches_end(
        self, prompt: Prompt, block_ids: Sequence[Sequence[int]], first_blocks: Sequence[int]
    ) -> bool:
        main = self._main
        first = first_blocks[main] if first_blocks else 0
        return first + len(block_ids[main]) >= prompt.num_blocks + bool(prompt.tail_tokens)

    def cancel(self, plan: Plan) -> None:
        """Cancel a plan that no rank has received.

        The blocks of a cancelled load can be looked up again, and those of a cancelled save can be
        saved again.
        """
        step = self._steps.pop(plan.number, None)
        if step is None:
            return
        self._touched = None
        if step.promise is not None:
            self._host.call(HostSide.free, step.promise)
        else:
            self._not_saved(step)
            self._save_over(step)

    def fence(self, block_ids: Iterable[int], group: int | None = None) -> tuple[int, ...]:
        """Return those device blocks of `block_ids` that a running plan still reads or writes.

        The engine may reuse the remaining ones.

        Args:
            block_ids: device blocks to check.
            group: number of the cache group of the blocks; None if all cache groups share one pool
                of blocks.
        """
        if self._touched is None:
            self._touched = [set() for _ in self.groups]
            for step in self._steps.values():
                for part in step.parts:
                    self._touched[part.group].update(part.blocks)
        touched = self._touched if group is None else [self._touched[group]]
        return tuple(block for block in block_ids if any(block in one for one in touched))

    def release(self, key: str) -> None:
        """Forget a request, and end the protection of the blocks that its lookup has found.

        A publish that has not reached the prompt's end fails. Running saves continue, and their
        blocks stay cached. Further calls do nothing.
        """
        self._release(key, "the request ended before its whole prompt was saved")

    def _release(self, key: str, reason: str) -> None:
        known = self._known.pop(key, None)
        if known is None:
            return
        publish = known.publish
        if publish is not None and publish.first_tokens is None:
            self._host.call(HostSide.fail, publish.number, reason)
        self._end_lookup(known)

    def end_lookup(self, key: str) -> None:
        """Cancel a request's lookup, and stop protecting the blocks that it has found.

        The request's saves and its publish continue.
        """
        known = self._known.get(key)
        if known is not None:
            self._end_lookup(known)

    def _end_lookup(self, known: _RequestState) -> None:
        call, promise = known.call, known.promise
        known.call = known.promise = None
        if call is not None:
            call.when_done(lambda: self._release_promise(call))
            call.cancel()
        if promise is not None:
            self._free(promise)

    def poll(self, finished: Iterable[Finished] = ()) -> Polled:
        """Return the copies and publishes that have ended since the last call.

        Args:
            finished: the reports of ranks in other processes about plans that have ended. The
                reports of a rank in this process are read without this argument.
        """
        for report in finished:
            self._report(report)
        for report in self._planes.finished() if self._planes is not None else ():
            self._report(report)
        if self._socket is not None and self._socket.lost:
            lost = self._socket.lost  # before the reports, which a rank sends before it is lost
            for report in self._socket.pop_reports():
                self._report(report)
            self._fail_lost(lost)
        self._keep_copied()
        self._collect_reserve()
        for call in self._host.calls.poll():
            if call in self._jobs:
                self._job_ended(call)
        polled, self._polled = self._polled, Polled()
        return polled

    # Calls about no single request

    def hold_calls(self) -> None:
        """Keep later calls back, until `flush` sends all of them to the service's thread at once.

        One wake-up of that thread in each step of the engine costs less than one for each call.
        """
        self._host.calls.holds = True

    def flush(self) -> None:
        """Send the calls that were made since the last `flush` to the service's thread.

        The engine's scheduler calls this once in each of its steps.
        """
        self._host.calls.flush()

    def wait(self, timeout_s: float) -> bool:
        """Block until the service has answered a call, for at most `timeout_s` seconds.

        An engine that has nothing else to do calls this method instead of calling `poll` in a loop.
        If there are answers that `poll` has not returned yet, the method returns at once.

        Returns:
            True if a call has been answered.
        """
        return self._host.calls.wait(timeout_s)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how long the engine took to compute prompt tokens.

        From this speed, later lookups decide if fetching blocks from storage is worth the wait.

        Args:
            num_tokens: number of prompt tokens computed.
            seconds: time that computing took.
        """
        self._host.call(HostSide.note_prefill, num_tokens, seconds)

    def keep_session(self, session: str, prompt: Prompt, ttl_s: float) -> None:
        """Keep a conversation's blocks on the host longer: other blocks are evicted before them.

        Args:
            session: id of the conversation.
            prompt: the last turn's prompt and answer; only blocks that were saved before are kept.
            ttl_s: seconds until the blocks are evicted in the usual order again; 0 ends the
                protection at once.
        """
        self._host.call(HostSide.keep_session, session, prompt, ttl_s)

    def read_events(self) -> list[CacheEvent]:
        """Return the cache events since the last call. Any thread may call this.

        Events are numbered. Beyond 4,096 unread events the oldest are dropped, which leaves a gap
        in the numbers.

        Raises:
            BadRequestError: the host tier is in another process, which publishes the events.
        """
        return self._host.take_events()

    def stats(self) -> Call[Stats]:
        return self._host.call(HostSide.stats)

    def reset(self) -> Call[int]:
        """Remove from the host all blocks that no request uses.

        Values in the store remain. Running saves are discarded. For a request that has made a
        lookup or a save before the reset, nothing more is saved until the engine releases the
        request, and its ticket is not published.

        Returns:
            The call. Its result is the number of blocks left on the host.
        """
        for known in [*self._known.values(), *(step.known for step in self._steps.values())]:
            known.is_of_old = True
            publish = known.publish
            if publish is not None:
                self._host.call(
                    HostSide.fail,
                    publish.number,
                    "the cache was reset before the prompt was published",
                )
        return self._host.call(HostSide.forget)

    def verify(self) -> Call[list[str]]:
        """Compare a recount of host slots, leases and protected blocks with the cache's own counts.

        Returns:
            The call. Its result has a sentence for each difference; [] if there is none.
        """
        return self._host.call(HostSide.verify)

    # Inside

    def _begin(
        self,
        key: str,
        known: _RequestState,
        prompt: Prompt,
        parts: list[_Part],
        promise: HostPromise | None = None,
    ) -> Plan:
        blocks = b"".join([part.blocks for part in parts])
        slots = b"".join([part.slots for part in parts])
        counts: tuple[int, ...] = ()
        if len(self.groups) > 1:
            of_group = {part.group: len(part.blocks) for part in parts}
            counts = tuple([of_group.get(group, 0) for group in range(len(self.groups))])
        number = next(self._numbers)
        if promise is not None:
            plan = Plan(number, "load", slots, blocks, counts)
        else:
            plan = Plan(number, "offload", blocks, slots, counts)
        self._steps[number] = _Step(key, known, prompt, plan, parts, set(self._ranks), promise)
        self._touched = None
        return plan

    def _check_ranks(self) -> None:
        failure = None if self._socket is None else self._socket.failure
        if failure is not None:
            raise DeviceFailedError(failure)

    def _fail_lost(self, lost: dict[int, str]) -> None:
        for step in list(self._steps.values()):
            for rank in step.missing & lost.keys():
                self._report(Finished(step.plan.number, rank, lost[rank]))

    def _report(self, report: Finished) -> None:
        for number in self._joined.get(report.number, (report.number,)):
            step = self._steps.get(number)
            if step is None:
                continue
            step.missing.discard(report.rank)
            step.problem = step.problem or report.problem
            if not step.missing:
                self._end(step)

    def _end(self, step: _Step) -> None:
        del self._steps[step.plan.number]
        self._joined.pop(step.plan.number, None)
        self._touched = None
        if step.promise is not None:
            self._load_ended(step, step.promise)
        else:
            self._save_ended(step)

    def _load_ended(self, step: _Step, promise: HostPromise) -> None:
        failed: tuple[tuple[int, ...], ...] = ()
        if step.problem is not None:
            of_group = {part.group: tuple(part.positions) for part in step.parts}
            failed = tuple([of_group.get(group, ()) for group in range(len(self.groups))])
            log.warning("blocks of request %r were not loaded: %s", step.key, step.problem)
            step.known.limit = min(
                part.positions[0] * self.groups[part.group].block_size for part in step.parts
            )
        self._polled.loaded.append((step.key, failed))
        self._host.call(HostSide.loaded, promise, failed)

    def _save_ended(self, step: _Step) -> None:
        if step.problem is not None:
            log.warning(
                "blocks of request %r were not copied to host memory: %s", step.key, step.problem
            )
            self._not_saved(step)
        elif step.known.is_of_old:
            self._not_saved(step)
        else:
            copied = [
                Copied(part.group, part.positions, part.slots, part.external_ids)
                for part in step.parts
            ]
            self._copied.append((step.key, (step.prompt, copied)))
        self._save_over(step)

    def _not_saved(self, step: _Step) -> None:
        saved = step.known.saved
        for part in step.parts:
            self._reserve[part.group].extend(part.slots)
            saved[part.group] = min(saved.get(part.group, 0), part.positions[0])

    def _names_in(self, parts: Sequence[_Part]) -> list[ExternalId | None]:
        of_main = [part.external_ids for part in parts if part.group == self._main]
        return [name for names in of_main for name in names if name is not None]

    def _save_over(self, step: _Step) -> None:
        known = step.known
        for name in self._names_in(step.parts):
            self._being_saved[name] -= 1
            if not self._being_saved[name]:
                del self._being_saved[name]
        known.num_saves -= 1
        self._finish_if_saved(known)
        self._num_saving[step.key] -= 1
        if not self._num_saving[step.key]:
            del self._num_saving[step.key]
            self._polled.saved.append(step.key)

    def _finish_if_saved(self, known: _RequestState) -> None:
        publish = known.publish
        if publish is None or publish.first_tokens is None or known.num_saves:
            return
        number, first_tokens = publish.number, publish.first_tokens
        known.publish, known.published = None, publish.ticket
        self._keep_copied()
        self._host.call(HostSide.finish, number, first_tokens)

    def _keep_copied(self) -> None:
        if self._copied:
            copied, self._copied = self._copied, []
            call = self._host.call(HostSide.keep, [what for _, what in copied])
            self._jobs[call] = [key for key, _ in copied]
            self._keeping[call] = {
                name
                for _, (_, parts) in copied
                for part in parts
                if part.group == self._main
                for name in part.external_ids
            }

    def _job_ended(self, call: Call[Any]) -> None:
        keys = self._jobs.pop(call)
        self._keeping.pop(call, None)
        if call.kind == "keep" and call.error is None:
            kept: Kept = call.result()
            self._put_back(kept.unused)
            self._polled.stored.extend(zip(keys, kept.num_blocks, strict=True))
        elif call.kind == "publish":
            self._polled.published.append((keys[0], call.error or call.result()))

    def _refill(self) -> None:
        if self._wanted is not None:
            return
        limits = self._host.max_reserved
        counts = [limits[at] - len(one) for at, one in enumerate(self._reserve)]
        if any(2 * count > limits[at] for at, count in enumerate(counts)):
            self._wanted = self._host.call(HostSide.reserve, counts)

    def _collect_reserve(self) -> None:
        if self._wanted is not None and self._wanted.is_done:
            wanted, self._wanted = self._wanted, None
            if wanted.error is None:
                self._put_back(wanted.result())

    def _put_back(self, slots: Sequence[Iterable[int]]) -> None:
        for reserve, more in zip(self._reserve, slots, strict=True):
            reserve.extend(more)

    def _release_promise(self, call: Call[HostPromise]) -> None:
        if call.error is None:
            self._free(call.result())

    def _free(self, promise: HostPromise) -> None:
        if promise.claim():
            self._host.call(HostSide.free, promise)


def _slices_of(
    whole: Layout, shards: Sequence[Layout], storage: StorageOptions | None
) -> Sequence[Layout]:
    """Return the ranks' layouts if storage has a separate value for each rank's part of a block.

    Return () if storage has one value for a whole block. Raise ConfigError if the ranks' parts do
    not make up the whole block.
    """
    if len(shards) < 2 or whole.digest in (shards[0].digest, side_by_side(shards).digest):  # noqa: PLR2004 - one rank has all
        return ()
    scheme = storage.scheme if storage is not None else None
    if scheme is not None:
        made = [scheme.layout(Shard(rank, len(shards))) for rank in range(len(shards))]
        is_made = scheme.whole.digest == whole.digest and made == list(shards)
    else:
        is_made = sum(shard.block_bytes for shard in shards) == whole.block_bytes
    if not is_made:
        raise ConfigError(
            "the ranks' shards do not make up the cache's layout: pass the layout "
            "side_by_side(shards), or shards equal to the layout, or storage with a "
            "scheme that makes these shards"
        )
    return shards
