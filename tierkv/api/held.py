"""One request of an engine that computes by itself, as the desk keeps it between two calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.api.refusals import WrongStateError
from tierkv.api.types_requests import Loads, State
from tierkv.errors import TierKVError, TransferError
from tierkv.pd.handoff import Published
from tierkv.pd.stream import Stream
from tierkv.pd.ticket import Ticket
from tierkv.sched.request import Matched, Request

Key = tuple[str, str]  # tenant, request id
Publishing = asyncio.Task[Published | TierKVError]


@dataclass(slots=True, eq=False)
class Held:
    """request: None once it has ended. ticket: what it claimed, if it did.

    expires_at: on the loop's clock. num_calls: under way; the lease does not end under them.
    publishes: by ticket id, under way or done. streams: those of them that go out while the prompt
    is computed, until all of it is. resuming: what a resume waits in.
    """

    key: Key
    request: Request | None
    ttl_s: float
    ticket: Ticket | None = None
    expires_at: float = 0.0
    state: State = State.RUNNING
    num_calls: int = 0
    timer: asyncio.TimerHandle | None = None
    publishes: dict[str, Publishing] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    resuming: asyncio.Timeout | None = None
    prompt_tokens: int = 0
    block_size: int = 0
    matched: Matched = field(default_factory=Matched)
    computed_tokens: int = 0

    @classmethod
    def of(cls, key: Key, request: Request, ttl_s: float, ticket: Ticket | None) -> Held:
        prompt = request.spec.prompt
        return cls(
            key,
            request,
            ttl_s,
            ticket,
            prompt_tokens=prompt.num_tokens,
            block_size=prompt.block_size,
            matched=request.matched,
        )

    def running(self) -> Request:
        """Raises WrongStateError if it has ended or is preempted."""
        if self.request is None or self.state is not State.RUNNING:
            raise self.wrong_state()
        return self.request

    def preempted(self) -> Request:
        """Raises WrongStateError unless it is preempted and nobody brings it back yet."""
        if self.request is None or self.state is not State.PREEMPTED or self.resuming is not None:
            raise self.wrong_state()
        return self.request

    def wrong_state(self) -> WrongStateError:
        how = "being resumed" if self.resuming is not None else self.state.value
        return WrongStateError(f"request {self.key[1]!r} is {how}")

    def computed(self, num_tokens: int) -> None:
        """So many first tokens are committed."""
        self.computed_tokens = num_tokens
        for stream in self.streams.values():
            stream.advance(min(num_tokens, self.prompt_tokens))

    def finish_stream(
        self, ticket_id: str, first_tokens: Sequence[int], sampling: Mapping[str, str]
    ) -> None:
        """The prompt is computed, if it goes out under this ticket. Raises WrongStateError."""
        if ticket_id not in self.streams:
            return
        if self.computed_tokens < self.prompt_tokens:
            raise WrongStateError(
                f"only {self.computed_tokens} of {self.prompt_tokens} prompt tokens are committed"
            )
        self.streams.pop(ticket_id).finish(first_tokens, sampling=sampling)

    def fail_streams(self, reason: str) -> None:
        """No more of the prompt will be computed; who waits for its tickets is told why."""
        while self.streams:
            self.streams.popitem()[1].fail(reason)

    def busy_publishes(self) -> set[Publishing]:
        return {task for task in self.publishes.values() if not task.done()}

    @property
    def loads(self) -> Loads:
        if self.request is None or self.state is not State.RUNNING:
            return Loads.NONE
        gate = self.request.gate
        try:
            return Loads.LOADED if gate.is_open(gate.num_layers - 1) else Loads.LOADING
        except TransferError:
            return Loads.FAILED
