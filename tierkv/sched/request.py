"""One request, from what an engine asks for to its end: on its way, in line, or with blocks;
and what it promises to compute, for others to wait for."""

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

_Key = tuple[TreeNode, bytes]  # the node above, tokens and extra keys of the next block
_MAX_CAUTION = 6


@dataclass(slots=True)
class Decisions:
    """Counts since the start, one for each run of blocks that was decided on.

    load_host: brought to the device from the host. fetch_storage: brought from storage.
    wait_device: waited for, while another request computes them. wait_storage: waited for, while
    another request's fetch brings them. recompute_device: computed, although another request was
    at it. recompute_storage: computed, although storage had them, or was not even asked, since
    that was estimated to be slower. recompute_late: computed, since storage was too slow.
    """

    load_host: int = 0
    fetch_storage: int = 0
    wait_device: int = 0
    wait_storage: int = 0
    recompute_device: int = 0
    recompute_storage: int = 0
    recompute_late: int = 0


class Promise(msgspec.Struct, eq=False):
    """Blocks [first, stop) of `prompt`, which its request computes. first grows with each commit.

    begun: seconds on the loop's clock; from then on it computes. begun_at: the block it began with.
    num_waiting: requests that wait for it.
    """

    prompt: Prompt
    first: int
    stop: int
    begun: float
    key: _Key
    begun_at: int
    is_over: bool = False
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class PromiseWait:
    """For a promise to reach block `stop`; for `patience_s` seconds at the most. is_sooner: than
    computing the same, which takes `compute_s`, as far as is known."""

    promise: Promise
    stop: int
    patience_s: float
    is_sooner: bool = True
    compute_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.promise.is_over or self.promise.first >= self.stop


