"""Admission of requests: the queue for device blocks, and the start of admitted requests.

`Admissions` lets a request wait until the device and the quota of the request's space (the part of
the index for one fingerprint) have room, or until another request has computed shared blocks.
`Starts` acquires the device slots of an admitted request and begins loads from the host. `Growth`
gives more blocks to running requests. `Admissions.pump` runs whenever blocks may have become free.
Blocks are fetched from storage before a request comes here.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import msgspec
import numpy as np

from tierkv.cache.history import History, HistoryEvent, MissCause
from tierkv.cache.index import Lease, Match
from tierkv.cache.keys import Prompt
from tierkv.cache.node import AgeCounts, Change, CopyState, Ids, Space, Tier
from tierkv.errors import (
    BadRequestError,
    OutOfBlocksError,
    OverQuotaError,
    RequestTooLargeError,
)
from tierkv.sched.events import CacheEventKind
from tierkv.sched.fair_queue import Waiting, WaitingLine
from tierkv.sched.fetch import Fetched
from tierkv.sched.request import (
    NOTHING,
    Computing,
    Matched,
    PromiseWait,
    Request,
    RequestSpec,
    Running,
)
from tierkv.sched.tiers import Tiers
from tierkv.transfer.mover import Movement

# Reasons why prompt tokens were not cached at an admission. Those of `MissCause` are found in the
# history of the first missing block. never_stored: the block has no history. in_flight: another
# request computes it. last_token: all tokens were cached, but one is computed for its logits.
# not_asked: the request does not use the cache.
MISS_REASONS = (
    "never_stored",
    *(fate.reason for fate in MissCause),
    "in_flight",
    "last_token",
    "not_asked",
)


def why_missed(
    spec: RequestSpec, match: Match, num_tokens: int, history: History, computing: Computing
) -> tuple[str, HistoryEvent | None]:
    """Return the reason why prompt tokens are not cached, and the event that removed them.

    The function is fast enough for every request: it computes at most one hash.

    Args:
        spec: the request.
        match: the cached blocks of its prompt at this moment.
        num_tokens: number of prompt tokens that were not found, at least 1.
        history: events of evicted and failed blocks.
        computing: the blocks that running requests compute.

    Returns:
        One of MISS_REASONS, and the last event of the first missing block. The event is None if
            none is known.
    """
    if not spec.uses_cache:
        return "not_asked", None
    if num_tokens == 1 and spec.needs_logits:
        return "last_token", None
    event = history.newest(spec.prompt, match.num_blocks)
    if event is not None:
        return event.fate.reason, event
    is_computed = computing.find(match, spec.prompt, spec.prompt.num_blocks) is not None
    return "in_flight" if is_computed else "never_stored", None


@dataclass(slots=True, eq=False)
class Load:
    """A copy of blocks [first, stop) of a path (a prefix in the index) from host to device.

    Attributes:
        lease: protects the path from eviction until `settled` is resolved.
        first: index of the first block on the path.
        stop: index after the last block.
        slots: device slots that the copy writes, int32 [stop - first].
        movement: the copy.
        above: loads of earlier blocks of the path. They settle first. If one of them fails, this
            load fails too, because a block is on the device only with its whole path.
        settled: resolved once the index is updated, also after a failed copy.
        below: loads of later blocks of the path.
        num_users: number of requests with these slots in their block tables.
        is_failed: True if the copy failed, or a load of `above`.
    """

    lease: Lease
    first: int
    stop: int
    slots: Ids
    movement: Movement
    above: tuple[Load, ...]
    settled: asyncio.Future[None]
    below: list[Load] = field(default_factory=list)
    num_users: int = 1
    is_failed: bool = False


@dataclass(frozen=True, slots=True)
class _Partial:
    """A cached block that shares only its first tokens with a prompt, to be copied for its request.

    Attributes:
        source: lease of the path whose last block is the shared one.
        target: the private device slot for the copy, int32 [1].
    """

    source: Lease
    target: Ids

    def slot(self, tier: Tier) -> Ids:
        return self.source.node.copies_on(tier).slots[-1:]

    @property
    def is_on_device(self) -> bool:
        return _ends_on_device(self.source)


def _ends_on_device(lease: Lease) -> bool:
    node = lease.node
    return node.device.leading(CopyState.READY, node.num_blocks - 1, node.num_blocks) == 1


class HostLoads:
    """The loads from the host to the device that have not ended.

    Attributes:
        used_by: for each request, the loads that write blocks of its table.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self.used_by: dict[Request, list[Load]] = {}
        # By the first slot that each load writes; loads of a path's earlier blocks come first.
        self._active: dict[int, Load] = {}

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; call only when no load runs."""
        return (
            [f"no request runs, but {len(self._active)} loads are listed"] if self._active else []
        )

    def of(self, slots: Ids) -> list[Load]:
        """Return the running loads whose first block is loaded into one of `slots`.

        Args:
            slots: device slots, int32 [n]. A load that begins before these slots and continues into
                them is not found.
        """
        if not self._active:
            return []
        wanted = set(slots.tolist())
        return [load for first, load in self._active.items() if first in wanted]

    def join(self, path: Lease, first: int, stop: int) -> list[Load]:
        """Count one more request that uses the running loads of blocks [first, stop) of a path.

        Args:
            path: a lease of the path (a prefix in the index).
            first: index of the first block.
            stop: index after the last block.

        Returns:
            The running loads; pass each to `release` when the request has ended. [] if none runs.
        """
        if first >= stop:
            return []
        loads = self.of(self._index.slots(Tier.DEVICE, path.node, first, stop))
        for load in loads:
            load.num_users += 1
        return loads

    def start(
        self,
        path: Lease,
        first: int,
        stop: int,
        slots: Ids,
        *,
        partial: _Partial | None = None,
    ) -> Load:
        """Start to load blocks [first, stop) of a path that are on the host and not on the device.

        Args:
            path: a lease of the path (a prefix in the index).
            first: index of the first block.
            stop: index after the last block.
            slots: device slots for the blocks, int32 [stop - first].
            partial: a host block of which the prompt shares only the first tokens; None for no such
                block. The same movement copies it to a device slot that only this request uses, and
                releases the lease of the host block at its end. One movement instead of two saves
                0.2 ms (H200).

        Returns:
            The running load, which counts the request as its first user.
        """
        index = self._index
        host, device = index.slots(Tier.HOST, path.node, first, stop), slots
        if partial is not None:
            host = np.concatenate([host, partial.slot(Tier.HOST)])
            device = np.concatenate([slots, partial.target])
        self._tiers.decisions.load_host += 1
        above = tuple(self.of(index.slots(Tier.DEVICE, path.node, 0, first)))
        lease = index.hold_as_is(path.node)
        index.change(Tier.DEVICE, path.node, first, stop, Change.RESERVE, slots=slots)
        load = Load(
            lease=lease,
            first=first,
            stop=stop,
            slots=slots,
            movement=self._tiers.mover.load(host, device),
            above=above,
            settled=asyncio.get_running_loop().create_future(),
        )
        if partial is not None:
            load.movement.when_ended(lambda: index.release(partial.source))
        for upper in above:
            upper.below.append(load)
        self._active[int(slots[0])] = load
        self._tiers.copies.num_loads += 1
        end = self._tiers.work.begin(path.node.space.name)
        load.movement.when_ended(lambda: self._settle(load, end))
        return load

    def release(self, load: Load) -> None:
        """Record that one of the requests that use a load's blocks has ended.

        The device slots of a failed load are freed when no request uses them.
        """
        load.num_users -= 1
        self._free_if_unused(load)

    def _settle(self, load: Load, end: Callable[[], None]) -> None:
        """Record the end of the load in the index, after the ends of the loads above it."""
        for upper in load.above:
            if not upper.settled.done():
                upper.settled.add_done_callback(lambda _: self._settle(load, end))
                return
        self._tiers.copies.load_ended()
        has_failed = load.movement.has_failed
        self._tiers.eviction.stats.failed_transfers += has_failed
        if not (has_failed or load.is_failed):
            del self._active[int(load.slots[0])]
            self._index.change(Tier.DEVICE, load.lease.node, load.first, load.stop, Change.ARRIVE)
            node = load.lease.node
            self._tiers.events.publish(CacheEventKind.LOADED, "device", node, load.first, load.stop)
        else:
            self._fail(load)
        self._index.release(load.lease)
        load.settled.set_result(None)
        self._free_if_unused(load)
        end()

    def _fail(self, load: Load) -> None:
        if load.is_failed:
            return
        load.is_failed = True
        for lower in load.below:
            self._fail(lower)
        self._index.change(Tier.DEVICE, load.lease.node, load.first, load.stop, Change.FAIL)
        self._tiers.slots.lend(Tier.DEVICE, load.slots)
        del self._active[int(load.slots[0])]

    def _free_if_unused(self, load: Load) -> None:
        if load.is_failed and load.settled.done() and load.num_users == 0:
            self._tiers.slots.unlend(Tier.DEVICE, load.slots)
            self._tiers.slots.free(Tier.DEVICE, load.slots)


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start of the node.

    Attributes:
        recompute_avoided_s: estimated seconds that computing the cached tokens would have taken;
            not counted while the engine's speed is unknown.
        reuse_gaps: histogram of the seconds between two uses of a cached block; each hit adds the
            time since the last use of the last block that it matches.
        shared_waits: number of requests that waited for another request's blocks instead of
            computing them.
        lost_waits: number of such waits in which the blocks did not come in time.
        missed_tokens: number of prompt tokens that were not found, by reason (MISS_REASONS).
    """

    admitted_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    direct_hit_tokens: int = 0
    recompute_avoided_s: float = 0.0
    reuse_gaps: AgeCounts = field(default_factory=AgeCounts)
    shared_waits: int = 0
    lost_waits: int = 0
    missed_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))


