"""The header in front of every stored block, and the check of what comes back.

    value   | header, 88 bytes | payload, exactly the bytes of the host slot |

The format is written down in docs/storage-format.md, with a test vector.
"""

from __future__ import annotations

import struct
from enum import Enum

import xxhash

from tierkv.errors import StoreCorruptError
from tierkv.storage.protocol import Buffer

MAGIC = b"TKVB"
VERSION = 1
LAYOUT_DIGEST_BYTES = 16
KEY_DIGEST_BYTES = 32

# magic, version, flags, layout digest, key digest, num_tokens, reserved, payload bytes
_FIELDS = struct.Struct("<4sHH16s32sIIQ")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES


class Damage(Enum):
    """What about a value is not as expected."""

    LENGTH = "length"  # shorter than its header, or not as long as the header says or we expect
    MAGIC = "magic"  # not a value of tierkv at all
    VERSION = "version"  # of another format version, or with flags this version does not know
    LAYOUT = "layout"  # of blocks laid out otherwise
    KEY = "key"  # another block, filed under this name
    TOKENS = "tokens"  # the same block with another number of tokens in it
    CHECKSUM = "checksum"  # the right value with wrong bytes


class DamagedValueError(StoreCorruptError):
    """A stored value is not what its reader expects; `damage` tells the cases apart."""

    def __init__(self, damage: Damage, message: str) -> None:
        super().__init__(message)
        self.damage = damage


def _checksum(fields: Buffer, payload: Buffer) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(payload)
    return digest.digest()


def encode_header(
    payload: Buffer, *, layout_digest: bytes, key_digest: bytes, num_tokens: int
) -> bytes:
    """The HEADER_BYTES that go in front of `payload`, which is read once and not copied.

    payload: C-contiguous. layout_digest: 16 bytes or more, of which the first 16 are kept.
    key_digest: 32 bytes, those that the value's name was made from.
    """
    assert len(layout_digest) >= LAYOUT_DIGEST_BYTES, "a layout digest has 16 bytes or more"
    assert len(key_digest) == KEY_DIGEST_BYTES, "a block digest has 32 bytes"
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        0,
        layout_digest[:LAYOUT_DIGEST_BYTES],
        key_digest,
        num_tokens,
        0,
        memoryview(payload).nbytes,
    )
    return fields + _checksum(fields, payload)


def check(
    header: Buffer, payload: Buffer, *, layout_digest: bytes, key_digest: bytes, num_tokens: int
) -> None:
    """Return if header and payload are the value that was written for these arguments.

    Any change to any bit of either raises DamagedValueError (a StoreCorruptError) that says what
    is wrong. Reads the payload once, without copying it; 72 µs for 2 MiB at 29 GB/s.
    """
    header = memoryview(header)
    num_bytes = memoryview(payload).nbytes
    if header.nbytes != HEADER_BYTES:
        raise DamagedValueError(
            Damage.LENGTH, f"a header has {HEADER_BYTES} bytes, this one {header.nbytes}"
        )
    magic, version, flags, layout, key, tokens, reserved, length = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise DamagedValueError(Damage.MAGIC, f"the value starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION or flags or reserved:
        raise DamagedValueError(
            Damage.VERSION,
            f"the value has format {version} with flags {flags:#x}/{reserved:#x}; "
            f"this reader knows format {VERSION} without flags",
        )
    if layout != layout_digest[:LAYOUT_DIGEST_BYTES]:
        raise DamagedValueError(Damage.LAYOUT, f"the value has layout {layout.hex()}")
    if key != key_digest:
        raise DamagedValueError(Damage.KEY, f"the value belongs to block {key.hex()}")
    if tokens != num_tokens:
        raise DamagedValueError(Damage.TOKENS, f"the value holds {tokens} tokens, not {num_tokens}")
    if length != num_bytes:
        raise DamagedValueError(
            Damage.LENGTH, f"the header promises {length} bytes of payload, there are {num_bytes}"
        )
    if _checksum(header[: _FIELDS.size], payload) != header[_FIELDS.size :]:
        raise DamagedValueError(Damage.CHECKSUM, "the checksum does not fit the bytes")
