"""Statistics of a service, and timelines of its last requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from tierkv import tracing
from tierkv.cache.history import HistoryEvent
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.cache.node import PoolStats, Tier
from tierkv.pd.tickets import HandoffStats
from tierkv.sched.eviction import TierStats
from tierkv.sched.request import Decisions, Matched, Request, RequestSpec
from tierkv.sched.scheduler import SchedulerStats
from tierkv.transfer.mover import LayerTimes
from tierkv.transfer.storage_io import StorageStats


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of all statistics of a service. Totals count from the start of the service.

    Attributes:
        device, host: numbers of used and free slots of the tier.
        running_requests: number of admitted requests that have not ended.
        waiting_requests: number of requests that wait for their admission.
        requests: totals of all requests.
        tiers: totals of evictions and offloads.
        storage: totals of the storage tier; None if there is none.
        loaded_bytes: total bytes copied from host to device.
        offloaded_bytes: total bytes copied from device to host.
        load_layers: for each layer, the seconds from the submission of a load until the layer is on
            the device: their sum and the longest.
        handoff: totals of published and claimed prompts.
        decisions: how often missing blocks were loaded, fetched, waited for or computed.
    """

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
    """Numbers of cached tokens of a prompt, from its start on, by tier.

    Each token counts once: first come the tokens on the device, then those on the host, then those
    in storage. If only the first tokens of a cached block equal the prompt's, these tokens count.
    An engine that needs the logits of the prompt's last token computes that token even if it is
    cached.

    Attributes:
        num_tokens: number of tokens of the prompt.
        device_tokens: number of leading tokens, on the device.
        host_tokens: number of further tokens, on the host.
        storage_tokens: number of further tokens, in storage; None if the store did not answer.
    """

    num_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int | None