class Computing:
    """All promises. on_progress: called when a promise has come further that somebody waits for.

    prefill: what computing takes; each promise that is kept shows it. As long as no engine tells
    it, nobody waits.

    A promise is found by where the next of its blocks hangs in the tree: who has matched up to
    there and goes on with the same block shares at least that one. An owner may be slow, fail or
    leave, so every wait has an end of its own.
    """

    def __init__(
        self,
        prefill: PrefillSpeed,
        on_progress: Callable[[], None],
        decisions: Decisions | None = None,
    ) -> None:
        self.prefill = prefill
        self._decisions = decisions or Decisions()
        self._on_progress = on_progress
        self._promises: dict[_Key, list[Promise]] = {}
        self._lost = 0  # waits in a row that came to nothing
        self._skip = 0  # chances to wait that are passed by because of them
        self._regret = Regret()
        self.num_promises = 0

    def promises(self) -> list[Promise]:
        return [promise for promises in self._promises.values() for promise in promises]

    def begin(self, node: TreeNode, first: int, prompt: Prompt, now: float) -> Promise | None:
        """A request starts to compute `prompt` from block `first` on, below `node`'s end; None if
        there is no full block to compute."""
        if first >= prompt.num_blocks:
            return None
        promise = Promise(prompt, first, prompt.num_blocks, now, _key(node, first, prompt), first)
        if self.prefill.is_told:  # else nobody waits
            num_tokens = (prompt.num_blocks - first) * prompt.block_size
            self._regret.allow(self.prefill.seconds(num_tokens))
        self._list(promise)
        self.num_promises += 1
        return promise

    def _list(self, promise: Promise) -> None:
        others = self._promises.get(promise.key)
        if others is None:
            self._promises[promise.key] = [promise]
        else:
            others.append(promise)

    def advance(self, promise: Promise, node: TreeNode, first: int) -> None:
        """Its blocks up to `first` can be matched; `node` ends there."""
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

    def brought(self, promise: Promise, first: int) -> None:
        """Its blocks up to `first` were not computed, but came from elsewhere after its start: what
        its request takes for the others shows how fast it is, not what it took for these."""
        promise.begun_at = max(promise.begun_at, min(first, promise.stop))
        promise.begun = asyncio.get_running_loop().time()

    def end(self, promise: Promise) -> None:
        """Its request computes no more of it, for whatever reason. Twice is as good as once."""
        if promise.is_over:
            return
        promise.is_over = True
        self._remove(promise)
        self.num_promises -= 1
        if promise.num_waiting:
            self._on_progress()

    def _observe(self, promise: Promise) -> None:
        """What it took shows how fast the engine is, if it was most of the prompt, or is a sample:
        the few tokens after a long match take as long as everything else that a request has to wait
        for."""
        num_blocks = promise.stop - promise.begun_at
        if not num_blocks:
            return
        num_tokens = num_blocks * promise.prompt.block_size
        if 2 * num_blocks >= promise.stop or num_tokens in self.prefill.sample:
            took_s = asyncio.get_running_loop().time() - promise.begun
            self.prefill.observe(num_tokens, took_s)

    def _remove(self, promise: Promise) -> None:
        promises = self._promises[promise.key]
        if len(promises) == 1:
            del self._promises[promise.key]
        else:
            promises.remove(promise)

    def find(self, match: Match, prompt: Prompt, stop: int) -> tuple[Promise, int] | None:
        """The promise that shares most of the prompt's blocks [match.num_blocks, stop), and up to
        which block it does; None if there is none."""
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
        """What could be waited for instead of computing it again. Changes nothing."""
        if not self._promises or not self.prefill.is_told:
            return None
        found = self.find(match, prompt, stop)
        if found is None:
            return None
        promise, shared = found
        size = prompt.block_size
        compute_s = self.prefill.seconds((shared - match.num_blocks) * size)
        expected_s = self.prefill.seconds((shared - promise.begun_at) * size)
        left_s = max(expected_s - (now - promise.begun), 0.0)
        patience_s = left_s + HEDGE * compute_s
        return PromiseWait(promise, shared, patience_s, left_s <= compute_s, compute_s)

    def is_worth_it(self, wait: PromiseWait) -> bool:
        """Whether it is better than to compute.

        A wait that comes to nothing costs what its owner was expected to need still, which is less
        than computing the same here, and HEDGE of the latter. After each such wait in a row twice
        as many chances are passed by, so that owners who never deliver cost ever less. Nobody waits
        while all that were lost have cost more than the others brought (see Regret).
        """
        return wait.is_sooner and not self._skip and self._regret.seconds > 0

    def passed_by(self, wait: PromiseWait) -> None:
        """A request has started without it."""
        self._skip -= bool(self._skip and wait.is_sooner)
        self._decisions.recompute_device += 1

    def waits(self) -> None:
        """A request waits from now on."""
        self._decisions.wait_device += 1

    def note_wait(self, wait: PromiseWait, waited_s: float, *, was_worth_it: bool) -> None:
        if was_worth_it:
            self._regret.add(max(wait.compute_s - waited_s, 0.0))
            self._lost = self._skip = 0
        else:
            self._regret.add(-waited_s)
            self._lost = min(self._lost + 1, _MAX_CAUTION)
            self._skip = (1 << self._lost) - 1

    def findings(self, num_running: int) -> list[str]:
        """What is wrong with the promises, in words."""
        promises = self.promises()
        wrong = []
        if len(promises) != self.num_promises:
            wrong.append(
                f"{self.num_promises} blocks' promises are counted, {len(promises)} are listed"
            )
        if len(promises) > num_running:
            wrong.append(
                f"{len(promises)} prompts are claimed as computing by {num_running} requests"
            )
        for key, listed in self._promises.items():
            wrong.extend(
                f"a promise of blocks {promise.first} to {promise.stop} is over but still listed"
                for promise in listed
                if promise.is_over
            )
            if any(promise.key != key for promise in listed):
                wrong.append("a promise is listed where it does not belong")
        return wrong


def _key(node: TreeNode, block: int, prompt: Prompt) -> _Key:
    width = prompt.block_size * TOKEN_BYTES
    tokens = prompt.tokens[block * width : (block + 1) * width]
    return node, tokens + prompt.extras[block] if block in prompt.extras else tokens


