"""The states of a request, and the blocks that running requests have promised to compute.

A request first waits for storage or another node (`Arrivals`), then in the queue for device blocks.
After admission (`Request`) it has device blocks. The blocks that it is computing are its promise:
other requests with the same prefix can wait for them instead of computing them too.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from tierkv.cache.history import HistoryEvent
from tierkv.cache.index import Index, Lease, Match
from tierkv.cache.keys import TOKEN_BYTES, Prompt, common_blocks
from tierkv.cache.node import Ids, Tier, TreeNode
from tierkv.errors import (
    BadRequestError,
    DuplicateRequestError,
    OwnershipError,
    RequestAbortedError,
    ShuttingDownError,
    TierKVError,
)
from tierkv.gpu.protocol import Event
from tierkv.sched.worth import HEDGE, PrefillSpeed, Regret
from tierkv.transfer.mover import LayerGate, Movement

_Key = tuple[TreeNode, bytes]  # the node above a block; the block's tokens and extra keys
_MAX_CAUTION = 6


@dataclass(slots=True)
class Decisions:
    """Counts of the ways in which missing blocks were obtained, since the start of the node.

    Each count is a number of times; consecutive blocks of one prompt count once.

    Attributes:
        load_host: loaded to the device from the host.
        fetch_storage: fetched from storage.
        wait_device: waited for while another request computed them.
        wait_storage: waited for while another request fetched them.
        recompute_device: computed although another request was computing them.
        recompute_storage: computed because storage was estimated to be slower, with or without
            asking it.
        recompute_late: computed because storage was too slow.
    """

    load_host: int = 0
    fetch_storage: int = 0
    wait_device: int = 0
    wait_storage: int = 0
    recompute_device: int = 0
    recompute_storage: int = 0
    recompute_late: int = 0


class Promise(msgspec.Struct, eq=False):
    """Blocks [first, stop) of a prompt that a running request will compute.

    Requests with the same prefix may wait for these blocks instead of computing them.

    Attributes:
        prompt: the prompt of the computing request.
        first: index of the first block that is not computed yet; grows with each commit.
        stop: index after the last promised block.
        started_at: start of the computation, in seconds of the loop's clock.
        key: the index node before block `first` and the tokens of this block, under which waiting
            requests find the promise; changes with `first`.
        first_computed: index of the block with which the engine began; blocks before it were cached
            or fetched.
        is_over: True once all blocks are computed, or the request has ended.
        num_waiting: number of requests that wait for these blocks.
    """

    prompt: Prompt
    first: int
    stop: int
    started_at: float
    key: _Key
    first_computed: int
    is_over: bool = False
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class PromiseWait:
    """A wait of one request until another request has computed the blocks before block `stop`.

    Attributes:
        promise: the blocks that the other request computes.
        stop: number of the block after the last one to wait for.
        patience_s: upper limit of the wait in seconds.
        is_sooner: True if the wait is expected to be no longer than `compute_s`.
        compute_s: estimated seconds that the waiting request would need to compute the blocks
            itself.
    """

    promise: Promise
    stop: int
    patience_s: float
    is_sooner: bool = True
    compute_s: float = 0.0


class Computing:
    """The blocks that the running requests of a node will compute (their promises).

    A promise is listed under the index node after which the request computes its next block, and
    under the tokens of this block. Another request whose prompt continues the node with the same
    tokens finds the promise and can wait for the blocks. The computing request may be slow, fail or
    end early, so every wait for its blocks has a time limit.

    Args:
        prefill: the estimate of computing times, updated when all blocks of a promise are computed.
            No request waits before the engine has reported its speed.
        on_progress: called when blocks that requests wait for were computed, or will not be.
    """

    def __init__(self, prefill: PrefillSpeed, on_progress: Callable[[], None]) -> None:
        self.prefill = prefill
        self._on_progress = on_progress
        self._promises: dict[_Key, list[Promise]] = {}
        self._lost = 0  # lost waits in a row
        self._skip = 0  # possible waits to skip because of lost ones
        self._regret = Regret()
        self.num_promises = 0

    def begin(self, node: TreeNode, first: int, prompt: Prompt, now: float) -> Promise | None:
        """Record that a request begins to compute its prompt from block `first` on.

        Args:
            node: the last index node of the cached blocks; it ends before block `first`.
            first: index of the first block to compute.
            prompt: the request's prompt.
            now: seconds on the loop's clock.

        Returns:
            The promise of these blocks; None if the prompt has no full block to compute.
        """
        if first >= prompt.num_blocks:
            return None
        promise = Promise(prompt, first, prompt.num_blocks, now, _key(node, first, prompt), first)
        if self.prefill.is_reported:  # otherwise no request waits
            num_tokens = (prompt.num_blocks - first) * prompt.block_size
            self._regret.allow(self.prefill.seconds(num_tokens))
        self._list(promise)
        self.num_promises += 1
        return promise

    def _list(self, promise: Promise) -> None:
        self._promises.setdefault(promise.key, []).append(promise)

    def advance(self, promise: Promise, node: TreeNode, first: int) -> None:
        """Record that the promised blocks before block `first` are computed and in the index.

        Args:
            promise: the promise of a running request.
            node: the index node that ends before block `first`.
            first: number of the next block of the prompt to compute.
        """
        if promise.is_over or first <= promise.first:
            return
        if first >= promise.stop:
            self._observe(promise)
            promise.first = first
            self.end(promise)
            return
        self._remove(promise)
        promise.first, promise.key = first, _key(node, first, promise.prompt)
        self._list(promise)
        if promise.num_waiting:
            self._on_progress()

    def note_fetched(self, promise: Promise, first: int) -> None:
        """Record that the blocks before block `first` came from storage instead of being computed.

        From now on the engine's speed is measured over the remaining blocks.

        Args:
            promise: the promise of a running request.
            first: number of the first block that is still to be computed.
        """
        promise.first_computed = max(promise.first_computed, min(first, promise.stop))
        promise.started_at = asyncio.get_running_loop().time()

    def end(self, promise: Promise) -> None:
        """End a promise: its blocks are computed, or will not be. Further calls do nothing."""
        if promise.is_over:
            return
        promise.is_over = True
        self._remove(promise)
        self.num_promises -= 1
        if promise.num_waiting:
            self._on_progress()

    def _observe(self, promise: Promise) -> None:
        num_blocks = promise.stop - promise.first_computed
        if not num_blocks:
            return
        num_tokens = num_blocks * promise.prompt.block_size
        # The time of a few tokens after a long match is mostly the request's other delays, so it
        # counts only if `PrefillSpeed.sample_tokens` chose their number.
        if 2 * num_blocks >= promise.stop or num_tokens in self.prefill.sample:
            took_s = asyncio.get_running_loop().time() - promise.started_at
            self.prefill.observe(num_tokens, took_s)

    def _remove(self, promise: Promise) -> None:
        promises = self._promises[promise.key]
        if len(promises) == 1:
            del self._promises[promise.key]
        else:
            promises.remove(promise)

    def find(self, match: Match, prompt: Prompt, stop: int) -> tuple[Promise, int] | None:
        """Return the promise that covers the most blocks of a prompt after its cached blocks.

        Args:
            match: the cached blocks of the prompt at this moment.
            prompt: the prompt of the request that could wait.
            stop: index after the last block that the request could use.

        Returns:
            The promise, and the index after the last block that it has in common with `prompt`;
                None if no promise covers the next block.
        """
        at = match.num_blocks
        if not self._promises or at >= stop or match.node.end != at:
            return None
        best: tuple[Promise, int] | None = None
        for promise in self._promises.get(_key(match.node, at, prompt), ()):
            shared = at + _shared(promise, prompt, at, min(stop, promise.stop))
            if best is None or shared > best[1]:
                best = promise, shared
        return best

    def possible_wait(
        self, match: Match, prompt: Prompt, stop: int, now: float
    ) -> PromiseWait | None:
        """Return a wait for blocks that another request computes, as an alternative to computing.

        Nothing is changed, and the caller decides whether to wait.

        Args:
            match: the cached blocks of the prompt at this moment.
            prompt: the prompt of the request that could wait.
            stop: index after the last block that the request could use.
            now: seconds on the loop's clock.

        Returns:
            The wait; None if no request computes these blocks, or the engine has not reported its
                speed.
        """
        if not self._promises or not self.prefill.is_reported:
            return None
        found = self.find(match, prompt, stop)
        if found is None:
            return None
        promise, shared = found
        size = prompt.block_size
        compute_s = self.prefill.seconds((shared - match.num_blocks) * size)
        expected_s = self.prefill.seconds((shared - promise.first_computed) * size)
        left_s = max(expected_s - (now - promise.started_at), 0.0)
        patience_s = left_s + HEDGE * compute_s
        return PromiseWait(promise, shared, patience_s, left_s <= compute_s, compute_s)

    def is_worth_it(self, wait: PromiseWait) -> bool:
        """Return whether waiting for another request's blocks seems better than computing them.

        After waits in which the blocks came too late, the answer is False for some requests. Once
        such waits have cost too many seconds in total, the answer is False for all.
        """
        return wait.is_sooner and not self._skip and self._regret.seconds > 0

    def passed_by(self, wait: PromiseWait) -> None:
        """Count a request that computes blocks although it could wait for another request's blocks.

        Args:
            wait: the wait that was possible.
        """
        self._skip -= bool(self._skip and wait.is_sooner)

    def note_wait(self, wait: PromiseWait, waited_s: float, *, was_worth_it: bool) -> None:
        """Record whether a wait for another request's blocks saved time.

        The results of past waits decide whether later requests wait.

        Args:
            wait: the wait that has ended.
            waited_s: its duration in seconds.
            was_worth_it: True if the awaited blocks were computed in time.
        """
        if was_worth_it:
            self._regret.add(max(wait.compute_s - waited_s, 0.0))
            self._lost = self._skip = 0
        else:
            self._regret.add(-waited_s)
            self._lost = min(self._lost + 1, _MAX_CAUTION)
            self._skip = (1 << self._lost) - 1

    def findings(self, num_running: int) -> list[str]:
        """Return violated invariants of the promises, one sentence each; [] if there are none."""
        promises = [promise for listed in self._promises.values() for promise in listed]
        wrong = []
        if len(promises) != self.num_promises:
            wrong.append(
                f"{self.num_promises} promised runs are counted, but {len(promises)} are listed"
            )
        if len(promises) > num_running:
            wrong.append(
                f"{len(promises)} promised runs are listed, but only {num_running} requests run"
            )
        for key, listed in self._promises.items():
            wrong.extend(
                f"a promise of blocks {promise.first} to {promise.stop} is over but still listed"
                for promise in listed
                if promise.is_over
            )
            if any(promise.key != key for promise in listed):
                wrong.append("a promise of blocks is listed under a wrong key")
        return wrong


def _key(node: TreeNode, block: int, prompt: Prompt) -> _Key:
    width = prompt.block_size * TOKEN_BYTES
    tokens = prompt.tokens[block * width : (block + 1) * width]
    return node, tokens + prompt.extras[block] if block in prompt.extras else tokens


def _shared(promise: Promise, prompt: Prompt, at: int, stop: int) -> int:
    width = prompt.block_token_bytes
    start = at * width
    shared = common_blocks(promise.prompt.tokens, start, prompt.tokens, start, stop - at, width)
    if promise.prompt.extras or prompt.extras:
        for block in range(at, at + shared):
            if promise.prompt.extra(block) != prompt.extra(block):
                return block - at
    return shared


class Arrival:
    """Async context manager in which a request waits for storage or another node.

    If the request is aborted or the node shuts down, the code inside the `async with` is cancelled,
    and the `async with` raises RequestAbortedError or ShuttingDownError. If that code has just
    finished, `release` is called before the error is raised.

    Attributes:
        space: name of the space (model, tenant, adapter) of the request's prompt.
        release: function that releases the blocks or leases that the wait has brought; set inside
            the `async with` when they arrive.
    """

    def __init__(self, by_id: dict[str, Arrival], request_id: str, space: str) -> None:
        self.space = space
        self.release: Callable[[], None] = lambda: None
        self._by_id = by_id
        self._request_id = request_id
        self._scope = asyncio.timeout(None)
        self._refused: TierKVError | None = None

    def refuse(self, error: TierKVError) -> None:
        """End the wait with `error`; later calls do nothing."""
        if self._refused is None:
            self._refused = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Self:
        if self._request_id in self._by_id:
            raise DuplicateRequestError(
                f"request {self._request_id!r} is already being admitted: use another id, "
                "or wait for that call"
            )
        await self._scope.__aenter__()
        self._by_id[self._request_id] = self
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._by_id[self._request_id]
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            if self._refused is None:
                raise
            raise self._refused from None
        if self._refused is not None and error is None:
            self.release()
            raise self._refused


@dataclass(slots=True)
class Arrivals:
    """Requests that wait for storage or for another node before admission, by request id.

    A waiting request can be aborted. A second request with the same id is refused.
    """

    _by_id: dict[str, Arrival] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_id)

    def wait(self, spec: RequestSpec) -> Arrival:
        """Return a context manager, inside which the request waits for storage or for another node.

        Inside it, `abort` and `drain` can end the wait with an error.

        Args:
            spec: the request.

        Raises:
            DuplicateRequestError: a request with the same id already waits; raised by `async with`,
                not by this call.
        """
        return Arrival(self._by_id, spec.request_id, spec.prompt.space)

    def abort(self, request_id: str) -> bool:
        """End the wait of this request with RequestAbortedError; return whether it was waiting."""
        arrival = self._by_id.get(request_id)
        if arrival is None:
            return False
        arrival.refuse(RequestAbortedError(f"request {request_id!r} was aborted"))
        return True

    def drain(self) -> None:
        """End all waits with ShuttingDownError."""
        for arrival in self._by_id.values():
            arrival.refuse(ShuttingDownError("this node is shutting down"))

    def is_used_by(self, space: str) -> bool:
        return any(arrival.space == space for arrival in self._by_id.values())


class RequestSpec(msgspec.Struct, frozen=True):
    """An engine's specification of one request.

    Attributes:
        request_id: unique among the requests that run or wait.
        prompt: the tokens, at least one.
        max_new_tokens: number of generated tokens for which blocks are reserved at admission.
            Within this number a running request never waits for blocks.
        needs_logits: True if at least one prompt token must be computed, because the engine needs
            its logits. A decode node sets False, because it gets the first generated token from the
            prefill node.
        uses_cache: False to compute all tokens and use no cached block.
        priority: among waiting requests, a higher one is admitted first.
        cached_tokens_limit: largest number of cached tokens to use; None for no limit. Set when a
            request is admitted again because the load of further cached tokens failed.
        session_id: session (turns of one conversation) that the request belongs to, for events; ""
            without one.
        num_blocks: number of blocks to reserve at admission. Always calculated from `prompt` and
            `max_new_tokens`; a given value is ignored.
    """

    request_id: str
    prompt: Prompt
    max_new_tokens: int
    needs_logits: bool = True
    uses_cache: bool = True
    priority: int = 0
    cached_tokens_limit: int | None = None
    session_id: str = ""
    num_blocks: int = 0

    def __post_init__(self) -> None:
        if not self.prompt.num_tokens:
            raise BadRequestError("the prompt is empty: give at least one token")
        if self.max_new_tokens < 0:
            raise BadRequestError(f"max_new_tokens must not be negative: {self.max_new_tokens}")
        # A NumPy integer becomes an int.
        total = self.prompt.num_tokens + operator.index(self.max_new_tokens)
        msgspec.structs.force_setattr(self, "num_blocks", -(-total // self.prompt.block_size))

    @property
    def max_cached_tokens(self) -> int:
        most = self.prompt.num_tokens - (1 if self.needs_logits else 0)
        return most if self.cached_tokens_limit is None else min(most, self.cached_tokens_limit)


class Matched(msgspec.Struct, frozen=True):
    """Numbers of cached prompt tokens, by the tier where they were found.

    Each token counts once. Tokens of partial last blocks count too.

    Attributes:
        device_tokens: on the device, or being loaded to the device for another request.
        host_tokens: on the host.
        storage_tokens: fetched from storage for this request, even if they are on the device by
            now.
        direct_tokens: fetched from another node's memory for this request, even if they are on the
            device by now.
    """

    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    direct_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.storage_tokens + self.direct_tokens


NOTHING = Matched()


class RequestState(Enum):
    """State of an admitted request: RUNNING, until it is PREEMPTED or ENDED.

    A PREEMPTED request has released its blocks. `Scheduler.resume` admits it again as a new
    request.
    """

    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


class SpaceUse(msgspec.Struct):
    """Counts for one space (part of the index for one fingerprint): its requests and their blocks.

    Attributes:
        num_with_blocks: number of running requests, and of ended ones whose copies still run.
        num_private: number of blocks of these requests that are not in the index.
    """

    num_with_blocks: int = 0
    num_private: int = 0


class Request(msgspec.Struct, eq=False):
    """An admitted request. The scheduler owns it; engines read it.

    The first blocks of `block_table`, as many as `lease` covers, are shared: they belong to the
    index (the tree of cached blocks). The blocks after them, and those in `refused`, are private:
    they belong to this request alone.

    Attributes:
        spec: the specification that the engine gave.
        prompt: the committed tokens; before the first commit, the prompt of `spec`.
        block_table: int32 [num_blocks], device blocks in order, for the prompt and `max_new_tokens`
            more tokens.
        lease: protects the shared blocks from eviction.
        cached_tokens: number of first tokens whose KV is in the table once `gate` is open.
        matched: the cached tokens by tier.
        gate: lets the engine wait for each layer of the loads from the host.
        loads: the copies into the request's blocks that had not ended at its start.
        use: the numbers of requests and private blocks of the request's space; all requests of the
            space share this object.
        state: running, preempted or ended.
        computed_tokens: number of committed tokens.
        written: events of kernels that write committed tokens and had not finished at the last
            check.
        is_damaged: True if such a kernel failed; later tokens of the request are not cached.
        pinned: for a preempted request, the index node with its last cached block. Until the
            request is resumed, its cached blocks are evicted after all other blocks. None if there
            are no such blocks, or the request is not preempted.
        refused: positions in `block_table` of private blocks among the shared ones: the index
            already had other blocks for these tokens.
        has_given_tail: True if the partial block with the last tokens of the prompt, which follows
            the shared blocks, belongs to the index too.
        room: array with spare capacity, of which `block_table` is the beginning; None until the
            table grows.
        is_aborted: True after an abort; the engine ends the request when its kernels are done.
        promise: the blocks that the request computes and other requests may wait for; None if there
            are none.
        missed: the reason why not all of its prompt was found at admission, one of
            `admission.MISS_REASONS`; "" if all was found.
        missed_since: the event that removed the first missing block; None if it is not known.
        num_coming: number of prompt tokens that are missing but may still come from storage.
        ticket_at: time at which the prefill node's ticket was read, in seconds of the monotonic
            clock; 0 if no ticket was read.
        matched_at: time at which the blocks in storage were known, on the same clock; 0 if storage
            was not asked.
        fetched_at: end of the fetch from storage, on the same clock; 0 without a fetch.
    """

    spec: RequestSpec
    prompt: Prompt
    block_table: Ids
    lease: Lease
    cached_tokens: int
    matched: Matched
    gate: LayerGate
    loads: tuple[Movement, ...]
    use: SpaceUse
    state: RequestState = RequestState.RUNNING
    computed_tokens: int = 0
    written: tuple[Event, ...] = ()
    is_damaged: bool = False
    pinned: TreeNode | None = None
    is_aborted: bool = False
    refused: tuple[int, ...] = ()
    has_given_tail: bool = False
    room: Ids | None = None
    promise: Promise | None = None
    missed: str = ""
    missed_since: HistoryEvent | None = None
    num_coming: int = 0
    ticket_at: float = 0.0
    matched_at: float = 0.0
    fetched_at: float = 0.0

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def space(self) -> str:
        """Name of the space (model, tenant, adapter) of the prompt."""
        return self.spec.prompt.space

    @property
    def whole_prompt(self) -> Prompt:
        """The prompt of `spec`, followed by the generated tokens that were committed."""
        asked, committed = self.spec.prompt, self.prompt
        return committed if committed.num_tokens >= asked.num_tokens else asked

    def grow(self, slots: Ids) -> None:
        """Append private blocks to the block table.

        Args:
            slots: their device slots, int32 [n].
        """
        start = len(self.block_table)
        stop = start + len(slots)
        if self.room is None or len(self.room) < stop:
            self.room = np.empty(2 * stop, np.int32)
            self.room[:start] = self.block_table
        self.room[start:stop] = slots
        self.block_table = self.room[:stop]
        self.use.num_private += len(slots)

    @property
    def num_private(self) -> int:
        """Number of device blocks that only this request has: they are not in the index."""
        own = len(self.block_table) - self.lease.num_blocks - self.has_given_tail
        return own + len(self.refused)

    def private_slots(self) -> Ids:
        """Return the request's device blocks that are not in the index, int32 [`num_private`]."""
        own = self.block_table[self.lease.num_blocks + self.has_given_tail :]
        if not self.refused:
            return own
        return np.concatenate([self.block_table[list(self.refused)], own])

    def check_tokens(self, tokens: bytes) -> None:
        """Check that `tokens` (int32, as bytes) can be committed by this request.

        Raises:
            BadRequestError: the tokens have a wrong length, or do not begin with the prompt and the
                tokens committed before.
            OwnershipError: the request has ended or is preempted.
            RequestAbortedError: the request was aborted.
        """
        self.check_wanted()
        wanted = self.spec.prompt.tokens
        # The usual case, for which the table has room.
        if tokens is wanted and not self.computed_tokens:
            return
        room = len(self.block_table) * self.prompt.block_size
        if len(tokens) % TOKEN_BYTES or len(tokens) // TOKEN_BYTES > room:
            raise BadRequestError(
                f"a commit must have whole tokens of {TOKEN_BYTES} bytes, at most {room}: "
                f"it has {len(tokens)} bytes"
            )
        known = self.prompt.tokens[: self.computed_tokens * TOKEN_BYTES]
        if not (tokens.startswith(known) and tokens.startswith(wanted[: len(tokens)])):
            raise BadRequestError(
                "a commit must begin with all prompt and committed tokens of request "
                f"{self.request_id!r}"
            )

    def findings(self, index: Index, *, has_failed: bool = False) -> list[str]:
        """Return violated invariants of a request that is listed as running.

        Args:
            index: the index to compare the block table with.
            has_failed: True if a load of the request's blocks failed. Other requests may then have
                loaded the same blocks to other slots, so the table is not compared.

        Returns:
            One sentence for each violation; [] if there is none.
        """
        wrong, who = [], f"request {self.request_id!r}"
        if self.state is not RequestState.RUNNING:
            wrong.append(f"{who} is listed as running, but {self.state.value}")
        if self.lease.is_released:
            wrong.append(f"{who} runs without its lease")
        if self.lease.num_blocks != self.lease.node.end:
            wrong.append(f"{who} holds more or fewer blocks than its lease says")
        elif len(self.block_table) < self.lease.num_blocks:
            wrong.append(f"{who} holds blocks that its block table does not list")
        elif any(at >= self.lease.num_blocks for at in self.refused):
            wrong.append(f"{who} lists refused blocks beyond its lease")
        elif not has_failed and self._differs_from(index):
            wrong.append(
                f"{who} has other blocks in its block table than the index has for its tokens"
            )
        return wrong

    def _differs_from(self, index: Index) -> bool:
        num_blocks = self.lease.num_blocks
        cached = index.slots(Tier.DEVICE, self.lease.node, 0, num_blocks)
        differs = cached != self.block_table[:num_blocks]
        return not set(differs.nonzero()[0].tolist()) <= set(self.refused)

    def check_running(self) -> None:
        """Check that the request runs.

        Raises:
            OwnershipError: the request has ended or is preempted.
        """
        if self.state is not RequestState.RUNNING:
            how = "has ended" if self.state is RequestState.ENDED else "is preempted"
            raise OwnershipError(f"request {self.request_id!r} {how}")

    def check_wanted(self) -> None:
        """Check that the request runs and was not aborted.

        Raises:
            OwnershipError: the request has ended or is preempted.
            RequestAbortedError: the request was aborted.
        """
        if self.state is not RequestState.RUNNING:
            self.check_running()
        if self.is_aborted:
            raise RequestAbortedError(f"request {self.request_id!r} was aborted")


