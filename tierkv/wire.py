"""msgpack for what goes to other processes: small, framed, versioned, checksummed records.

record   | magic, 4 bytes | version, u16 | xxh3_128 of all the rest | msgpack body |
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgpack
import msgspec
import xxhash

from tierkv.errors import StoreCorruptError

T = TypeVar("T")
_HEAD = struct.Struct("<4sH16s")


def seal(magic: bytes, version: int, record: object) -> bytes:
    """`record` (a msgspec struct or plain values) as one framed value."""
    body: bytes = msgpack.packb(msgspec.to_builtins(record, builtin_types=(bytes,)))
    return _HEAD.pack(magic, version, _checksum(magic, version, body)) + body


def unseal(magic: bytes, version: int, value: bytes, kind: type[T]) -> T:
    """The record in `value`. Raises StoreCorruptError if a byte of it is not as sealed, or if it
    is of another version."""
    if len(value) < _HEAD.size:
        raise StoreCorruptError(f"a record of {len(value)} bytes is too short")
    found, found_version, checksum = _HEAD.unpack_from(value)
    body = value[_HEAD.size :]
    if found != magic:
        raise StoreCorruptError(f"the record starts with {found!r}, not {magic!r}")
    if checksum != _checksum(magic, found_version, body):
        raise StoreCorruptError("the record's checksum does not fit its bytes")
    if found_version != version:
        raise StoreCorruptError(f"the record has version {found_version}, not {version}")
    try:
        # Without the builtin types text would be taken for bytes in base64.
        return msgspec.convert(msgpack.unpackb(body), kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, ValueError, msgpack.UnpackException) as error:
        raise StoreCorruptError(f"the record cannot be read: {error}") from error


def _checksum(magic: bytes, version: int, body: bytes) -> bytes:
    return xxhash.xxh3_128(magic + version.to_bytes(2, "little") + body).digest()
