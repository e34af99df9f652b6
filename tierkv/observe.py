"""Counts of a service, timelines of its last requests, and a recount that finds errors."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from tierkv import tracing
from tierkv.cache import invariants
from tierkv.cache.history import HistoryEvent
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.cache.node import PoolStats, Tier
from tierkv.gpu.protocol import Direction
from tierkv.pd.handoff import Handoff
from tierkv.pd.tickets import HandoffStats
from tierkv.sched.eviction import TierStats
from tierkv.sched.fetch import Fetcher
from tierkv.sched.request import Decisions, Matched, Request, RequestSpec
from tierkv.sched.scheduler import Scheduler, SchedulerStats
from tierkv.transfer.mover import LayerTimes, Mover
from tierkv.transfer.storage_io import StorageIO, StorageStats


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of everything that is counted."""

    device: PoolStats
    host: PoolStats
    running_requests: int
    waiting_requests: int
    requests: SchedulerStats
    tiers: TierStats
    storage: StorageStats | None
    loaded_bytes: int
    offloaded_bytes: int
    load_layers: LayerTimes
    handoff: HandoffStats
    decisions: Decisions


class Lookup(msgspec.Struct, frozen=True):
    """The number of a prompt's leading tokens that are cached, by tier.

    The device has the first tokens, the host the next ones, storage those after them. A partly
    equal block or tail counts up to the first token that differs. A request that must compute at
    least one token finds one token less.

    Attributes:
        num_tokens: tokens of the prompt.
        device_tokens: tokens on the device.
        host_tokens: further tokens on the host.
        storage_tokens: further tokens in storage; None if the store did not answer.
    """

    num_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int | None


class Moment(StrEnum):
    """A moment of a request, in order of time; a request may skip some."""

    BEGAN = "began"
    TICKET = "ticket"  # the ticket of a claim has arrived
    MATCHED = "matched"  # its cached blocks are known; part of the admission without storage
    FETCHED = "fetched"  # its blocks in storage were brought to the host, or given up
    ADMITTED = "admitted"  # it has its blocks: the queue is behind it, and loads are under way
    LOADED = "loaded"  # its blocks from lower tiers are on the device
    COMPUTED = "computed"  # the whole prompt is computed, and the first token known
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Timeline:
    """The record of one request, without its tokens.

    Attributes:
        number: number of the request since the start of the service.
        request_id: id of the request.
        space: name of the space of its prompt.
        prompt_tokens: number of tokens of its prompt.
        prompt: kept to explain the request again; None once it has been dropped to save memory.
        moments: seconds on the monotonic clock, which is finer than the loop's.
        version: grows with each change of any record.
        matched, missed, missed_since: see `Request`.
        new_tokens: number of generated tokens that were committed.
        problem: the reason why the request was refused; "" if it was not.
        session_id: the session that the request is a turn of; "" without one.
    """

    number: int
    request_id: str
    space: str
    prompt_tokens: int
    prompt: Prompt | None
    moments: dict[Moment, float] = field(default_factory=dict)
    version: int = 0
    matched: Matched = field(default_factory=Matched)
    missed: str = ""
    missed_since: HistoryEvent | None = None
    new_tokens: int = 0
    problem: str = ""
    session_id: str = ""


