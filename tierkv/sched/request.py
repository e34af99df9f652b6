"""One request, from what an engine asks for to its end: on its way, in line, or with blocks."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import msgspec
import numpy as np

from tierkv.cache.copies import Mask
from tierkv.cache.history import HistoryEvent
from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Tier, TreeNode
from tierkv.cache.pool import Ids
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.errors import (
    BadRequestError,
    DuplicateRequestError,
    OwnershipError,
    RequestAbortedError,
    ShuttingDownError,
    TierKVError,
)
from tierkv.gpu.protocol import Event
from tierkv.sched.computing import Promise
from tierkv.transfer.gate import LayerGate
from tierkv.transfer.mover import Movement

T = TypeVar("T")


@dataclass(slots=True)
class _Arrival:
    space: str
    scope: asyncio.Timeout
    refused: TierKVError | None = None

    def refuse(self, error: TierKVError) -> None:
        """Nothing more comes of it; the first reason counts."""
        if self.refused is None:
            self.refused = error
            self.scope.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True)
class Arrivals:
    """Requests that wait for storage or for another node, by id. Each can be aborted; a second one
    with the same id is refused."""

    _by_id: dict[str, _Arrival] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_id)

    async def brought(
        self,
        request_id: str,
        space: str,
        work: Coroutine[None, None, T],
        let_go: Callable[[T], None],
    ) -> T:
        """What `work` brings. If the request is aborted, or the node drains, `work` is cancelled
        where it waits, and RequestAbortedError or ShuttingDownError raised; also if that is in the
        moment in which `work` has ended, and what it brought is let go."""
        if request_id in self._by_id:
            work.close()
            raise DuplicateRequestError(f"request {request_id!r} is already on its way")
        arrival = _Arrival(space, asyncio.timeout(None))
        found: list[T] = []
        try:
            async with arrival.scope:
                self._by_id[request_id] = arrival
                try:
                    found.append(await work)
                finally:
                    del self._by_id[request_id]
        except TimeoutError:
            if arrival.refused is None:
                raise
        if arrival.refused is None:
            return found[0]
        for one in found:
            let_go(one)
        raise arrival.refused

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


class RequestState(Enum):
    """RUNNING until PREEMPTED (its blocks went back to the cache, `Scheduler.resume` gets them
    again as a new request) or ENDED."""

    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


class Request(msgspec.Struct, eq=False):
    """An admitted request. Owned by the scheduler; engines read it.

    prompt: the tokens that are committed; before the first commit, what it was admitted for.
    block_table: int32 device blocks, in order, for the prompt and max_new_tokens more.
    is_private[i]: block i of the table is this request's own, not the index's; num_private are.
    cached_tokens: the first so many tokens have KV in the table once `gate` is open.
    written: events, not over yet when last looked at, of the kernels that write what was committed.
    is_damaged: such a kernel failed, so nothing more of the request is cached.
    pinned: the end of its path while it is preempted.
    room: what block_table and is_private are the first part of, once it has grown.
    is_aborted: nobody wants it any more; its engine ends it as soon as its kernels allow.
    promise: the blocks that it computes, for others to wait for.
    missed: why it did not find all of its prompt at admission (see `explain.MISS_REASONS`), "" if
        it did. missed_since: what became of the first block that was missing, if that is known.
    """

    spec: RequestSpec
    prompt: Prompt
    block_table: Ids
    is_private: Mask
    lease: Lease
    cached_tokens: int
    matched: Matched
    gate: LayerGate
    loads: tuple[Movement, ...]
    num_private: int
    state: RequestState = RequestState.RUNNING
    computed_tokens: int = 0
    written: tuple[Event, ...] = ()
    is_damaged: bool = False
    pinned: TreeNode | None = None
    is_aborted: bool = False
    room: tuple[Ids, Mask] | None = None
    promise: Promise | None = None
    missed: str = ""
    missed_since: HistoryEvent | None = None

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
        """Add private blocks at the end of the table. Both arrays have room for as many again, so
        that a request that grows block by block does not copy them each time."""
        start, stop = len(self.block_table), len(self.block_table) + len(slots)
        if self.room is None or len(self.room[0]) < stop:
            room = np.empty(2 * stop, np.int32), np.ones(2 * stop, np.bool_)
            room[0][:start], room[1][:start] = self.block_table, self.is_private
            self.room = room
        table, private = self.room
        table[start:stop] = slots
        self.block_table, self.is_private = table[:stop], private[:stop]

    def private_slots(self) -> Ids:
        table = self.block_table
        return table[self.is_private[: len(table)].nonzero()[0]]

    def check_tokens(self, tokens: bytes) -> None:
        """Raise BadRequestError unless `tokens`, packed, can be a commit of this request, and
        what `check_wanted` raises."""
        self.check_wanted()
        room = len(self.block_table) * self.prompt.block_size
        if len(tokens) % TOKEN_BYTES or len(tokens) // TOKEN_BYTES > room:
            raise BadRequestError(f"a commit has whole tokens, {room} at the most")
        if not self._goes_on(tokens):
            raise BadRequestError("a commit starts with the request's own tokens, none left out")

    def _goes_on(self, tokens: bytes) -> bool:
        """Whether `tokens` begin with those of the last commit, and as the request does."""
        wanted = self.spec.prompt.tokens
        if not self.computed_tokens and tokens is wanted:
            return True
        known = self.prompt.tokens[: self.computed_tokens * TOKEN_BYTES]
        return tokens.startswith(known) and tokens.startswith(wanted[: len(tokens)])

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
        elif len(self.is_private) != len(self.block_table):
            wrong.append(f"{who} does not know whose its blocks are")
        elif not has_failed and self._differs_from(index):
            wrong.append(f"{who} has other blocks in its table than the index has for its tokens")
        return wrong

    def _differs_from(self, index: Index) -> bool:
        num_blocks = self.lease.num_blocks
        cached = index.slots(Tier.DEVICE, self.lease.node, 0, num_blocks)
        shared = ~self.is_private[:num_blocks]
        return bool((shared & (cached != self.block_table[:num_blocks])).any())

    def check_running(self) -> None:
        if self.state is not RequestState.RUNNING:
            how = "has ended" if self.state is RequestState.ENDED else "is preempted"
            raise OwnershipError(f"request {self.request_id!r} {how}")

    def check_wanted(self) -> None:
        """Raise OwnershipError if it has ended, RequestAbortedError if it should end."""
        self.check_running()
        if self.is_aborted:
            raise RequestAbortedError(f"request {self.request_id!r} was aborted")


@dataclass(slots=True)
class TenantUse:
    """What one tenant's requests have. num_running, num_blocks: of those that run. num_with_blocks,
    num_private: of those that have ended with copies at work, too; num_private blocks are theirs
    alone, and not the index's."""

    num_running: int = 0
    num_blocks: int = 0
    num_with_blocks: int = 0
    num_private: int = 0


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
        return self._of_tenant.get(space, _NO_USE)

    def has_tenant(self, space: str) -> bool:
        """Whether requests of a tenant run, or have ended with copies at work."""
        return space in self._of_tenant

    def add(self, request: Request) -> None:
        self.by_id[request.request_id] = request
        space = request.spec.prompt.space
        use = self._of_tenant.get(space)
        if use is None:
            use = self._of_tenant[space] = TenantUse()
        use.num_running += 1
        use.num_blocks += len(request.block_table)
        use.num_with_blocks += 1
        use.num_private += request.num_private

    def grown(self, request: Request, num_blocks: int) -> None:
        """A running request has so many blocks more, all private."""
        request.num_private += num_blocks
        use = self._of_tenant[request.spec.prompt.space]
        use.num_blocks += num_blocks
        use.num_private += num_blocks

    def cached(self, request: Request, num_blocks: int) -> None:
        """So many of its private blocks are the index's now."""
        request.num_private -= num_blocks
        self._of_tenant[request.spec.prompt.space].num_private -= num_blocks

    def remove(self, request: Request) -> None:
        """It does not run any more; it has its blocks still."""
        del self.by_id[request.request_id]
        use = self._of_tenant[request.spec.prompt.space]
        use.num_running -= 1
        use.num_blocks -= len(request.block_table)

    def freed(self, request: Request) -> None:
        """It has given back all of its blocks."""
        space = request.spec.prompt.space
        use = self._of_tenant[space]
        use.num_private -= request.num_private
        use.num_with_blocks -= 1
        if not use.num_with_blocks:
            del self._of_tenant[space]

    def findings(self) -> list[str]:
        """What is wrong with the counts, in words."""
        found: dict[str, TenantUse] = {}
        for one in self:
            use = found.setdefault(one.space, TenantUse())
            use.num_with_blocks += 1
            use.num_private += int(np.count_nonzero(one.is_private))
            if one not in self.ending:
                use.num_running += 1
                use.num_blocks += len(one.block_table)
        return [
            f"tenant {space!r} has {found.get(space)}, but {self._of_tenant.get(space)} is counted"
            for space in sorted(found.keys() | self._of_tenant.keys())
            if found.get(space) != self._of_tenant.get(space)
        ]
