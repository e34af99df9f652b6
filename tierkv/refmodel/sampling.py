"""Bytes as tokens, and which comes next: a pure function of logits, settings and position.

The model reads any byte but writes only printable ASCII and newline, so that what it generates can
be shown in a terminal, a log line or a JSON answer as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.errors import BadRequestError
from tierkv.refmodel.config import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose among the logits.

    temperature: 0 is greedy; above it, logits are divided by it.
    seed: of a request; the same seed gives the same text.
    top_k: how many of the best tokens may be chosen; 0 is all of them.

    Raises BadRequestError if a number is out of range.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0

    def readable(self) -> dict[str, str]:
        """For a ticket: equal where the same tokens are chosen, whatever the logits."""
        if self.is_greedy:
            return {"temperature": "0"}
        return {
            "temperature": str(float(self.temperature)),
            "seed": str(self.seed),
            "top_k": str(self.top_k),
        }

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadRequestError(
                f"temperature must be finite and not negative, not {self.temperature}"
            )
        if not 0 <= self.seed < 2**64:
            raise BadRequestError(f"seed must be in [0, 2**64), not {self.seed}")
        if self.top_k < 0:
            raise BadRequestError(f"top_k must not be negative, not {self.top_k}")


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The token that goes to absolute `position`, chosen by `logits` [vocab].

    Greedy takes the lowest id among equals. Otherwise the only randomness is word `position` of
    the Philox stream keyed by the seed (a counter-based generator: Salmon et al. 2011), so a
    second node that knows seed and position goes on exactly where the first stopped, with no
    generator state handed over. A logit of -inf is never chosen.

    Raises BadRequestError if the position is negative, a logit is NaN, or none is finite.
    """
    if position < 0:
        raise BadRequestError(f"a position must not be negative, not {position}")
    best = int(np.argmax(logits))  # the first of equals; a NaN would win
    if not np.isfinite(logits[best]):
        raise BadRequestError("no token can be chosen: the largest logit is not finite")
    if sampling.is_greedy:
        return best
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature takes the others to -inf, as it should
        weights = np.exp((wide - wide[best]) / sampling.temperature)
    if sampling.top_k:
        ranked = np.argsort(-wide, kind="stable")  # equals stay in order of their ids
        weights[ranked[sampling.top_k :]] = 0.0
    cumulative = np.cumsum(weights)
    point = _uniform(sampling.seed, position) * cumulative[-1]
    chosen = int(np.searchsorted(cumulative, point, side="right"))
    last = int(np.flatnonzero(weights)[-1])  # point may have been rounded up to the whole sum
    return min(chosen, last)


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), the same for the same arguments everywhere."""
    word = int(np.random.Philox(key=seed, counter=position).random_raw())
    return float(word >> 11) * 2.0**-53


PRINTABLE: npt.NDArray[np.bool_] = np.array(
    [chr(token) == "\n" or " " <= chr(token) <= "~" for token in range(VOCAB_SIZE)]
)
"""bool [256]: the tokens that the model may generate."""
PRINTABLE.setflags(write=False)


def encode(text: str) -> npt.NDArray[np.int32]:
    """int32 [n]: the UTF-8 bytes of `text`, one token each."""
    return encode_bytes(text.encode())


def encode_bytes(raw: bytes) -> npt.NDArray[np.int32]:
    """int32 [n]: one token per byte."""
    return np.frombuffer(raw, np.uint8).astype(np.int32)


def decode(tokens: Iterable[int]) -> str:
    """The text of `tokens`; bytes that are not UTF-8 become U+FFFD.

    Raises BadRequestError if a token is not in [0, 256).
    """
    try:
        return bytes(int(token) for token in tokens).decode(errors="replace")
    except ValueError as error:
        raise BadRequestError(f"a token of the reference model is a byte: {error}") from error