def _shared(promise: Promise, prompt: Prompt, at: int, stop: int) -> int:
    """How many full blocks from `at` on are the same in both prompts, at most up to `stop`."""
    width = prompt.block_token_bytes
    start = at * width
    shared = common_blocks(promise.prompt.tokens, start, prompt.tokens, start, stop - at, width)
    if promise.prompt.extras or prompt.extras:
        for block in range(at, at + shared):
            if promise.prompt.extra(block) != prompt.extra(block):
                return block - at
    return shared


class Arrival:
    """A wait for storage or another node, for `async with`. If the request is aborted, or the node
    drains, the body is cancelled where it waits, and RequestAbortedError or ShuttingDownError
    raised; also if that is in the moment in which it has ended, and then what it brought is let go.

    let_go: set by the body when it has brought something.
    """

    def __init__(self, by_id: dict[str, Arrival], request_id: str, space: str) -> None:
        self.space = space
        self.let_go: Callable[[], None] = lambda: None
        self._by_id = by_id
        self._request_id = request_id
        self._scope = asyncio.timeout(None)
        self._refused: TierKVError | None = None

    def refuse(self, error: TierKVError) -> None:
        """Nothing more comes of it; the first reason counts."""
        if self._refused is None:
            self._refused = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Self:
        if self._request_id in self._by_id:
            raise DuplicateRequestError(f"request {self._request_id!r} is already on its way")
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
            self.let_go()
            raise self._refused


@dataclass(slots=True)
class Arrivals:
    """Requests that wait for storage or for another node, by id. Each can be aborted; a second one
    with the same id is refused."""

    _by_id: dict[str, Arrival] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_id)

    def wait(self, spec: RequestSpec) -> Arrival:
        """One request's, for `async with`. Raises DuplicateRequestError on entry."""
        return Arrival(self._by_id, spec.request_id, spec.prompt.space)

    def abort(self, request_id: str) -> bool:
        """Whether there was one."""
        arrival = self._by_id.get(request_id)
        if arrival is None:
            return False
        arrival.refuse(RequestAbortedError(f"request {request_id!r} was aborted"))
        return True

    def drain(self) -> None:
        """They would be refused when they came to wait for room: they hear of it now."""
        for arrival in self._by_id.values():
            arrival.refuse(ShuttingDownError("this node is shutting down"))

    def is_used_by(self, space: str) -> bool:
        return any(arrival.space == space for arrival in self._by_id.values())


