"""What an engine holds of an admitted request: plain values, a snapshot that nobody changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from tierkv.cache.pool import Ids
from tierkv.pd.ticket import Ticket
from tierkv.sched.request import Matched, Request, RequestSpec
from tierkv.transfer.gate import LayerGate


class Until(Enum):
    """When an admission is READY."""

    LOADED = "loaded"  # every cached token is in the block table, or is named as failed
    ADMITTED = "admitted"  # it has its blocks; the engine waits at `gate`, layer by layer


@dataclass(frozen=True, slots=True)
class Admitted:
    """block_table: int32, read-only: the device blocks for the prompt and max_new_tokens more.

    cached_tokens: the first so many tokens have KV there (once `gate` is open, with
        Until.ADMITTED); the engine computes from there on.
    failed_blocks: blocks of the prompt, counted from 0, that were found in the cache but could not
        be loaded. They lie behind cached_tokens: the engine computes them with the rest.
    load_problem: why, None if there are none.
    """

    request_id: str
    block_table: Ids
    cached_tokens: int
    matched: Matched
    gate: LayerGate
    ticket: Ticket | None = None
    failed_blocks: tuple[int, ...] = ()
    load_problem: str | None = None


def admitted(
    request: Request,
    *,
    ticket: Ticket | None = None,
    failed_blocks: Iterable[int] = (),
    load_problem: str | None = None,
) -> Admitted:
    table = request.block_table.copy()  # `extend` makes another one
    table.flags.writeable = False
    return Admitted(
        request.request_id,
        table,
        request.cached_tokens,
        request.matched,
        request.gate,
        ticket,
        tuple(failed_blocks),
        load_problem,
    )


@dataclass(frozen=True, slots=True)
class LimitedSpec(RequestSpec):
    """A request again, after blocks of it failed to load. limit: use so many cached tokens."""

    limit: int = 0

    @property
    def max_cached_tokens(self) -> int:
        return min(self.limit, self.prompt.num_tokens - (1 if self.needs_logits else 0))

    @classmethod
    def of(cls, spec: RequestSpec, limit: int) -> LimitedSpec:
        return cls(
            spec.request_id,
            spec.prompt,
            spec.max_new_tokens,
            needs_logits=spec.needs_logits,
            uses_cache=spec.uses_cache,
            priority=spec.priority,
            limit=limit,
        )
