"""One prompt on its way through the gateway, as the nodes will be asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.cache.tokens import count, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """tokens: the prompt, packed. authorization: the caller's header, if it is to be handed on.

    seed: always given, so that a second node goes on as the first would have.
    """

    request_id: str
    tokens: bytes
    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    authorization: str | None = None

    @property
    def num_tokens(self) -> int:
        return count(self.tokens)

    def body(self, after: Sequence[int] = ()) -> dict[str, object]:
        """What any node is asked, for the prompt and the tokens `after` it."""
        return {
            "tokens": self.tokens + pack(after) if after else self.tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "seed": self.seed,
            "stream": True,
        }