_NO_SLOTS = np.empty(0, np.int32)


class _Held(msgspec.Struct):
    """Everything that the start of a request has acquired so far, released if the start fails.

    Attributes:
        lease: lease of the matched blocks.
        source: lease of a partly shared block, from which shared tokens are copied; None if there
            is none.
        slots: acquired device slots that no copy writes yet.
        private: acquired device slots that `movements` write.
        loads: loads whose blocks the request uses.
    """

    lease: Lease
    source: Lease | None = None
    slots: Ids = _NO_SLOTS
    private: Ids = _NO_SLOTS
    loads: list[Load] = []
    movements: list[Movement] = []


class Starts:
    """Starts requests: acquires device slots and leases, and begins loads from the host.

    A start that raises releases everything it has acquired.

    Args:
        tiers: the tiers whose slots are acquired.
        running: the list to which started requests are added.
        loads: the list to which the loads of started requests are added.
        computing: the list to which the blocks that a started request will compute are added.
        given: called at each start with the name of the request's space and the number of its
            blocks. The queue uses these numbers to share blocks fairly between spaces.
        end: ends a request whose start fails after it was added to `running`.
    """

    def __init__(
        self,
        tiers: Tiers,
        running: Running,
        loads: HostLoads,
        computing: Computing,
        *,
        given: Callable[[str, int], None],
        end: Callable[[Request], None],
    ) -> None:
        self._given = given
        self._end = end
        self._tiers = tiers
        self._index = tiers.index
        self._running = running
        self._loads = loads
        self._computing = computing
        self.stats = SchedulerStats(reuse_gaps=tiers.index.reuse_gaps)
        self._valued_tokens = 0

    def counted(self) -> SchedulerStats:
        """Return the scheduler's counts, with the computing time that cache hits have saved."""
        counts, speed = self.stats, self._computing.prefill
        found = counts.device_hit_tokens + counts.host_hit_tokens
        found += counts.storage_hit_tokens + counts.direct_hit_tokens
        if speed.is_known:
            counts.recompute_avoided_s += (found - self._valued_tokens) * speed.seconds_of_one_more
            self._valued_tokens = found
        return counts

    def try_start(
        self,
        spec: RequestSpec,
        match: Match,
        fetched: Fetched | None,
        passes_by: PromiseWait | None = None,
    ) -> Request:
        """Start a request, or raise if it has to wait for room.

        Args:
            spec: the request.
            match: the cached blocks of its prompt at this moment.
            fetched: the blocks fetched from storage for the request; None if nothing was fetched.
            passes_by: blocks that another request is computing, and that this request computes
                itself instead of waiting for them; counted in the statistics. None if there are no
                such blocks.

        Returns:
            The running request. Its loads from the host may not have ended.

        Raises:
            OutOfBlocksError: the request has to wait for room; nothing is acquired.
        """
        index = self._index
        index.at(monotonic())
        lease = index.hold(match.node, match.num_blocks)
        held = _Held(lease)
        try:
            if match.num_blocks or match.partial:
                request = self._with_cached(spec, match, fetched, held)
            else:
                held.slots = self.acquire(lease.node.space, spec.num_blocks)
                # A copy: the request's table must not share the array in `held`.
                request = self._made(spec, lease, held.slots.copy(), NOTHING, ())
        except BaseException:  # no room, or a bug
            self._release_held(held)
            raise
        self._running.add(request)
        try:
            if held.loads:
                self._loads.used_by[request] = held.loads
            self._given(spec.prompt.space, spec.num_blocks)
            self._note(request, match, fetched)
            if passes_by is not None:
                self._computing.passed_by(passes_by)
                self._tiers.decisions.recompute_device += 1
        except BaseException:  # a bug
            self._end(request)
            raise
        return request

    def _with_cached(
        self, spec: RequestSpec, match: Match, fetched: Fetched | None, held: _Held
    ) -> Request:
        index, lease = self._index, held.lease
        partial, num_loads = match.partial, match.host_blocks
        source = held.source = index.hold(partial.node, partial.block + 1) if partial else None
        num_private = spec.num_blocks - match.num_blocks
        slots = held.slots = self.acquire(lease.node.space, num_loads + num_private)
        held.slots, private = slots[:num_loads], slots[num_loads:]
        held.private = private
        first_load = match.num_blocks - num_loads
        loads = held.loads = self._loads.join(lease, match.device_blocks, first_load)
        movements = held.movements
        matched = _matched(match, fetched, index.block_size, source)
        shared = None if source is None else _Partial(source, private[:1])
        if shared is not None and (not num_loads or shared.is_on_device):
            movement = self._copy_partial(shared)
            if not movement.has_ended or movement.has_failed:
                movements.append(movement)
            # Otherwise the block is copied with the load, and the gate waits for both.
            held.source = shared = None
        if num_loads:
            stop = match.num_blocks
            loads.append(self._loads.start(lease, first_load, stop, held.slots, partial=shared))
            held.source, held.slots = None, _NO_SLOTS
        movements += [load.movement for load in loads]
        index.count_hit(lease)
        cached = index.slots(Tier.DEVICE, lease.node, 0, match.num_blocks)
        table = np.concatenate([cached, private])
        return self._made(spec, lease, table, matched, tuple(movements))

    def _release_held(self, held: _Held) -> None:
        pool, slots = self._tiers.slots.pools[Tier.DEVICE], held.slots
        if held.source is not None:
            self._index.release(held.source)
        for load in held.loads:
            self._loads.release(load)
        self._index.release(held.lease)
        if len(slots):
            pool.release(slots)
        if not len(held.private):
            return
        left = [one for one in held.movements if not one.has_ended]

        def over() -> None:
            if all(one.has_ended for one in left):
                pool.release(held.private)
                self._tiers.work.capacity_changed()

        for movement in left:
            movement.when_ended(over)
        if not left:
            pool.release(held.private)

    def load(self, prompt: Prompt) -> Movement | None:
        """Start to load the blocks of `prompt` from the host before a request needs them.

        Returns:
            The movement; None if every cached block of the prompt is on the device.

        Raises:
            OutOfBlocksError: there is no room on the device; nothing is acquired.
        """
        match = self._index.match(prompt)
        count, stop = match.host_blocks, match.num_blocks
        if not count:
            return None
        lease = self._index.hold(match.node, stop)
        try:
            slots = self.acquire(lease.node.space, count)
            load = self._loads.start(lease, stop - count, stop, slots)
        finally:
            self._index.release(lease)
        self._loads.release(load)
        return load.movement

    def acquire(self, space: Space, count: int) -> Ids:
        """Acquire device slots for blocks of a space, within its quota.

        Private blocks of the space's running requests count towards the quota.

        Args:
            space: the space (part of the index for one fingerprint) of the prompt.
            count: number of slots.

        Returns:
            The slots, int32 [count].

        Raises:
            OutOfBlocksError: there are not enough slots; none is acquired.
        """
        if not space.has_quota:
            return self._tiers.eviction.acquire(Tier.DEVICE, count)
        reserved = self._running.use_of(space.name).num_private
        return self._tiers.eviction.acquire(Tier.DEVICE, count, space, reserved=reserved)

    def _made(
        self,
        spec: RequestSpec,
        lease: Lease,
        table: Ids,
        matched: Matched,
        movements: tuple[Movement, ...],
    ) -> Request:
        return Request(
            spec,
            spec.prompt,
            table,
            lease,
            matched.total_tokens,
            matched,
            self._tiers.mover.gate(movements),
            movements,
            self._running.use_of(spec.prompt.space),
        )

    def count_fetched(self, request: Request, num_tokens: int, *, num_direct: int) -> None:
        """Count tokens that came from storage after the start of their request.

        Args:
            request: the running request.
            num_tokens: number of first prompt tokens whose KV is in the block table now.
            num_direct: number of the newly arrived tokens that came from another node's memory.
        """
        came = num_tokens - request.cached_tokens
        direct = min(num_direct, came)
        matched = request.matched
        request.cached_tokens = num_tokens
        request.matched = msgspec.structs.replace(
            matched,
            storage_tokens=matched.storage_tokens + came - direct,
            direct_tokens=matched.direct_tokens + direct,
        )
        if request.num_coming:
            request.num_coming -= came
            self.stats.storage_hit_tokens += came - direct
            self.stats.direct_hit_tokens += direct
        if num_tokens == request.spec.prompt.num_tokens:
            request.missed, request.missed_since = "", None

    def note_fetch_ended(self, request: Request) -> None:
        """Record that storage delivers no more of the request's tokens.

        Tokens that were still expected count as missed.
        """
        if request.num_coming:
            self.stats.missed_tokens[request.missed] += request.num_coming
            request.num_coming = 0

    def _note(self, request: Request, match: Match, fetched: Fetched | None) -> None:
        spec, matched, stats = request.spec, request.matched, self.stats
        prompt = spec.prompt
        if missed := prompt.num_tokens - request.cached_tokens:
            history = self._tiers.eviction.history
            request.missed, request.missed_since = why_missed(
                spec, match, missed, history, self._computing
            )
            if fetched is not None and fetched.lacked_room:
                request.num_coming = missed
            else:
                stats.missed_tokens[request.missed] += missed
        if spec.uses_cache and match.num_blocks < prompt.num_blocks:
            now = asyncio.get_running_loop().time()
            request.promise = self._computing.begin(
                request.lease.node, match.num_blocks, prompt, now
            )
        if match.device_blocks:
            self._tiers.copies.write_down(request.lease.node, match.device_blocks)
        stats.admitted_requests += 1
        stats.prompt_tokens += prompt.num_tokens
        if request.cached_tokens:
            stats.device_hit_tokens += matched.device_tokens
        if request.cached_tokens != matched.device_tokens:
            stats.host_hit_tokens += matched.host_tokens
            stats.storage_hit_tokens += matched.storage_tokens
            stats.direct_hit_tokens += matched.direct_tokens

    def _copy_partial(self, partial: _Partial) -> Movement:
        source, mover = partial.source, self._tiers.mover
        if partial.is_on_device:
            movement = mover.copy_within(partial.slot(Tier.DEVICE), partial.target)
        else:
            movement = mover.load(partial.slot(Tier.HOST), partial.target)

        def release() -> None:
            self._tiers.eviction.stats.failed_transfers += movement.has_failed
            self._index.release(source)

        if movement.has_ended:  # at once, before any other task ran
            release()
        else:
            end = self._tiers.work.begin(source.node.space.name)
            movement.when_ended(release)
            movement.when_ended(end)
        return movement