class Moment(StrEnum):
    """A point in the life of a request. Members are in order of time; a request may skip some."""

    BEGAN = "began"
    TICKET = "ticket"  # the claim has read its ticket
    MATCHED = "matched"  # the cached blocks are known; only if storage was asked
    FETCHED = "fetched"  # the fetch from storage to the host has ended, or was given up
    ADMITTED = "admitted"  # the request has its device blocks, and loads have begun
    LOADED = "loaded"  # all loads of the request have ended
    COMPUTED = "computed"  # the prompt is computed, and the first token is known
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Timeline:
    """The record of one request, for the node's status page in a browser.

    Attributes:
        number: number of the request, counted from 1 at the start of the service.
        request_id: id of the request.
        space: name of the space of its prompt (the part of the index for one fingerprint).
        prompt_tokens: number of tokens of its prompt.
        prompt: the prompt, kept so that its cache hits can be explained later; None once it was
            dropped to save memory.
        moments: time at which the request was admitted, loaded, computed ..., in seconds of
            `time.monotonic()`.
        version: value of `Timelines.version` at the last change of this record.
        matched: numbers of cached prompt tokens at the admission, by tier.
        missed: the reason why a part of the prompt was not cached, one of `admission.MISS_REASONS`;
            "" if the whole prompt was cached.
        missed_since: the event that removed the first missing block; None if unknown.
        new_tokens: number of answer tokens with KV that was committed to the cache.
        problem: the reason why the request was not admitted; "" if it was.
        session_id: id of the session (conversation) that the request is a turn of; "" for none.
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
    """Records (`Timeline`) of the most recent requests: the times of the steps of each request.

    The newest records also have the request's prompt, up to `max_bytes` bytes of tokens in total.

    Args:
        max_requests: largest number of records.
        max_bytes: largest number of bytes of all prompts' tokens.

    Attributes:
        version: number of changes of all records so far; `since` returns later changes.
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
        timeline = Timeline(
            self._num_begun,
            spec.request_id,
            prompt.space,
            prompt.num_tokens,
            prompt,
            session_id=spec.session_id,
        )
        self._kept.append(timeline)
        self._with_prompt.append(timeline)
        self._num_bytes += len(prompt.tokens)
        if len(self._kept) > self._max_requests:
            self._kept.popleft()
        while self._num_bytes > self._max_bytes or len(self._with_prompt) > self._max_requests:
            oldest = self._with_prompt.popleft()
            assert oldest.prompt is not None, "it is dropped here only"
            self._num_bytes -= len(oldest.prompt.tokens)
            oldest.prompt = None
        self.mark(timeline, Moment.BEGAN)
        return timeline

    def mark(self, timeline: Timeline, moment: Moment, at: float | None = None) -> None:
        """Record the time of a moment in the life of a request, unless it is recorded already.

        A recovery admits the request again; the times of the first admission stay.

        Args:
            timeline: the record of the request.
            moment: the moment.
            at: time of the moment, in seconds of `time.monotonic()`; None for now.
        """
        if moment not in timeline.moments:
            timeline.moments[moment] = time.monotonic() if at is None else at
            self.version += 1
            timeline.version = self.version

    def admitted(self, timeline: Timeline, request: Request) -> None:
        """Record that the request has its blocks, and how much of its prompt was cached.

        Args:
            timeline: the record of the request.
            request: the admitted request.
        """
        timeline.matched = request.matched
        timeline.missed, timeline.missed_since = request.missed, request.missed_since
        if request.ticket_at:
            self.mark(timeline, Moment.TICKET, request.ticket_at)
        if request.fetched_at:
            self.mark(timeline, Moment.MATCHED, request.matched_at)
            self.mark(timeline, Moment.FETCHED, request.fetched_at)
        self.mark(timeline, Moment.ADMITTED)
        span = tracing.context()
        for movement in request.loads:
            movement.when_ended(lambda: self._loaded(timeline, request, span))

    def _loaded(self, timeline: Timeline, request: Request, span: Context | None) -> None:
        if all(movement.has_ended for movement in request.loads):
            self.mark(timeline, Moment.LOADED)
            if span is not None:
                num_bytes = sum(movement.num_bytes for movement in request.loads)
                span.run(tracing.record, "load", timeline.moments[Moment.ADMITTED], bytes=num_bytes)

    def since(self, version: int) -> list[Timeline]:
        """Return the records of requests that have changed lately, the oldest request first.

        Args:
            version: value of the attribute `version` at an earlier time; only records that have
                changed since are returned.
        """
        return [one for one in self._kept if one.version > version]

    def find(self, number: int) -> Timeline | None:
        return next((one for one in self._kept if one.number == number), None)


class Prefix(msgspec.Struct, array_like=True):
    """A run (consecutive blocks of one path in the tree of cached blocks), and its counts.

    Attributes:
        parent: position of its parent run in the list that `prefixes` returns; -1 if it has none.
        space: name of its space (the part of the index for one fingerprint).
        depth: number of runs above it.
        start: index of its first block within a prompt.
        blocks: number of its blocks.
        device: number of its blocks on the device.
        host: number of its blocks on the host but not on the device.
        stored: number of its blocks that were written to storage.
        hits: number of requests that have reused it.
        is_held: True if a lease protects it or a run below it.
        total: number of blocks of the run and of all runs below it.
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


_MAX_RUNS = 50_000  # largest number of runs that `prefixes` reads; 2 us each
_RUNS_AT_ONCE = 128
_MAX_DEPTH = 12
_MIN_SHARE = 1 / 300  # share of all blocks; smaller runs are too narrow to be drawn


async def prefixes(index: Index) -> tuple[list[Prefix], int]:
    """Return the runs of the index that have enough blocks to be visible in a picture of it.

    At most 50,000 runs are read. A run is left out if the run and all runs below it have together
    less than 1/300 of the blocks that were read, or if 12 or more runs are above it. Requests may
    change the index between two parts of the work, so the result may mix older and newer counts.

    Args:
        index: the index of all blocks.

    Returns:
        The runs, each after its parent, and the number of runs that were read, including those left
            out.
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
                node.num_blocks - device,  # a listed block is on the device or on the host
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
