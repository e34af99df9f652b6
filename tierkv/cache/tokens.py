"""Tokens as little-endian int32 bytes: the one form in which tierkv keeps and hashes them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.errors import BadRequestError

TOKEN_BYTES = 4
Tokens = Sequence[int] | npt.NDArray[np.integer] | bytes


def pack(tokens: Tokens) -> bytes:
    """`tokens` as little-endian int32 bytes, the same for a list, an array or packed bytes.

    bytes are taken to be packed already. Raises BadRequestError if they are not whole tokens, or
    if a token is not an integer in 0..2**31-1.
    """
    if isinstance(tokens, bytes):
        packed = tokens
        if len(packed) % TOKEN_BYTES:
            raise BadRequestError(f"{len(packed)} bytes are not a whole number of int32 tokens")
    elif isinstance(tokens, np.ndarray):
        packed = _pack_array(tokens)
    else:
        try:
            packed_array = array("i", tokens)
        except (TypeError, OverflowError) as error:
            raise BadRequestError(f"tokens must be integers in 0..2147483647: {error}") from error
        if sys.byteorder == "big":
            packed_array.byteswap()
        packed = packed_array.tobytes()
    if packed and int(unpack(packed).min()) < 0:
        raise BadRequestError("tokens must be integers in 0..2147483647: one is negative")
    return packed


def _pack_array(tokens: npt.NDArray[np.integer]) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise BadRequestError(
            f"tokens must be a flat array of integers, not {tokens.ndim}-dimensional {tokens.dtype}"
        )
    if tokens.size and int(tokens.max()) > np.iinfo(np.int32).max:
        raise BadRequestError("tokens must be integers in 0..2147483647: one is too large")
    if tokens.size and int(tokens.min()) < 0:
        raise BadRequestError("tokens must be integers in 0..2147483647: one is negative")
    return tokens.astype("<i4").tobytes()


def unpack(packed: bytes) -> npt.NDArray[np.int32]:
    """A read-only int32 view of packed tokens."""
    return np.frombuffer(packed, dtype="<i4")


def count(packed: bytes) -> int:
    return len(packed) // TOKEN_BYTES


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two packed sequences share."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // TOKEN_BYTES
    differs = unpack(left[:length]) != unpack(right[:length])
    return int(differs.argmax())