def _joined(ranges: Sequence[range]) -> list[range]:
    joined: list[range] = []
    for one in sorted(ranges, key=lambda tokens: tokens.start):
        if joined and one.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, one.stop))
        else:
            joined.append(one)
    return joined


def _matched(
    match: Match, fetched: Fetched | None, block_size: int, source: Lease | None
) -> Matched:
    """Count the prompt's cached tokens by source.

    Blocks fetched for this request count for storage or the other node, although they are on
    the host or the device by now.
    """
    full = match.num_blocks * block_size
    partial = match.partial.num_tokens if match.partial and source else 0
    on_device = (match.device_blocks + match.loading_blocks) * block_size
    if fetched is None:
        if source is not None and _ends_on_device(source):
            return Matched(on_device + partial, full - on_device)
        return Matched(on_device, full - on_device + partial)
    came = _joined([fetched.tokens, *fetched.earlier])
    direct = _joined(fetched.direct)
    brought = _count_below(full, came)
    straight = _count_below(full, direct)
    device = on_device - _count_below(on_device, came)
    host = full - device - brought
    storage = brought - straight
    if partial and source is not None:
        if any(full in tokens for tokens in direct):
            straight += partial
        elif any(full in tokens for tokens in came):
            storage += partial
        elif _ends_on_device(source):
            device += partial
        else:
            host += partial
    return Matched(device, host, storage, straight)


