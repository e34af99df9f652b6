"""Bodies and answers for engines that compute by themselves: requests from admission to end."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec

from tierkv.api.types import FieldError, MatchedTokens, PromptBody
from tierkv.cache.tokens import TOKEN_BYTES, pack
from tierkv.pd.claims import ClaimPolicy

NewTokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
LeaseSeconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
WaitSeconds = Annotated[float, msgspec.Meta(gt=0, le=600)]
_Word = Annotated[str, msgspec.Meta(max_length=256)]
Sampling = Annotated[dict[_Word, _Word], msgspec.Meta(max_length=64)]

DEFAULT_LEASE_S = 60.0
DEFAULT_WAIT_S = 30.0


class Wait(Enum):
    """What an admission answers after: `admitted`, or `loaded`, when cached blocks are there."""

    ADMITTED = "admitted"
    LOADED = "loaded"


class State(Enum):
    """Of a request of an engine."""

    RUNNING = "running"
    PREEMPTED = "preempted"  # its blocks are back in the cache until /resume
    FINISHED = "finished"  # all given back; what was committed stays cached
    ABORTED = "aborted"
    EXPIRED = "expired"  # its lease ran out: no call named it for so long


class Loads(Enum):
    """Of the cached blocks that a request waits for."""

    NONE = "none"  # it has ended, or is preempted
    LOADING = "loading"
    LOADED = "loaded"  # cached_tokens of KV are in the block table
    FAILED = "failed"  # nothing below may be relied on: end the request, admit it without cache


class AdmitBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """request_id: asked again with the same body, the answer is the first one; without it the
    headers Idempotency-Key or X-Request-Id name the request.

    max_new_tokens: room for so many generated tokens is reserved with the prompt's.
    use_cache: False matches nothing. priority: of those that wait, the higher goes first.
    deadline_s: how long to wait for room; then it is refused, with nothing held.
    wait: `loaded` answers when the cached blocks are on the device.
    """

    request_id: str | None = None
    max_new_tokens: NewTokens = 0
    use_cache: bool = True
    priority: Priority = 0
    wait: Wait = Wait.ADMITTED
    deadline_s: WaitSeconds = DEFAULT_WAIT_S
    ttl_s: LeaseSeconds = DEFAULT_LEASE_S


class ClaimBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prompt must be the one that was published. deadline_s: how long to wait for the ticket.

    policy: what to do if not every block can be had. sampling: how the engine would go on; a ticket
    that says otherwise is refused as `incompatible`, one that says nothing is not.
    """

    ticket_id: str
    request_id: str | None = None
    max_new_tokens: NewTokens = 0
    policy: ClaimPolicy = ClaimPolicy.WHOLE
    wait: Wait = Wait.ADMITTED
    deadline_s: WaitSeconds | None = None
    ttl_s: LeaseSeconds = DEFAULT_LEASE_S
    sampling: Sampling = msgspec.field(default_factory=dict)


class CommitBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose KV is in the block table: either `tokens`, all of them from the prompt's first on, or
    the prompt's first `num_tokens` (all without it), and after the whole prompt `new_tokens`, all
    that were generated. Tokens are lists, or packed. The kernels that wrote the KV must be done.
    """

    tokens: list[int] | bytes | None = None
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    new_tokens: list[int] | bytes | None = None

    @property
    def is_empty(self) -> bool:
        return self.tokens is None and self.num_tokens is None and self.new_tokens is None

    def packed(self, prompt: bytes) -> bytes:
        """All committed tokens of a request with this packed prompt. Raises FieldError."""
        if self.tokens is not None:
            if self.num_tokens is not None or self.new_tokens is not None:
                raise FieldError("give tokens, or num_tokens and new_tokens, not both")
            return pack(self.tokens)
        known = prompt
        if self.num_tokens is not None:
            known = prompt[: self.num_tokens * TOKEN_BYTES]
            if len(known) != self.num_tokens * TOKEN_BYTES:
                raise FieldError("num_tokens is more than the prompt has")
        if self.new_tokens is None:
            return known
        if len(known) != len(prompt):
            raise FieldError("new_tokens come after the whole prompt: leave num_tokens out")
        return known + pack(self.new_tokens)


class ExtendBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """num_tokens: room for so many beyond the prompt's and the committed ones."""

    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    deadline_s: WaitSeconds = DEFAULT_WAIT_S


class ResumeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: NewTokens = 0
    deadline_s: WaitSeconds = DEFAULT_WAIT_S


class PublishBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ticket_id: what the decode node asks for; the request's id without it.

    first_tokens: those generated already. sampling: how, in the engine's own words: equal texts
    where equal tokens would be chosen. The prompt must be committed.
    """

    ticket_id: str | None = None
    first_tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]] = []
    sampling: Sampling = {}


class StreamBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ticket_id: what the decode node asks for; the request's id without it."""

    ticket_id: str | None = None


class StreamAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """streams: False where the node's settings say that prompts go out only when computed."""

    request_id: str
    ticket_id: str
    streams: bool


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """block_table: device blocks in order: a list in JSON, in msgpack packed little-endian int32.

    cached_tokens: so many first tokens need not be computed once `loads` is `loaded`.
    expires_in_s: until the lease ends, if no call renews it; null for a request that has ended.
    """

    request_id: str
    state: State
    loads: Loads
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    matched: MatchedTokens
    block_size: int
    block_table: list[int] | bytes
    expires_in_s: float | None


class ClaimAnswer(RequestAnswer, frozen=True, kw_only=True):
    """producer: the node that published the prompt. first_tokens: what it had generated. sampling:
    how, if it says. Null and none if the policy went on without a ticket."""

    ticket_id: str
    producer: str | None
    first_tokens: list[int]
    sampling: dict[str, str]


class EndAnswer(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    state: State
    computed_tokens: int


class PublishAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """num_blocks: of the prompt, its tail of tail_tokens included; present_blocks of them were in
    storage already, early_blocks went there before the prompt was computed, if it was streamed.
    expires_at: of the ticket, in Unix seconds."""

    request_id: str
    ticket_id: str
    num_blocks: int
    present_blocks: int
    early_blocks: int
    tail_tokens: int
    flushed_bytes: int
    expires_at: float