class Running:
    """The requests that have device blocks, with counts for each space.

    A space is the part of the index for one fingerprint.

    Attributes:
        by_id: running requests in the order of admission.
        ending: ended requests with blocks that kernels or copies may still use.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Request] = {}
        self.ending: set[Request] = set()
        self._of_space: dict[str, SpaceUse] = {}

    def __iter__(self) -> Iterator[Request]:
        yield from self.by_id.values()
        yield from self.ending

    def __contains__(self, request: Request) -> bool:
        return request in self.ending or self.by_id.get(request.request_id) is request

    def use_of(self, space: str) -> SpaceUse:
        """Return how many running requests and private blocks one space has.

        A new request of the space stores the returned object as its `use`.
        """
        use = self._of_space.get(space)
        return SpaceUse() if use is None else use

    def has_space(self, space: str) -> bool:
        """Return whether the space has a running request, or an ended one with running copies."""
        return space in self._of_space

    def add(self, request: Request) -> None:
        spec, use, num_blocks = request.spec, request.use, len(request.block_table)
        self.by_id[spec.request_id] = request
        self._of_space[spec.prompt.space] = use
        use.num_with_blocks += 1
        use.num_private += num_blocks - request.lease.num_blocks

    def remove(self, request: Request) -> None:
        """Remove a request from `by_id`, because it has ended.

        The counts of its space still include its blocks until `freed` is called.
        """
        del self.by_id[request.spec.request_id]

    def freed(self, request: Request, num_private: int) -> None:
        """Record that an ended request has released all of its blocks.

        Args:
            request: the ended request.
            num_private: number of its blocks that were not in the index.
        """
        use = request.use
        use.num_private -= num_private
        use.num_with_blocks -= 1
        if not use.num_with_blocks:
            del self._of_space[request.spec.prompt.space]

    def findings(self) -> list[str]:
        """Recount the blocks of the running requests of each space.

        Return a sentence for each space whose recorded counts are wrong; [] if there is none.
        """
        found: dict[str, SpaceUse] = {}
        for one in self:
            use = found.setdefault(one.space, SpaceUse())
            use.num_with_blocks += 1
            use.num_private += one.num_private
        return [
            f"space {space!r} has {found.get(space)}, but {self._of_space.get(space)} is counted"
            for space in sorted(found.keys() | self._of_space.keys())
            if found.get(space) != self._of_space.get(space)
        ]
