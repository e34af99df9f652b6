"""Bytes as tokens: text in, text out, and which tokens the model may say.

The model reads any byte but writes only printable ASCII and newline, so that what it generates
can be shown in a terminal, a log line or a JSON answer as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tierkv.errors import BadRequestError
from tierkv.refmodel.config import VOCAB_SIZE

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
