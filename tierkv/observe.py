"""What a service can tell about itself: counts, the moments of its last requests, and a recount
that finds what is wrong."""

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
    """Where a prompt's leading tokens are; disjoint, in order, and as many as an admission finds:
    with the first tokens of a block or tail that only begins the same. One that must compute at
    least one token for its logits finds that one less. storage_tokens: None if the store did not
    answer."""

    num_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int | None


class Moment(StrEnum):
    """Of a request, in the order in which they come; those it does not need never do."""

    BEGAN = "began"
    TICKET = "ticket"  # of a claim: it has come
    MATCHED = "matched"  # it is known what of it is where; without storage part of the admission
    FETCHED = "fetched"  # what storage had of it was brought to the host or given up
    ADMITTED = "admitted"  # it has its blocks: the wait in line is over, and loads are on the way
    LOADED = "loaded"  # what was cached below the device is there
    COMPUTED = "computed"  # all of its prompt, so that the first token is known
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Timeline:
    """What is told of one request: its moments in seconds on the monotonic clock, which is finer
    than the loop's, never its tokens.

    number: counted up from the start of the service. version: grows with each change of any.
    matched, missed, missed_since: see Request. problem: why it was refused, "" if it was not.
    prompt: to explain it again; None once it is not kept any more.
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


class Timelines:
    """Keeps the last requests: `most` of them, and of their prompts `most_bytes` of tokens."""

    def __init__(self, most: int = 128, most_bytes: int = 16 << 20) -> None:
        self.version = 0
        self._most = most
        self._most_bytes = most_bytes
        self._kept: deque[Timeline] = deque()
        self._with_prompt: deque[Timeline] = deque()
        self._num_bytes = 0
        self._num_begun = 0

    def begin(self, spec: RequestSpec) -> Timeline:
        prompt = spec.prompt
        self._num_begun += 1
        one = Timeline(self._num_begun, spec.request_id, prompt.space, prompt.num_tokens, prompt)
        self._kept.append(one)
        self._with_prompt.append(one)
        self._num_bytes += len(prompt.tokens)
        if len(self._kept) > self._most:
            self._kept.popleft()
        while self._num_bytes > self._most_bytes or len(self._with_prompt) > self._most:
            oldest = self._with_prompt.popleft()
            assert oldest.prompt is not None, "it is dropped here only"
            self._num_bytes -= len(oldest.prompt.tokens)
            oldest.prompt = None
        self.mark(one, Moment.BEGAN)
        return one

    def mark(self, one: Timeline, moment: Moment, at: float | None = None) -> None:
        """The first of each kind counts: a request that recovers is admitted twice. at: on the
        monotonic clock, None for now."""
        if moment not in one.moments:
            one.moments[moment] = time.monotonic() if at is None else at
            self.version += 1
            one.version = self.version

    def admitted(self, one: Timeline, request: Request) -> None:
        """It has got its blocks, with what `request` says."""
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
                span.run(tracing.tell, "load", one.moments[Moment.ADMITTED], bytes=num_bytes)

    def since(self, version: int) -> list[Timeline]:
        """Those that have changed after `version`, the oldest first."""
        return [one for one in self._kept if one.version > version]

    def find(self, number: int) -> Timeline | None:
        return next((one for one in self._kept if one.number == number), None)


class Prefix(msgspec.Struct, array_like=True):
    """A run of blocks in the tree of what is cached, and all that goes on from it.

    parent: position in the list, -1 for the first run of a space. depth: runs above it. blocks: of
    the run itself, from block `start` of its prompts on; device, host: those of them on the device,
    and on the host only; stored: of which storage was told. total: blocks of it and of all below.
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


_MOST_RUNS = 50_000  # that are looked at; 2 us each
_RUNS_AT_ONCE = 128
_MOST_DEPTH = 12
_LEAST_SHARE = 1 / 300  # of all blocks, for a run to be told of: the width of a few pixels


async def prefixes(index: Index) -> tuple[list[Prefix], int]:
    """The largest prefixes, parents before children, and how many runs were looked at; others have
    their turns meanwhile, so that what changes while it looks may be told in part."""
    found: list[Prefix] = []
    pending = [(child, -1, 0) for root in index.spaces.roots() for child in root.children.values()]
    while pending and len(found) < _MOST_RUNS:
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
    least = _LEAST_SHARE * sum(one.total for one in found if one.parent < 0)
    places: dict[int, int] = {-1: -1}
    told: list[Prefix] = []
    for at, one in enumerate(found):
        if one.total >= least and one.depth < _MOST_DEPTH and one.parent in places:
            places[at] = len(told)
            one.parent = places[one.parent]
            told.append(one)
    return told


def stats(scheduler: Scheduler, mover: Mover, storage: StorageIO | None, handoff: Handoff) -> Stats:
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
    """Recount leases, slots, states and orphans; what is wrong, in words, [] if nothing is.
    num_leases: that others hold."""
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
        wrong.append(f"nothing runs, but {num_out} leases are out, not {num_leases}")
    wrong += fetcher.findings() + scheduler.loads.findings()
    return wrong + tiers.copies.findings() + handoff.findings()
