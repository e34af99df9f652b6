"""The header in front of every stored block, and the check of what comes back.

    value   | header, 88 bytes | payload, exactly the bytes of the host slot |

The format is written down in docs/storage-format.md, with a test vector.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import xxhash

from tierkv.errors import StoreCorruptError
from tierkv.storage.protocol import Buffer, Digest

MAGIC = b"TKVB"
VERSION = 1
LAYOUT_DIGEST_BYTES = 16
KEY_DIGEST_BYTES = 32

# magic, version, flags, layout digest, key digest, num_tokens, reserved, payload bytes
_FIELDS = struct.Struct("<4sHH16s32sIIQ")
FIELDS_BYTES = _FIELDS.size
CHECKSUM_BYTES = 16
HEADER_BYTES = FIELDS_BYTES + CHECKSUM_BYTES
# Bytes of values whose header may be made when they are sent, maybe on the loop. SET of 512 KiB to
# 8 MiB came to 1.0 to 1.1 of the rate of headers made by threads before, 2 MiB that replace others
# to 1.0 to 1.16 (Redis 7.0, 2 cores, 1 to 8 connections in turn, 2026-11-23). With 64 KiB the loop
# came 4 instead of 2.5 ms late; 8 MiB stop it for 0.3 ms.
_LATE_LEAST, _LATE_MOST = 256 << 10, 8 << 20


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


@dataclass(frozen=True, slots=True)
class ValueIdentity:
    """What a value has to be.

    layout_digest: 16 bytes or more, of which the first 16 count. key_digest: 32 bytes, those that
    the value's name was made from.
    """

    layout_digest: bytes
    key_digest: bytes
    num_tokens: int

    def __post_init__(self) -> None:
        assert len(self.layout_digest) >= LAYOUT_DIGEST_BYTES, (
            "a layout digest has 16 bytes or more"
        )
        assert len(self.key_digest) == KEY_DIGEST_BYTES, "a block digest has 32 bytes"


class Codec(Protocol):
    """How blocks become values. Safe from several threads."""

    @property
    def header_bytes(self) -> int: ...

    def encode(self, payload: Buffer, identity: ValueIdentity) -> tuple[bytes, Buffer]:
        """The header, and what is stored after it: `payload` itself or as many other bytes."""

    def header_later(self, payload: Buffer, identity: ValueIdentity) -> DeferredHeader | None:
        """The header that `encode` returns with `payload` itself, made when somebody sends it; None
        where that takes too long for the loop, or where there is nothing to gain."""

    def digest(self, header: Buffer) -> Digest | None:
        """What can take a value as it lands, its header first, into `header`, so that `decode` need
        not read it; None where that takes too long for the loop."""

    def decode(
        self,
        header: Buffer,
        payload: memoryview,
        identity: ValueIdentity,
        digest: Digest | None = None,
    ) -> None:
        """Check header and payload; afterwards `payload` is what was encoded.

        digest: of this codec, and it has taken these bytes. Any change to any bit of header or
        payload raises DamagedValueError, and payload holds anything.
        """


class PlainDigest:
    """The checksum of a value that arrives header first."""

    __slots__ = ("_header", "_header_left", "_sum")

    def __init__(self, header: Buffer) -> None:
        """header: where the header lands."""
        self._header = memoryview(header)
        self._header_left = HEADER_BYTES
        self._sum = xxhash.xxh3_128()

    def update(self, piece: memoryview, /) -> None:
        if self._header_left:
            num_bytes = min(self._header_left, len(piece))
            self._header_left -= num_bytes
            if self._header_left:
                return
            self._sum.update(self._header[:FIELDS_BYTES])
            piece = piece[num_bytes:]
        self._sum.update(piece)

    def checksum(self) -> bytes:
        return self._sum.digest()


class DeferredHeader:
    """The header of a value, which is made when this is called first: `content` is to be its."""

    __slots__ = ("_identity", "_is_made", "_payload", "content")

    def __init__(self, payload: Buffer, identity: ValueIdentity) -> None:
        self.content = bytearray(HEADER_BYTES)
        self._payload = payload
        self._identity = identity
        self._is_made = False

    def __call__(self) -> None:
        """From any thread, and from several: all of them write the same."""
        if not self._is_made:
            self.content[:] = _PLAIN.encode(self._payload, self._identity)[0]
            self._is_made = True


class PlainCodec:
    """A checksum, which finds accidents. `payload` is read once and neither copied nor changed."""

    header_bytes = HEADER_BYTES

    def encode(self, payload: Buffer, identity: ValueIdentity) -> tuple[bytes, Buffer]:
        fields = pack_fields(identity, memoryview(payload).nbytes, flags=0)
        return fields + _checksum(fields, payload), payload

    def header_later(self, payload: Buffer, identity: ValueIdentity) -> DeferredHeader | None:
        is_late = _LATE_LEAST <= memoryview(payload).nbytes <= _LATE_MOST
        return DeferredHeader(payload, identity) if is_late else None

    def digest(self, header: Buffer) -> PlainDigest:
        """256 KiB take it 9 us, at 29 GB/s."""
        return PlainDigest(header)

    def decode(
        self,
        header: Buffer,
        payload: memoryview,
        identity: ValueIdentity,
        digest: Digest | None = None,
    ) -> None:
        header = memoryview(header)
        check_fields(header, payload.nbytes, identity, flags=0, header_bytes=HEADER_BYTES)
        if isinstance(digest, PlainDigest):
            checksum = digest.checksum()
        else:
            checksum = _checksum(header[:FIELDS_BYTES], payload)
        if checksum != header[FIELDS_BYTES:]:
            raise DamagedValueError(Damage.CHECKSUM, "the checksum does not fit the bytes")


def pack_fields(identity: ValueIdentity, payload_bytes: int, *, flags: int) -> bytes:
    """The FIELDS_BYTES that every header starts with."""
    return _FIELDS.pack(
        MAGIC,
        VERSION,
        flags,
        identity.layout_digest[:LAYOUT_DIGEST_BYTES],
        identity.key_digest,
        identity.num_tokens,
        0,
        payload_bytes,
    )


def check_fields(
    header: memoryview,
    payload_bytes: int,
    identity: ValueIdentity,
    *,
    flags: int,
    header_bytes: int,
) -> None:
    """Raise DamagedValueError unless the header is `header_bytes` long and its fields fit."""
    if header.nbytes != header_bytes:
        raise DamagedValueError(
            Damage.LENGTH, f"a header has {header_bytes} bytes, this one {header.nbytes}"
        )
    magic, version, found_flags, layout, key, tokens, reserved, length = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise DamagedValueError(Damage.MAGIC, f"the value starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION or found_flags != flags or reserved:
        raise DamagedValueError(
            Damage.VERSION,
            f"the value has format {version} with flags {found_flags:#x}/{reserved:#x}; "
            f"this reader expects format {VERSION} with flags {flags:#x}",
        )
    if layout != identity.layout_digest[:LAYOUT_DIGEST_BYTES]:
        raise DamagedValueError(Damage.LAYOUT, f"the value has layout {layout.hex()}")
    if key != identity.key_digest:
        raise DamagedValueError(Damage.KEY, f"the value belongs to block {key.hex()}")
    if tokens != identity.num_tokens:
        raise DamagedValueError(
            Damage.TOKENS, f"the value holds {tokens} tokens, not {identity.num_tokens}"
        )
    if length != payload_bytes:
        raise DamagedValueError(
            Damage.LENGTH,
            f"the header promises {length} bytes of payload, there are {payload_bytes}",
        )


def read_identity(header: Buffer) -> ValueIdentity:
    """What a header says its value is: for tools; nobody else believes it.

    Raises DamagedValueError if it is too short.
    """
    if memoryview(header).nbytes < FIELDS_BYTES:
        raise DamagedValueError(Damage.LENGTH, "the value is shorter than its header")
    _, _, _, layout, key, tokens, _, _ = _FIELDS.unpack_from(header)
    return ValueIdentity(layout, key, tokens)


def _checksum(fields: Buffer, payload: Buffer) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(payload)
    return digest.digest()


_PLAIN = PlainCodec()


def encode_header(
    payload: Buffer, *, layout_digest: bytes, key_digest: bytes, num_tokens: int
) -> bytes:
    """The HEADER_BYTES of PlainCodec that go in front of `payload`."""
    return _PLAIN.encode(payload, ValueIdentity(layout_digest, key_digest, num_tokens))[0]


def check(
    header: Buffer, payload: Buffer, *, layout_digest: bytes, key_digest: bytes, num_tokens: int
) -> None:
    """Return if header and payload are the value that PlainCodec wrote for these arguments."""
    identity = ValueIdentity(layout_digest, key_digest, num_tokens)
    _PLAIN.decode(header, memoryview(payload), identity)