class Timelines:
    """The records of the last requests, and the prompts of the newest of them.

    Prompts are kept up to `max_bytes` bytes of tokens in total; older requests lose their prompt,
    but not their record.

    Args:
        max_requests: number of records to keep.
        max_bytes: most bytes of prompts.

    Attributes:
        version: version of the newest change; see `since`.
    """

    def __init__(self, max_requests: int = 128, max_bytes: int = 16 << 20) -> None:
        self.version = 0
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._kept: deque[Timeline] = deque()
        self._with_prompt: deque[Timeline] = deque()
        self._num_bytes = 0
        self._num_begun = 0

    def begin(self, spec: RequestSpec) -> Timeline:
        """Add the record of a new request, and return it."""
        prompt = spec.prompt
        self._num_begun += 1
        one = Timeline(
            self._num_begun,
            spec.request_id,
            prompt.space,
            prompt.num_tokens,
            prompt,
            session_id=spec.session_id,
        )
        self._kept.append(one)
        self._with_prompt.append(one)
        self._num_bytes += len(prompt.tokens)
        if len(self._kept) > self._max_requests:
            self._kept.popleft()
        while self._num_bytes > self._max_bytes or len(self._with_prompt) > self._max_requests:
            oldest = self._with_prompt.popleft()
            assert oldest.prompt is not None, "it is dropped here only"
            self._num_bytes -= len(oldest.prompt.tokens)
            oldest.prompt = None
        self.mark(one, Moment.BEGAN)
        return one

    def mark(self, one: Timeline, moment: Moment, at: float | None = None) -> None:
        """Record the time of a moment in the life of a request.

        Only the first of each kind counts, since recovery admits a request twice.

        Args:
            one: the record of the request.
            moment: the kind of moment.
            at: seconds on the monotonic clock; None for now.
        """
        if moment not in one.moments:
            one.moments[moment] = time.monotonic() if at is None else at
            self.version += 1
            one.version = self.version

    def admitted(self, one: Timeline, request: Request) -> None:
        """Record that the request has its blocks, and how much of its prompt was cached.

        Args:
            one: the record of the request.
            request: the admitted request.
        """
        one.matched = request.matched
        one.missed, one.missed_since = request.missed, request.missed_since
        if request.ticket_at:
            self.mark(one, Moment.TICKET, request.ticket_at)
        if request.fetched_at:
            self.mark(one, Moment.MATCHED, request.matched_at)
            self.mark(one, Moment.FETCHED, request.fetched_at)
        self.mark(one, Moment.ADMITTED)
        span = tracing.context()
        for movement in request.loads:
            movement.when_ended(lambda: self._loaded(one, request, span))

    def _loaded(self, one: Timeline, request: Request, span: Context | None) -> None:
        if all(movement.has_ended for movement in request.loads):
            self.mark(one, Moment.LOADED)
            if span is not None:
                num_bytes = sum(movement.num_bytes for movement in request.loads)
                span.run(tracing.record, "load", one.moments[Moment.ADMITTED], bytes=num_bytes)

    def since(self, version: int) -> list[Timeline]:
        """Return the records that have changed after `version`, the oldest first."""
        return [one for one in self._kept if one.version > version]

    def find(self, number: int) -> Timeline | None:
        return next((one for one in self._kept if one.number == number), None)


class Prefix(msgspec.Struct, array_like=True):
    """A run of blocks in the tree of cached blocks, with the totals of all runs below it.

    Attributes:
        parent: position in the list; -1 for the first run of a space.
        depth: number of runs above it.
        start: number of its first block in its prompts.
        blocks: number of blocks of the run itself.
        device: number of its blocks on the device.
        host: number of its blocks on the host alone.
        stored: number of its blocks known to be in storage.
        total: number of blocks of the run and of all runs below.
    """

    parent: int
    space: str
    depth: int
    start: int
    blocks: int
    device: int
    host: int
    stored: int
    hits: int
    is_held: bool
    total: int = 0


_MAX_RUNS = 50_000  # runs that `prefixes` looks at; 2 us each
_RUNS_AT_ONCE = 128
_MAX_DEPTH = 12
_MIN_SHARE = 1 / 300  # share of all blocks from which a run is reported: a few pixels wide