class RequestSpec(msgspec.Struct, frozen=True):
    """What an engine asks for.

    max_new_tokens: room for as many generated tokens is reserved at admission, so that a running
        request can never wait for another one's blocks.
    needs_logits: leave at least one token to compute, which a node needs unless another one has
        already told it the next token.
    uses_cache: False computes everything, as a node without any cache would.
    priority: of those that wait, the higher goes first.
    most_cached_tokens: use no more cached tokens than these: the others did not load.
    num_blocks: that it takes at admission.
    """

    request_id: str
    prompt: Prompt
    max_new_tokens: int
    needs_logits: bool = True
    uses_cache: bool = True
    priority: int = 0
    most_cached_tokens: int | None = None
    num_blocks: int = 0

    def __post_init__(self) -> None:
        if not self.prompt.num_tokens:
            raise BadRequestError("the prompt is empty: give at least one token")
        if self.max_new_tokens < 0:
            raise BadRequestError(f"max_new_tokens must not be negative: {self.max_new_tokens}")
        total = self.prompt.num_tokens + operator.index(self.max_new_tokens)  # perhaps NumPy's
        msgspec.structs.force_setattr(self, "num_blocks", -(-total // self.prompt.block_size))

    @property
    def max_cached_tokens(self) -> int:
        most = self.prompt.num_tokens - (1 if self.needs_logits else 0)
        return most if self.most_cached_tokens is None else min(most, self.most_cached_tokens)


class Matched(msgspec.Struct, frozen=True):
    """Where the tokens that need not be computed were found; disjoint, tails included.

    device counts blocks on their way there for another request too. storage counts what was brought
    here for this request, be it on the host or the device by now; direct likewise, of what came
    straight from another node's memory.
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
    """RUNNING until PREEMPTED (its blocks went back to the cache, `Scheduler.resume` gets them
    again as a new request) or ENDED."""

    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


class TenantUse(msgspec.Struct):
    """What one tenant's requests have. num_running, num_blocks: of those that run. num_with_blocks,
    num_private: of those that have ended with copies at work, too; num_private blocks are theirs
    alone, and not the index's."""

    num_running: int = 0
    num_blocks: int = 0
    num_with_blocks: int = 0
    num_private: int = 0


class Request(msgspec.Struct, eq=False):
    """An admitted request. Owned by the scheduler; engines read it.

    prompt: the tokens that are committed; before the first commit, what it was admitted for.
    block_table: int32 device blocks, in order, for the prompt and max_new_tokens more.
    use: what all requests of its tenant have.
    cached_tokens: the first so many tokens have KV in the table once `gate` is open.
    written: events, not over yet when last looked at, of the kernels that write what was committed.
    is_damaged: such a kernel failed, so nothing more of the request is cached.
    pinned: the end of its path while it is preempted.
    refused: blocks of the table before the end of the lease that are its own all the same: others
        had put theirs into the index. has_given_tail: the first one after it is the index's.
    room: what block_table is the first part of, once it has grown.
    is_aborted: nobody wants it any more; its engine ends it as soon as its kernels allow.
    promise: the blocks that it computes, for others to wait for.
    missed: why it did not find all of its prompt at admission (see `admission.MISS_REASONS`), "" if
        it did. missed_since: what became of the first block that was missing, if that is known.
    num_coming: prompt tokens that it lacks, but may get from storage yet.
    ticket_at, matched_at, fetched_at: on the monotonic clock, when its ticket had come, when it was
        known what storage has, and when that had come; 0 where there was no such wait.
    """

    spec: RequestSpec
    prompt: Prompt
    block_table: Ids
    lease: Lease
    cached_tokens: int
    matched: Matched
    gate: LayerGate
    loads: tuple[Movement, ...]
    use: TenantUse
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
        """Its tenant's."""
        return self.spec.prompt.space

    @property
    def whole_prompt(self) -> Prompt:
        """What it was admitted for, and what was committed beyond that."""
        asked, committed = self.spec.prompt, self.prompt
        return committed if committed.num_tokens >= asked.num_tokens else asked

    def grow(self, slots: Ids) -> None:
        """Add private blocks at the end of the table, whose array has room for as many again, so
        that a request that grows block by block does not copy it each time."""
        start = len(self.block_table)
        stop = start + len(slots)
        if self.room is None or len(self.room) < stop:
            self.room = np.empty(2 * stop, np.int32)
            self.room[:start] = self.block_table
        self.room[start:stop] = slots
        self.block_table = self.room[:stop]
        use = self.use
        use.num_blocks += len(slots)
        use.num_private += len(slots)

    @property
    def num_private(self) -> int:
        """How many blocks of the table are its own, and not the index's."""
        own = len(self.block_table) - self.lease.num_blocks - self.has_given_tail
        return own + len(self.refused)

    def private_slots(self) -> Ids:
        """Those blocks of the table."""
        own = self.block_table[self.lease.num_blocks + self.has_given_tail :]
        if not self.refused:
            return own
        return np.concatenate([self.block_table[list(self.refused)], own])

    def check_tokens(self, tokens: bytes) -> None:
        """Raise BadRequestError unless `tokens`, packed, can be a commit of this request, and
        what `check_wanted` raises."""
        self.check_wanted()
        wanted = self.spec.prompt.tokens
        if tokens is wanted and not self.computed_tokens:  # as mostly: there is room for it
            return
        room = len(self.block_table) * self.prompt.block_size
        if len(tokens) % TOKEN_BYTES or len(tokens) // TOKEN_BYTES > room:
            raise BadRequestError(f"a commit has whole tokens, {room} at the most")
        known = self.prompt.tokens[: self.computed_tokens * TOKEN_BYTES]
        if not (tokens.startswith(known) and tokens.startswith(wanted[: len(tokens)])):
            raise BadRequestError("a commit starts with the request's own tokens, none left out")

    def findings(self, index: Index, *, has_failed: bool = False) -> list[str]:
        """What is wrong with a request that is listed as running, in words. has_failed: a load of
        its blocks has, which others may have brought to other slots since."""
        wrong, who = [], f"request {self.request_id!r}"
        if self.state is not RequestState.RUNNING:
            wrong.append(f"{who} is listed as running, but {self.state.value}")
        if self.lease.is_released:
            wrong.append(f"{who} runs without its lease")
        if self.lease.num_blocks != self.lease.node.end:
            wrong.append(f"{who} holds more or fewer blocks than its lease says")
        elif len(self.block_table) < self.lease.num_blocks:
            wrong.append(f"{who} holds blocks that its table does not name")
        elif any(at >= self.lease.num_blocks for at in self.refused):
            wrong.append(f"{who} does not know whose its blocks are")
        elif not has_failed and self._differs_from(index):
            wrong.append(f"{who} has other blocks in its table than the index has for its tokens")
        return wrong

    def _differs_from(self, index: Index) -> bool:
        num_blocks = self.lease.num_blocks
        cached = index.slots(Tier.DEVICE, self.lease.node, 0, num_blocks)
        differs = cached != self.block_table[:num_blocks]
        return not set(differs.nonzero()[0].tolist()) <= set(self.refused)

    def check_running(self) -> None:
        if self.state is not RequestState.RUNNING:
            how = "has ended" if self.state is RequestState.ENDED else "is preempted"
            raise OwnershipError(f"request {self.request_id!r} {how}")

    def check_wanted(self) -> None:
        """Raise OwnershipError if it has ended, RequestAbortedError if it should end."""
        if self.state is not RequestState.RUNNING:
            self.check_running()
        if self.is_aborted:
            raise RequestAbortedError(f"request {self.request_id!r} was aborted")


_NO_USE = TenantUse()


class Running:
    """by_id: in the order of admission. ending: kernels or copies may still touch their blocks."""

    def __init__(self) -> None:
        self.by_id: dict[str, Request] = {}
        self.ending: set[Request] = set()
        self._of_tenant: dict[str, TenantUse] = {}

    def __iter__(self) -> Iterator[Request]:
        yield from self.by_id.values()
        yield from self.ending

    def __contains__(self, request: Request) -> bool:
        return request in self.ending or self.by_id.get(request.request_id) is request

    def of_tenant(self, space: str) -> TenantUse:
        """To be read only."""
        return self._of_tenant.get(space, _NO_USE)

    def use_of(self, space: str) -> TenantUse:
        """What a request of this tenant counts itself in, once it is added."""
        use = self._of_tenant.get(space)
        return TenantUse() if use is None else use

    def has_tenant(self, space: str) -> bool:
        """Whether requests of a tenant run, or have ended with copies at work."""
        return space in self._of_tenant

    def add(self, request: Request) -> None:
        spec, use, num_blocks = request.spec, request.use, len(request.block_table)
        self.by_id[spec.request_id] = request
        self._of_tenant[spec.prompt.space] = use
        use.num_running += 1
        use.num_blocks += num_blocks
        use.num_with_blocks += 1
        use.num_private += num_blocks - request.lease.num_blocks

    def remove(self, request: Request) -> None:
        """It does not run any more; it has its blocks still."""
        del self.by_id[request.spec.request_id]
        request.use.num_running -= 1
        request.use.num_blocks -= len(request.block_table)

    def freed(self, request: Request, num_private: int) -> None:
        """It has given back all of its blocks, of which so many were its own."""
        use = request.use
        use.num_private -= num_private
        use.num_with_blocks -= 1
        if not use.num_with_blocks:
            del self._of_tenant[request.spec.prompt.space]

    def findings(self) -> list[str]:
        """What is wrong with the counts, in words."""
        found: dict[str, TenantUse] = {}
        for one in self:
            use = found.setdefault(one.space, TenantUse())
            use.num_with_blocks += 1
            use.num_private += one.num_private
            if one not in self.ending:
                use.num_running += 1
                use.num_blocks += len(one.block_table)
        return [
            f"tenant {space!r} has {found.get(space)}, but {self._of_tenant.get(space)} is counted"
            for space in sorted(found.keys() | self._of_tenant.keys())
            if found.get(space) != self._of_tenant.get(space)
        ]
