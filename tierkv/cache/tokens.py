"""Tokens as little-endian int32 bytes: the one form in which tierkv keeps and hashes them."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
import numpy.typing as npt

from tierkv.errors import BadRequestError

TOKEN_BYTES: Final = 4
_HAS_FAST_ARRAYS: Final = sys.byteorder == "little" and array("I").itemsize == TOKEN_BYTES
_INT32: Final = np.dtype("<i4")
_least: Final = np.minimum.reduceat  # a third less to call than `reduce`, which makes an iterator
_WHOLE: Final = np.zeros(1, np.intp)
Tokens = Sequence[int] | npt.NDArray[np.integer] | bytes | bytearray | memoryview


def pack(tokens: Tokens) -> bytes:
    """`tokens` as little-endian int32 bytes, the same for a list, an array or packed bytes.

    bytes, a bytearray and a view of bytes are taken to be packed already. Raises BadRequestError if
    they are not whole tokens, or if a token is not an integer in 0..2**31-1.
    """
    packed = tokens if type(tokens) is bytes else _packed(tokens)
    if len(packed) % TOKEN_BYTES:
        raise BadRequestError(f"{len(packed)} bytes are not a whole number of int32 tokens")
    if packed and _least(np.frombuffer(packed, _INT32), _WHOLE).item() < 0:
        raise BadRequestError("tokens must be integers in 0..2147483647: one is negative or larger")
    return packed


def _packed(tokens: Tokens) -> bytes:
    if isinstance(tokens, memoryview):
        tokens = tokens.tobytes() if tokens.format in "Bc" else np.asarray(tokens)
    if isinstance(tokens, (bytes, bytearray)):
        return bytes(tokens)
    return _pack_array(tokens) if isinstance(tokens, np.ndarray) else _pack_sequence(tokens)


def _pack_sequence(tokens: Sequence[int]) -> bytes:
    """What is beyond int32 raises here, or comes out negative."""
    if isinstance(tokens, (AbstractSet, Mapping)):
        raise BadRequestError(f"tokens have an order, a {type(tokens).__name__} has none")
    try:
        if _HAS_FAST_ARRAYS and type(tokens) in {list, tuple}:
            # 4.0 ns a token of a list not seen before; array("I", tokens) takes 5.5, struct.pack
            # 8.1, marshal 10, numpy.fromiter 12, array("i", ...) 15, numpy.array 17 (2-core x86-64
            # VM, Python 3.11, 6,000 to 12,000 tokens, 2026-11-21).
            packed = array("I")
            packed.fromlist(tokens if isinstance(tokens, list) else list(tokens))
            return packed.tobytes()
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except (TypeError, OverflowError, struct.error) as error:
        raise BadRequestError(f"tokens must be integers in 0..2147483647: {error}") from error


def _pack_array(tokens: npt.NDArray[np.integer]) -> bytes:
    tokens = np.asarray(tokens)  # no subclass that would leave some out of the checks
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
    return np.frombuffer(packed, _INT32)


def count(packed: bytes) -> int:
    return len(packed) // TOKEN_BYTES


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two short packed sequences share."""
    length = min(len(left), len(right))
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0
    if left[:length] == right[:length]:
        return length // TOKEN_BYTES
    # One exclusive or of long integers: its lowest set bit lies in the first token that differs.
    both = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    return ((both & -both).bit_length() - 1) // (8 * TOKEN_BYTES)


def common_blocks(  # noqa: PLR0917 - two places, how far, and in what steps
    left: bytes, left_at: int, right: bytes, right_at: int, most: int, width: int
) -> int:
    """How many blocks of `width` bytes, at most `most`, `left` from byte `left_at` on shares with
    `right` from byte `right_at` on. Reads what is shared at most three times, copies nothing.
    """
    theirs = memoryview(right)[right_at : right_at + most * width]
    if left.startswith(theirs, left_at):
        return most
    done, differs = 0, most  # so many blocks are equal, so many are not
    while differs - done > 1:
        middle = (done + differs) // 2
        if left.startswith(theirs[done * width : middle * width], left_at + done * width):
            done = middle
        else:
            differs = middle
    return done