async def prefixes(index: Index) -> tuple[list[Prefix], int]:
    """Return the largest prefixes in the tree of cached blocks, parents before children.

    The event loop runs other tasks in between, so the result may mix states from before and after a
    change.

    Returns:
        The prefixes, and the number of tree nodes that were looked at.
    """
    found: list[Prefix] = []
    pending = [(child, -1, 0) for root in index.spaces.roots() for child in root.children.values()]
    while pending and len(found) < _MAX_RUNS:
        node, parent, depth = pending.pop()
        device, at = node.num_present(Tier.DEVICE), len(found)
        found.append(
            Prefix(
                parent,
                node.space.name,
                depth,
                node.start,
                node.num_blocks,
                device,
                node.num_blocks - device,  # each block is somewhere
                int(node.stored_in(0, node.num_blocks).sum()),
                node.hits,
                node.holders > 0,
            )
        )
        pending += [(child, at, depth + 1) for child in node.children.values()]
        if not len(found) % _RUNS_AT_ONCE:
            await asyncio.sleep(0)
    for one in reversed(found):
        one.total += one.blocks
        if one.parent >= 0:
            found[one.parent].total += one.total
    return _largest(found), len(found)


def _largest(found: list[Prefix]) -> list[Prefix]:
    least = _MIN_SHARE * sum(one.total for one in found if one.parent < 0)
    places: dict[int, int] = {-1: -1}
    largest: list[Prefix] = []
    for at, one in enumerate(found):
        if one.total >= least and one.depth < _MAX_DEPTH and one.parent in places:
            places[at] = len(largest)
            one.parent = places[one.parent]
            largest.append(one)
    return largest


def stats(scheduler: Scheduler, mover: Mover, storage: StorageIO | None, handoff: Handoff) -> Stats:
    """Return a snapshot of all counts.

    Args:
        scheduler: the requests and tiers.
        mover: the copies between host and device.
        storage: the storage tier; None if there is none.
        handoff: the published and claimed prompts.

    Returns:
        The snapshot.
    """
    tiers = scheduler.tiers
    return Stats(
        device=tiers.slots.pools[Tier.DEVICE].stats(),
        host=tiers.slots.pools[Tier.HOST].stats(),
        running_requests=len(scheduler.running_requests),
        waiting_requests=scheduler.num_waiting,
        requests=scheduler.stats,
        tiers=tiers.eviction.stats,
        storage=storage.stats if storage else None,
        loaded_bytes=mover.bytes_moved[Direction.LOAD],
        offloaded_bytes=mover.bytes_moved[Direction.OFFLOAD],
        load_layers=mover.layer_times,
        handoff=handoff.stats,
        decisions=tiers.decisions,
    )


def verify(
    scheduler: Scheduler,
    mover: Mover,
    fetcher: Fetcher,
    handoff: Handoff,
    *,
    num_leases: int = 0,
) -> list[str]:
    """Check the invariants of a service: recount leases, slots and states of blocks.

    While requests or copies are under way, only part of it can be checked.

    Args:
        scheduler: the requests and tiers.
        mover: the copies between host and device.
        fetcher: the fetches from storage.
        handoff: the published and claimed prompts.
        num_leases: number of leases that callers hold.

    Returns:
        A sentence for each violation; [] for none.
    """
    tiers, index = scheduler.tiers, scheduler.index
    requests = (*scheduler.running_requests, *scheduler.ending_requests)
    private = [request.private_slots() for request in requests]
    wrong = invariants.findings(
        index,
        tiers.slots.pools,
        {
            Tier.DEVICE: np.concatenate([tiers.slots.lent(Tier.DEVICE), *private]).tolist(),
            Tier.HOST: tiers.slots.lent(Tier.HOST).tolist(),
        },
    )
    wrong += scheduler.findings() + tiers.pins.findings()
    is_busy = private or tiers.work.num_tasks or scheduler.num_waiting or mover.num_in_flight
    if is_busy or fetcher.num_held:
        return wrong
    num_out = index.num_held_leases - tiers.pins.num_leases - handoff.source.num_leases
    if num_out != num_leases:
        wrong.append(f"no request runs, but {num_out} leases are held, not {num_leases}")
    wrong += fetcher.findings() + scheduler.loads.findings()
    return wrong + tiers.copies.findings() + handoff.findings()