def _count_below(stop: int, ranges: Sequence[range]) -> int:
    return sum(len(range(one.start, min(one.stop, stop))) for one in ranges)


class Growth:
    """Adds device blocks to running requests that need more of them than at admission.

    Args:
        tiers: the tiers of the node.
        running: all running requests.
        starts: acquires device slots.
        line: the queue of waiting requests. If too few device slots are free, waiting requests
            release the blocks that were fetched for them, before a running request releases its
            own.

    Attributes:
        extending: running requests that are waiting for more blocks now.
    """

    def __init__(
        self,
        tiers: Tiers,
        running: Running,
        starts: Starts,
        *,
        line: WaitingLine,
    ) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._running = running
        self._starts = starts
        self._line = line
        self.extending: list[Request] = []
        self._short_of_quota: set[Request] = set()  # members of `extending` with a full quota

    async def extend(self, request: Request, num_tokens: int) -> None:
        """Extend a request's block table by blocks for `num_tokens` tokens more.

        These tokens follow the prompt and the committed tokens. The call waits until all the blocks
        are free. No waiting request is admitted during this wait; if only the quota of the
        request's space is exhausted, requests of other spaces are admitted.

        Args:
            request: the running request.
            num_tokens: number of tokens, at least 0.

        Raises:
            OutOfBlocksError: all running requests wait for more blocks, and this request is chosen
                to release its own: call `preempt`.
            RequestTooLargeError: the device, or the quota of the request's space, is too small.
            BadRequestError: `num_tokens` is negative.
            OwnershipError: the request has ended.
            RequestAbortedError: the request was aborted.
        """
        request.check_wanted()
        if num_tokens < 0:
            raise BadRequestError(f"num_tokens must not be negative: {num_tokens}")
        # A NumPy integer becomes an int.
        tokens = request.whole_prompt.num_tokens + operator.index(num_tokens)
        count = self._missing(request, tokens)
        has_quota = request.lease.node.space.has_quota
        if not count or (not has_quota and self._has_grown(request, count)):
            return
        self._check(request, tokens)
        self.extending.append(request)
        has_waited = False
        try:
            # Another extension of the same request may have added the missing blocks.
            while count := self._missing(request, tokens):
                slots = self._try_extend(request, count)
                if slots is not None:
                    request.grow(slots)
                    break
                if not has_waited:  # if all running requests wait now, one must be chosen to yield
                    has_waited = True
                    self._tiers.work.capacity_changed()
                await self._tiers.work.next_change()
                request.check_wanted()
                self._check(request, tokens)
        finally:
            self.extending.remove(request)
            if request not in self.extending:
                self._short_of_quota.discard(request)
            self._tiers.work.capacity_changed()

    def _has_grown(self, request: Request, count: int) -> bool:
        try:
            slots = self._tiers.eviction.acquire(Tier.DEVICE, count)
        except OutOfBlocksError:
            return False
        request.grow(slots)
        return True

    def holds_up(self, space: str) -> bool:
        """Return whether a new request of `space` must wait, because running requests lack blocks.

        While a running request waits for more blocks because the device is full, no new request is
        admitted. If the request waits because the quota of its space is full, only new requests of
        the same space are held up.
        """
        return any(
            request not in self._short_of_quota or request.space == space
            for request in self.extending
        )

    def _missing(self, request: Request, tokens: int) -> int:
        more = -(-tokens // self._index.block_size) - len(request.block_table)
        return more if more > 0 else 0  # noqa: FURB136 - max() takes 0.1 us

    def _check(self, request: Request, tokens: int) -> None:
        total = len(request.block_table) + self._missing(request, tokens)
        space = request.lease.node.space
        for most, what in (
            (self._tiers.slots.pools[Tier.DEVICE].capacity, "the device tier has"),
            (space.quota[Tier.DEVICE], "its tenant's quota"),
        ):
            if most is not None and total > most:
                raise RequestTooLargeError(
                    f"the request needs {total} blocks, more than {what}: {most}"
                )

    def _try_extend(self, request: Request, count: int) -> Ids | None:
        while True:
            try:
                return self._starts.acquire(request.lease.node.space, count)
            except OutOfBlocksError as error:
                if isinstance(error, OverQuotaError):
                    self._short_of_quota.add(request)
                    space = request.space
                else:
                    self._short_of_quota.discard(request)
                    space = None
                rivals = self._yield_candidates(space)
                if not rivals:
                    return None
                if self._line.release_last_fetched(space):
                    continue  # waiting requests release before a running one yields
                # The lowest priority yields, and among equals the last admitted.
                if request is min(reversed(rivals), key=lambda one: one.spec.priority):
                    raise
                return None

    def _yield_candidates(self, space: str | None) -> list[Request]:
        """Return the running requests of `space` (None for all) if one must release its blocks.

        Return [] if a running copy, or the end of a request that waits for no blocks, will free
        device slots.
        """
        if self._tiers.work.is_at_work(space):
            return []
        running = self._running
        rivals = [one for one in running.by_id.values() if space is None or one.space == space]
        return rivals if all(one in self.extending for one in rivals) else []


# Requests tried per turn of the event loop. Eight take 2 to 19 ms, longest if each copies a shared
# tail; 32 held the loop for 75 ms (2-core x86-64 VM).
_SLICE = 8


def check_fits(tiers: Tiers, spec: RequestSpec) -> None:
    """Check that the device and the tenant's quota have enough blocks for one request.

    Blocks that other requests use count as free. The device's size and the quotas can change while
    a request waits, so the check is repeated before the start of the request.

    Args:
        tiers: the tiers, with their sizes and quotas.
        spec: the request.

    Raises:
        RequestTooLargeError: the request needs more blocks than the device or the quota has.
    """
    num_blocks, pool = spec.num_blocks, tiers.slots.pools[Tier.DEVICE]
    if num_blocks > pool.capacity:
        raise RequestTooLargeError(
            f"the request needs {num_blocks} blocks of {tiers.index.block_size} "
            f"tokens, but the device tier has {pool.capacity}: shorten it, or "
            "raise cache.device_blocks"
        )
    quota = tiers.index.spaces.root_of(spec.prompt).space.quota[Tier.DEVICE]
    if quota is not None and num_blocks > quota:
        raise RequestTooLargeError(
            f"the request needs {num_blocks} blocks, more than its tenant's quota "
            f"of {quota}: shorten it, or raise the quota"
        )


class Admissions:
    """The admission of waiting requests, in the order of the queue.

    Running requests that wait for more blocks get them first. If the first request in the queue
    needs more blocks than are free, all requests behind it wait, too, even small ones.

    Args:
        tiers: the tiers of the node.
        line: the queue of waiting requests.
        running: the running requests.
        starts: acquires the device slots of an admitted request and starts it.
        growth: the running requests that wait for more blocks.
        computing: the blocks that running requests will compute.

    Attributes:
        pauses: the reasons why no request is admitted now; empty while requests are admitted.
    """

    def __init__(
        self,
        tiers: Tiers,
        line: WaitingLine,
        running: Running,
        *,
        starts: Starts,
        growth: Growth,
        computing: Computing,
    ) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._line = line
        self._running = running
        self._starts = starts
        self._growth = growth
        self._computing = computing
        self._stats = starts.stats
        self.pauses: set[str] = set()  # reasons why admission is stopped
        self._is_pumping = False
        self._pumps_again = False
        self._next_pump: asyncio.Handle | None = None  # continues with the rest of the queue
        self._over_quota: set[str] = set()  # spaces with a full quota in this round
        self._stuck: Waiting | None = None  # the first in the queue, if it had no room

    def admit_now(self, spec: RequestSpec, fetched: Fetched | None) -> Request | None:
        """Admit a request at once, if it need not wait.

        A request must wait while admission is paused, while other requests wait in the queue or a
        running request waits for more blocks, while too few device blocks are free, or if waiting
        for blocks that another request computes is estimated to be better.

        Args:
            spec: the request, already checked by `Scheduler.check`.
            fetched: the blocks fetched from storage for it; None for none.

        Returns:
            The running request; None if it must wait, so that the caller puts it into the queue.
        """
        if self.pauses or self._is_pumping or len(self._line) or not self._has_turn(spec):
            return None
        match = self._match(spec)
        wait = self._possible_wait(spec, match)
        if wait is not None and self._computing.is_worth_it(wait):
            return None
        try:
            return self._starts.try_start(spec, match, fetched, wait)
        except OutOfBlocksError:
            return None

    def join(self, waiting: Waiting) -> None:
        """Put a request into the queue; its `outcome` is set when it is admitted or refused."""
        self._line.join(waiting)
        if self.pauses:
            waiting.release_fetched()
        if self._stuck is None or not self._is_busy() or self._next() is not self._stuck:
            self.pump()

    def pump(self) -> None:
        """Admit waiting requests while there is room.

        After eight requests the event loop runs other tasks, and the admissions continue in its
        next iteration.
        """
        if self._is_pumping:
            self._pumps_again = True  # called by a release in the loop below
            return
        if self._next_pump is not None:
            return  # _SLICE requests were tried in this turn; the rest follows in the next
        self._stuck = None
        if self._line.is_idle:
            return
        self._is_pumping = self._pumps_again = True
        try:
            num_turns = 0
            while self._pumps_again and num_turns < _SLICE:
                self._pumps_again = False
                num_turns += self._admit_waiting(_SLICE - num_turns)
        finally:
            self._is_pumping = False
        if num_turns >= _SLICE and self._next_pump is None:
            self._next_pump = asyncio.get_running_loop().call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._next_pump = None
        self.pump()

    def _admit_waiting(self, max_turns: int) -> int:
        self._unpark_ready()
        self._over_quota.clear()
        for num_turns in range(max_turns):
            if self.pauses:
                return num_turns
            waiting = self._next()
            if waiting is None:
                return num_turns
            try:
                request = self._start_or_park(waiting)
            except OverQuotaError:
                if self._is_busy(waiting.space) or not self._unblock(waiting, waiting.space):
                    self._over_quota.add(waiting.space)
                continue
            except OutOfBlocksError:
                is_busy = self._is_busy()
                if not is_busy and self._unblock(waiting):
                    continue
                self._stuck = waiting if is_busy else None
                return num_turns
            except Exception as error:  # noqa: BLE001 - only this request fails by a bug
                self._line.leave(waiting)
                waiting.outcome.set_exception(error)
                continue
            if request is not None:
                self._line.admitted(waiting)
                waiting.outcome.set_result(request)
        return max_turns

    def _start_or_park(self, waiting: Waiting) -> Request | None:
        spec = waiting.spec
        check_fits(self._tiers, spec)
        match = self._match(spec)
        wait = self._possible_wait(spec, match, waiting.give_up_at)
        if wait is not None and self._computing.is_worth_it(wait):
            self._stats.shared_waits += waiting.give_up_at is None
            self._tiers.decisions.wait_device += 1
            now = asyncio.get_running_loop().time()
            self._line.park(waiting, wait, now, lambda: self._wait_timed_out(waiting))
            return None
        if not waiting.uses_partial:
            match.partial = None
        return self._starts.try_start(spec, match, waiting.fetched, wait)

    def _match(self, spec: RequestSpec) -> Match:
        return self._index.match(spec.prompt, spec.max_cached_tokens if spec.uses_cache else 0)

    # Waits for blocks that another request computes

    def _possible_wait(
        self, spec: RequestSpec, match: Match, give_up_at: float | None = None
    ) -> PromiseWait | None:
        if not self._computing.num_promises or not spec.uses_cache:
            return None
        now = asyncio.get_running_loop().time()
        if give_up_at is not None and now >= give_up_at:
            return None
        stop = spec.max_cached_tokens // spec.prompt.block_size
        return self._computing.possible_wait(match, spec.prompt, stop, now)

    def _unpark_ready(self) -> None:
        for waiting in self._line.ready_again():
            self._unpark(waiting)

    def _wait_timed_out(self, waiting: Waiting) -> None:
        self._unpark(waiting, has_timed_out=True)
        waiting.give_up_at = 0.0  # no second wait: the request computes
        self.pump()

    def _unpark(self, waiting: Waiting, *, has_timed_out: bool = False) -> None:
        wait = self._line.unpark(waiting)
        assert wait is not None, "the request was parked"
        was_worth_it = not has_timed_out and wait.promise.first >= wait.stop
        self._stats.lost_waits += not was_worth_it
        waited_s = asyncio.get_running_loop().time() - waiting.parked_at
        self._computing.note_wait(wait, waited_s, was_worth_it=was_worth_it)

    # Turns

    def _next(self) -> Waiting | None:
        while (waiting := self._line.next(self._may_go)) is not None:
            if not waiting.outcome.done():
                return waiting
            self._line.leave(waiting)  # cancelled, but its task has not run yet
        return None

    def _may_go(self, waiting: Waiting) -> bool:
        return waiting.outcome.done() or self._has_turn(waiting.spec)

    def _has_turn(self, spec: RequestSpec) -> bool:
        space = spec.prompt.space
        return space not in self._over_quota and not self._growth.holds_up(space)

    def _is_busy(self, space: str | None = None) -> bool:
        if self._tiers.work.is_at_work(space):
            return True
        return bool(self._running.by_id) if space is None else self._running.has_space(space)

    def _unblock(self, first: Waiting, space: str | None = None) -> bool:
        """Release fetched blocks of the last waiting request that has any, or return False.

        With `space`, only requests of that space release blocks. Without such a request, `first`
        no longer copies a cached block that shares only its first tokens, since this needs room
        too.
        """
        if self._line.release_last_fetched(space):
            return True
        # Protecting a partly shared block takes the room that the first request needs.
        if first.uses_partial:
            first.uses_partial = False
            return True
        return False
