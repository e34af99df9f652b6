"""The stored form of blocks and small values: headers with a checksum, a signature or a cipher.

    host slot -> payload codec -> | header, 88 bytes | stored payload | -> store

A `Codec` makes and checks headers; each of its subclasses implements one level of trust in other
writers of the store (the enum `Trust`). A `PayloadCodec`, such as a compression, encodes the bytes
after the header; the table `PAYLOAD_CODECS` lists these codecs. `seal` and `unseal` encode and
decode records that other processes read. The format is described in docs/storage-format.md, with a
test vector.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import msgpack
import msgspec
import xxhash

from tierkv.errors import ConfigError, StoreCorruptError, how_to_install
from tierkv.storage.protocol import Buffer, Digest

MAGIC = b"TKVB"
VERSION = 1
LAYOUT_DIGEST_BYTES = 16
KEY_DIGEST_BYTES = 32

# magic, version, flags, layout digest, key digest, num_tokens, payload codec, payload bytes
_FIELDS = struct.Struct("<4sHH16s32sIIQ")
FIELDS_BYTES = _FIELDS.size
CHECKSUM_BYTES = 16
HEADER_BYTES = FIELDS_BYTES + CHECKSUM_BYTES
_PAYLOAD_CODEC = slice(60, 64)
# Smallest and largest payloads, in bytes, with a header that may be computed when the value is
# sent, possibly on the event loop: SET is then 1.0 to 1.16 times as fast as with headers that
# threads compute before.
# Payloads of 64 KiB would delay the loop by 4 ms instead of 2.5 ms; 8 MiB block it for 0.3 ms.
_MIN_LATE_BYTES, _MAX_LATE_BYTES = 256 << 10, 8 << 20


class Damage(Enum):
    """The difference between a stored value and the value that its reader expects."""

    # Shorter than a header, or not as long as the header says or the reader expects.
    LENGTH = "length"
    MAGIC = "magic"  # not a value of tierkv at all
    VERSION = "version"  # format version, flags or payload codec that this reader does not know
    LAYOUT = "layout"  # a block of another layout
    KEY = "key"  # another block, stored under this name
    TOKENS = "tokens"  # the same block with another number of tokens
    CHECKSUM = "checksum"  # a wrong checksum, signature or cipher tag


class DamagedValueError(StoreCorruptError):
    """A stored value is damaged, or is not the value that its reader expects.

    Args:
        damage: the kind of difference between the value and the expected one.
        message: the error message.
    """

    def __init__(self, damage: Damage, message: str) -> None:
        super().__init__(message)
        self.damage = damage


@dataclass(frozen=True, slots=True)
class ValueIdentity:
    """The block or tail that a value must contain.

    Attributes:
        layout_digest: digest of the layout; only its first 16 bytes are compared.
        key_digest: digest of the block, 32 bytes, as in the value's name.
        num_tokens: number of tokens in the block.
    """

    layout_digest: bytes
    key_digest: bytes
    num_tokens: int

    def __post_init__(self) -> None:
        assert len(self.layout_digest) >= LAYOUT_DIGEST_BYTES, (
            "a layout digest must have at least 16 bytes"
        )
        assert len(self.key_digest) == KEY_DIGEST_BYTES, "a block digest must have 32 bytes"


class PayloadCodec(Protocol):
    """An encoding of a block's bytes, such as a compression. Thread-safe."""

    def encode(self, payload: Buffer) -> Buffer:
        """Return the encoded payload.

        If the result is not shorter than `payload`, the caller stores `payload` itself.
        """

    def decode(self, stored: bytes, room: memoryview) -> int:
        """Write the decoded payload to the start of `room`, and return its length in bytes.

        Args:
            stored: the encoded payload.
            room: writable memory for the payload.

        Raises:
            DamagedValueError: `stored` is malformed, or its payload is longer than `room`.
        """


IDENTITY = 0  # number of a payload that is stored as it is, without a copy


@dataclass(frozen=True, slots=True)
class PayloadCodecs:
    """A table of payload codecs.

    Attributes:
        by_number: the codecs for reading, by the number (1 to 2**32 - 1) in the header of a value.
        writes_with: the number of the codec for new values; IDENTITY for none.
    """

    by_number: Mapping[int, PayloadCodec] = field(default_factory=dict)
    writes_with: int = IDENTITY

    def __post_init__(self) -> None:
        assert IDENTITY not in self.by_number, "a payload with this number has no codec"
        assert self.writes_with == IDENTITY or self.writes_with in self.by_number, (
            "a codec that writes must be able to read"
        )

    def encode(self, payload: Buffer) -> tuple[int, Buffer]:
        """Compress a payload with the codec for new values.

        Returns:
            The number of the codec, and the bytes to store. IDENTITY (no compression) and `payload`
                itself if there is no codec for new values, or if the codec does not make the
                payload shorter.
        """
        if self.writes_with != IDENTITY:
            stored = self.by_number[self.writes_with].encode(payload)
            if memoryview(stored).nbytes < memoryview(payload).nbytes:
                return self.writes_with, stored
        return IDENTITY, payload


# A number is never reused for another codec, because stores may contain values with it.
PAYLOAD_CODECS = PayloadCodecs()


class Codec(ABC):
    """The translation of blocks to stored values and back. Thread-safe.

    A value is a header (the identity of its block, and a checksum, signature or cipher tag)
    followed by the stored payload. Subclasses differ in how they protect values against changes.

    Attributes:
        flags: number of the protection in the header: 0 for a checksum, FLAG_SIGNED or FLAG_SEALED.
        header_bytes: number of bytes of the header.
    """

    flags: ClassVar[int]
    header_bytes: ClassVar[int]

    def __init__(self, payloads: PayloadCodecs = PAYLOAD_CODECS) -> None:
        self._payloads = payloads

    def encode(self, payload: Buffer, identity: ValueIdentity) -> tuple[bytes, Buffer]:
        """Return the header of a value, and the bytes to store after it.

        These bytes are `payload` itself, its encryption of the same length, or a shorter encoding.

        Args:
            payload: bytes of the block or tail.
            identity: layout, key and number of tokens, for the header.
        """
        number, stored = self._payloads.encode(payload)
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.flags,
            identity.layout_digest[:LAYOUT_DIGEST_BYTES],
            identity.key_digest,
            identity.num_tokens,
            number,
            memoryview(stored).nbytes,
        )
        return self._close(fields, stored, identity)

    def header_later(self, payload: Buffer, identity: ValueIdentity) -> DeferredHeader | None:  # noqa: ARG002
        """Return an object that computes a value's header just before the value is sent.

        Args:
            payload: bytes of the block or tail.
            identity: layout, key and number of tokens, for the header.

        Returns:
            The object, to be stored together with `payload`; calling it computes the header's
                bytes. None if the caller must use `encode` instead, because the codec cannot
                compute the header separately, or it would take the event loop too long.
        """
        return None

    def digest(self, header: Buffer) -> Digest | None:  # noqa: ARG002
        """Return a checksum to update with a value's bytes as they arrive, for use by `decode`.

        Args:
            header: the buffer that receives the value's header. The checksum reads it after the
                header's bytes have arrived.

        Returns:
            The checksum; None if updating it would block the event loop for too long.
        """
        return None

    def decode(
        self,
        header: Buffer,
        room: memoryview,
        identity: ValueIdentity,
        digest: Digest | None = None,
        *,
        num_bytes: int | None = None,
    ) -> int:
        """Check a value, write its payload to the start of `room`, and return the payload's length.

        Args:
            header: the first `header_bytes` bytes of the value.
            room: buffer that contains the bytes after the header. The decoded payload is written
                into the same buffer, which must be large enough for it.
            identity: the block that the value must contain.
            digest: the checksum object from `Codec.digest`, already updated with all bytes of the
                value; None to compute the checksum in this call.
            num_bytes: number of the value's bytes in `room`, negative if the value is shorter than
                its header; None if the value fills `room`.

        Raises:
            DamagedValueError: a bit of header or payload differs from what was encoded, or the
                payload is longer than `room`. The content of `room` is then undefined.
        """
        num_bytes = room.nbytes if num_bytes is None else num_bytes
        number = self.check(header, room[: max(num_bytes, 0)], identity, digest, num_bytes)
        if number == IDENTITY:
            return num_bytes
        return self._payloads.by_number[number].decode(bytes(room[:num_bytes]), room)

    def check(
        self,
        header: Buffer,
        stored: memoryview,
        identity: ValueIdentity,
        digest: Digest | None = None,
        num_bytes: int | None = None,
    ) -> int:
        """Check a value, and return the number of its payload codec.

        If the value is encrypted, `stored` is decrypted in place.

        Args:
            header: the header, `header_bytes` bytes.
            stored: the bytes after the header.
            identity: the block that the value must contain.
            digest: the checksum object that `Codec.digest` returned, after it has received all
                bytes of the value; None to compute the checksum here.
            num_bytes: number of bytes that the store has after the header, which must be as many as
                the header says; negative if the value is shorter than its header. None for the
                length of `stored`.

        Raises:
            DamagedValueError: the value is damaged, has another length, belongs to another block
                than `identity`, or names an unknown payload codec.
        """
        header = memoryview(header)
        number = check_fields(
            header,
            stored.nbytes if num_bytes is None else num_bytes,
            identity,
            flags=self.flags,
            header_bytes=self.header_bytes,
        )
        if number != IDENTITY and number not in self._payloads.by_number:
            raise DamagedValueError(
                Damage.VERSION,
                f"the value is written with payload codec {number}, which this version "
                "does not know: upgrade this node",
            )
        self._open(header[:FIELDS_BYTES], header[FIELDS_BYTES:], stored, identity, digest)
        return number

    @abstractmethod
    def _close(
        self, fields: bytes, stored: Buffer, identity: ValueIdentity
    ) -> tuple[bytes, Buffer]:
        """Complete the header of a value with a checksum, signature or encryption tag.

        `fields` is the header without this last part, and `stored` the bytes after the header.
        Return the complete header and the bytes to store after it, encrypted if the codec
        encrypts.
        """

    @abstractmethod
    def _open(
        self,
        fields: memoryview,
        rest: memoryview,
        stored: memoryview,
        identity: ValueIdentity,
        digest: Digest | None,
    ) -> None:
        """Verify a value's checksum, signature or tag, and decrypt an encrypted value in place.

        `fields` is the first part of the header, `rest` the part with the checksum, signature or
        tag, and `stored` the bytes after the header. Raise DamagedValueError if the value is not
        what was written.
        """


def is_packed(header: Buffer) -> bool:
    """Return True if the value with this header was written with a payload codec."""
    return any(memoryview(header)[_PAYLOAD_CODEC])


class PlainDigest:
    """The checksum of one value, computed while the value's bytes arrive in order, header first."""

    __slots__ = ("_header", "_header_left", "_sum")

    def __init__(self, header: Buffer) -> None:
        """Begin a checksum.

        Args:
            header: the buffer that receives the value's header. The checksum reads it after the
                header's bytes have arrived.
        """
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
    """A header that is computed when this object is first called, for a value of `PlainCodec`.

    Args:
        payload: bytes of the block or tail.
        identity: layout, key and number of tokens, for the header.

    Attributes:
        content: bytes of the header; zeros before the first call.
    """

    __slots__ = ("_identity", "_is_made", "_payload", "content")

    def __init__(self, payload: Buffer, identity: ValueIdentity) -> None:
        self.content = bytearray(HEADER_BYTES)
        self._payload = payload
        self._identity = identity
        self._is_made = False

    def __call__(self) -> None:
        """Compute the header. Thread-safe: all threads write the same bytes."""
        if not self._is_made:
            self.content[:] = _PLAIN.encode(self._payload, self._identity)[0]
            self._is_made = True


class PlainCodec(Codec):
    """The codec for trusted stores: a checksum detects accidental damage.

    Without a payload codec, the payload is read once and not copied.
    """

    flags = 0
    header_bytes = HEADER_BYTES

    def header_later(self, payload: Buffer, identity: ValueIdentity) -> DeferredHeader | None:
        is_late = _MIN_LATE_BYTES <= memoryview(payload).nbytes <= _MAX_LATE_BYTES
        if not is_late or self._payloads.writes_with != IDENTITY:
            return None
        return DeferredHeader(payload, identity)

    def digest(self, header: Buffer) -> PlainDigest:
        """Return an object that computes the checksum of a value while the value's bytes arrive.

        This is fast enough for the event loop: 256 KiB take 9 us.
        """
        return PlainDigest(header)

    def _close(
        self,
        fields: bytes,
        stored: Buffer,
        identity: ValueIdentity,  # noqa: ARG002 - in the fields
    ) -> tuple[bytes, Buffer]:
        return fields + _checksum(fields, stored), stored

    def _open(
        self,
        fields: memoryview,
        rest: memoryview,
        stored: memoryview,
        identity: ValueIdentity,  # noqa: ARG002 - in the fields
        digest: Digest | None,
    ) -> None:
        if isinstance(digest, PlainDigest):
            checksum = digest.checksum()
        else:
            checksum = _checksum(fields, stored)
        if checksum != rest:
            raise DamagedValueError(Damage.CHECKSUM, "the checksum does not match the bytes")


def check_fields(
    header: memoryview,
    payload_bytes: int,
    identity: ValueIdentity,
    *,
    flags: int,
    header_bytes: int,
) -> int:
    """Check the length and the fields of a header.

    Args:
        header: first bytes of the value.
        payload_bytes: number of bytes after the header; below 0 if the value is shorter than its
            header.
        identity: the block that the value must contain.
        flags: flags that the header must have.
        header_bytes: length that the header must have.

    Returns:
        The number of the value's payload codec.

    Raises:
        DamagedValueError: the length or a field differs.
    """
    if header.nbytes != header_bytes or payload_bytes < 0:
        raise DamagedValueError(
            Damage.LENGTH,
            f"the value has {header.nbytes + payload_bytes} bytes, fewer than a "
            f"header's {header_bytes}",
        )
    magic, version, found_flags, layout, key, tokens, number, length = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise DamagedValueError(Damage.MAGIC, f"the value starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION or found_flags != flags:
        raise DamagedValueError(
            Damage.VERSION,
            f"the value has format {version} with flags {found_flags:#x}, but this "
            f"node reads format {VERSION} with flags {flags:#x}: give all nodes the "
            "same version and storage.trust",
        )
    if layout != identity.layout_digest[:LAYOUT_DIGEST_BYTES]:
        raise DamagedValueError(Damage.LAYOUT, f"the value has another layout, {layout.hex()}")
    if key != identity.key_digest:
        raise DamagedValueError(Damage.KEY, f"the value belongs to another block, {key.hex()}")
    if tokens != identity.num_tokens:
        raise DamagedValueError(
            Damage.TOKENS, f"the value holds {tokens} tokens, not {identity.num_tokens}"
        )
    if length != payload_bytes:
        raise DamagedValueError(
            Damage.LENGTH,
            f"the value has {payload_bytes} bytes of payload, but its header says {length}",
        )
    return int(number)


def read_identity(header: Buffer) -> ValueIdentity:
    """Return the layout, key and number of tokens that a value's header names.

    Nothing is verified: neither the header nor the bytes after it.

    Args:
        header: the first bytes of the value.

    Raises:
        DamagedValueError: the header is too short.
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


# Codecs for a store with other writers: a tenant's values are signed or encrypted with its key.
#
#     signed  | fields, 72 | BLAKE3 with key, 16 | payload |
#     sealed  | fields, 72 | nonce, 12 | zeros, 4 | tag, 16 | payload, AES-256-GCM |
#
# Both detect forged values, and sealed ones are encrypted, too. Sealing is faster: 5.1 GB/s against
# 2.8 on one core with AES instructions. Needs the extra `untrusted` (blake3, cryptography).

if TYPE_CHECKING:  # an extra
    from blake3 import blake3
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
FLAG_SIGNED = 1
FLAG_SEALED = 2
_NONCE_BYTES = 12
_NONCE_FIELD_BYTES = 16
SEALED_HEADER_BYTES = FIELDS_BYTES + _NONCE_FIELD_BYTES + CHECKSUM_BYTES
_FORGED = "the value was written with another key than this tenant's, or was changed"


class Trust(Enum):
    """The trust in other writers of the store, which decides how values are protected.

    TRUSTED: a checksum detects accidental damage. SIGNED: a digest with a key also detects forged
    values. SEALED: values are encrypted, which also detects forged values.
    """

    TRUSTED = "trusted"  # values are checked for accidental damage
    SIGNED = "signed"  # values are also checked for forgery
    SEALED = "sealed"  # values are also encrypted, and so checked for forgery


def codec_for(trust: Trust, key: bytes | None, payloads: PayloadCodecs = PAYLOAD_CODECS) -> Codec:
    """Return the codec for one tenant's blocks.

    Args:
        trust: the protection against other writers of the store.
        key: the tenant's key of 32 bytes; None if `trust` needs none.
        payloads: the table of payload codecs.

    Raises:
        ConfigError: the key is missing or malformed, or a package is missing.
    """
    if trust is Trust.TRUSTED:
        return PlainCodec(payloads)
    kind = SignedCodec if trust is Trust.SIGNED else SealedCodec
    return kind(check_key(trust, key), payloads)


def check_key(trust: Trust, key: bytes | None) -> bytes:
    """Return `key` if it is a key of 32 bytes, otherwise raise an error.

    Args:
        trust: the value of the setting `storage.trust`, which the error names.
        key: the secret key of the deployment or of a tenant; None if no key is set.

    Raises:
        ConfigError: `key` is None or does not have 32 bytes.
    """
    if key is None or len(key) != KEY_BYTES:
        raise ConfigError(
            f"storage.trust is {trust.value}, which needs a key of {KEY_BYTES} bytes: set "
            "storage.key_file"
        )
    return key


class TenantCodecs:
    """The codecs of all fingerprints (model, layout, adapter, tenant) of a deployment.

    Each codec's key is derived from the deployment's key and the fingerprint. One tenant's codec
    therefore rejects another tenant's values as damaged.
    """

    def __init__(
        self,
        trust: Trust,
        key: bytes | None,
        payloads: PayloadCodecs = PAYLOAD_CODECS,
    ) -> None:
        """Check that codecs can be made with `trust` and `key`.

        Args:
            trust: the protection against other writers of the store.
            key: the deployment's key of 32 bytes; None if `trust` needs none.
            payloads: the table of payload codecs.

        Raises:
            ConfigError: the key is missing or malformed, or a package is missing.
        """
        self._key = key
        self._codecs: dict[str, Codec] = {}
        self._make = partial(codec_for, trust, payloads=payloads)
        self._make(key)

    def __call__(self, fingerprint: str) -> Codec:
        """Return the codec for values of one fingerprint (`Fingerprint.short`)."""
        codec = self._codecs.get(fingerprint)
        if codec is None:
            key = self._key and _derive(self._key, b"tierkv tenant v1" + fingerprint.encode())
            codec = self._codecs[fingerprint] = self._make(key)
        return codec


_MAX_KEY_FILE_BYTES = 4096  # a key takes 64


def read_key(path: str | Path) -> bytes:
    """Return the key, 32 bytes, in a file of 64 hex digits.

    Raises:
        ConfigError: the file cannot be read, or contains no key.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_KEY_FILE_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the key file {path} cannot be read: correct the path or its rights"
        ) from error
    return parse_key(text)


def parse_key(text: str) -> bytes:
    """Return the 32 bytes that 64 hex digits stand for.

    Raises:
        ConfigError: the text is not a key. The message does not repeat the text.
    """
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"a storage key must have {2 * KEY_BYTES} hex digits: make one with "
            "`openssl rand -hex 32`"
        )
    return key


def import_blake3() -> type[blake3]:
    """Return the hash function of the optional package `blake3`.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        from blake3 import blake3  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _missing("blake3") from error
    return blake3


def import_aes_gcm() -> tuple[type[AESGCM], type[Exception]]:
    """Return the cipher AES-GCM of the package `cryptography`, and its error for a forged value.

    Raises:
        ConfigError: the package, which is optional, is not installed.
    """
    try:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
    except ImportError as error:
        raise _missing("cryptography") from error
    return AESGCM, InvalidTag


def _missing(package: str) -> ConfigError:
    return ConfigError(
        f"storage.trust needs the package {package}, which is not installed: "
        f"{how_to_install('untrusted')}"
    )


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, purpose, hashlib.sha256)


class SignedCodec(Codec):
    """The codec that detects forged values: a keyed digest (BLAKE3) in place of the checksum.

    The stored payload is read once and not copied. Threads compute the digest, which takes 90 us
    for 256 KiB.

    Args:
        key: the tenant's key of 32 bytes.
        payloads: the table of payload codecs.
    """

    flags = FLAG_SIGNED
    header_bytes = HEADER_BYTES

    def __init__(
        self,
        key: bytes,
        payloads: PayloadCodecs = PAYLOAD_CODECS,
    ) -> None:
        super().__init__(payloads)
        self._blake3 = import_blake3()
        self._key = _derive(key, b"tierkv signed value v1")

    def _close(
        self,
        fields: bytes,
        stored: Buffer,
        identity: ValueIdentity,  # noqa: ARG002 - in the fields
    ) -> tuple[bytes, Buffer]:
        return fields + self._digest(fields, stored), stored

    def _open(
        self,
        fields: memoryview,
        rest: memoryview,
        stored: memoryview,
        identity: ValueIdentity,  # noqa: ARG002 - in the fields
        digest: Digest | None,
    ) -> None:
        assert digest is None, "this codec makes no digests"
        if not hmac.compare_digest(self._digest(fields, stored), rest):
            raise DamagedValueError(Damage.CHECKSUM, _FORGED)

    def _digest(self, fields: Buffer, stored: Buffer) -> bytes:
        digest = self._blake3(fields, key=self._key)
        digest.update(memoryview(stored))
        return digest.digest(CHECKSUM_BYTES)


class SealedCodec(Codec):
    """The codec that encrypts values: AES-256-GCM with a key per block and a random nonce.

    A block's key is derived from the tenant's key. The nonce is random, because one block may be
    written twice with different bytes. Encryption and decryption copy the payload.
    """

    flags = FLAG_SEALED
    header_bytes = SEALED_HEADER_BYTES

    def __init__(
        self,
        key: bytes,
        payloads: PayloadCodecs = PAYLOAD_CODECS,
        make_nonce: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Load the cipher.

        Args:
            key: the tenant's key of 32 bytes.
            payloads: the table of payload codecs.
            make_nonce: `make_nonce(n)` returns n bytes that it has not returned before.

        Raises:
            ConfigError: the package `cryptography` is not installed.
        """
        super().__init__(payloads)
        self._aes_gcm, self._invalid_tag = import_aes_gcm()
        self._key = key
        self._make_nonce = make_nonce

    def _close(
        self, fields: bytes, stored: Buffer, identity: ValueIdentity
    ) -> tuple[bytes, Buffer]:
        num_bytes = memoryview(stored).nbytes
        nonce = self._make_nonce(_NONCE_BYTES)
        sealed = memoryview(bytearray(num_bytes + CHECKSUM_BYTES))
        self._cipher(identity).encrypt_into(nonce, stored, fields, sealed)
        header = fields + nonce.ljust(_NONCE_FIELD_BYTES, b"\0") + bytes(sealed[num_bytes:])
        return header, sealed[:num_bytes]

    def _open(
        self,
        fields: memoryview,
        rest: memoryview,
        stored: memoryview,
        identity: ValueIdentity,
        digest: Digest | None,
    ) -> None:
        assert digest is None, "this codec makes no digests"
        nonce, padding = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:_NONCE_FIELD_BYTES]
        if any(padding):
            raise DamagedValueError(Damage.VERSION, "reserved bytes of the header are not 0")
        try:
            # The tag is in the header, so only the payload is written to the host slot.
            sealed = b"".join((stored, rest[_NONCE_FIELD_BYTES:]))
            self._cipher(identity).decrypt_into(bytes(nonce), sealed, bytes(fields), stored)
        except self._invalid_tag as error:
            raise DamagedValueError(Damage.CHECKSUM, _FORGED) from error

    def _cipher(self, identity: ValueIdentity) -> AESGCM:
        return self._aes_gcm(_derive(self._key, b"tierkv sealed value v1" + identity.key_digest))


_HEAD = struct.Struct("<4sHH")
_SMALL_MAGIC = b"TKVS"
_SMALL_VERSION = 1
_DIGEST_BYTES = 32
_FORGED_SMALL = "the value was written with another key or for another name, or was changed"


class SmallCodec:
    """The stored form of small values, such as tickets, each bound to its name. Thread-safe.

    In a trusted store the content is stored unchanged. Otherwise:

        signed  | TKVS, version 1, flags 1 | BLAKE3 with key, 32 | content |
        sealed  | TKVS, version 1, flags 2 | nonce, 12 | content, AES-256-GCM | tag, 16 |

    Values that were forged, changed, or stored under another name are detected. A value that was
    removed, or replaced by an older one of the same name, is not; contents therefore carry the time
    at which they expire.
    """

    def __init__(self, trust: Trust, key: bytes | None) -> None:
        """Choose how values are protected.

        Args:
            trust: the protection against other writers of the store.
            key: 32 bytes, the same on every node of the deployment; None if `trust` needs none.

        Raises:
            ConfigError: the key is missing or malformed, or a package is missing.
        """
        self._trust = trust
        if trust is Trust.TRUSTED:
            return
        self._key = check_key(trust, key)
        flags = FLAG_SIGNED if trust is Trust.SIGNED else FLAG_SEALED
        self._head = _HEAD.pack(_SMALL_MAGIC, _SMALL_VERSION, flags)
        if trust is Trust.SIGNED:
            self._blake3 = import_blake3()
        else:
            self._aes_gcm, self._invalid_tag = import_aes_gcm()

    def seal_small(self, name: str, content: bytes) -> bytes:
        """Return the bytes to store for a small value.

        There are at most 56 bytes more than in `content`.

        Args:
            name: name of the value. The bytes are valid only under this name.
            content: the bytes to protect.
        """
        if self._trust is Trust.TRUSTED:
            return content
        if self._trust is Trust.SIGNED:
            return self._head + self._digest(name, content) + content
        nonce = os.urandom(_NONCE_BYTES)
        cipher = self._aes_gcm(self._key_of(name))
        return self._head + nonce + cipher.encrypt(nonce, content, self._head)

    def unseal_small(self, name: str, value: bytes) -> bytes:
        """Check the stored bytes of a value that `seal_small` protected, and return the content.

        Args:
            name: name under which the value was found.
            value: the stored bytes.

        Raises:
            DamagedValueError: the value was changed, or was protected for another name or with
                another secret key. Never raised with `Trust.TRUSTED`.
        """
        match self._trust:
            case Trust.TRUSTED:
                return value
            case Trust.SIGNED:
                return self._check(name, value)
            case Trust.SEALED:
                return self._decrypt(name, value)

    def _check(self, name: str, value: bytes) -> bytes:
        body = self._body(value, _DIGEST_BYTES)
        digest, content = body[:_DIGEST_BYTES], body[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(name, content)):
            raise DamagedValueError(Damage.CHECKSUM, _FORGED_SMALL)
        return content

    def _digest(self, name: str, content: bytes) -> bytes:
        return self._blake3(self._head + content, key=self._key_of(name)).digest(_DIGEST_BYTES)

    def _decrypt(self, name: str, value: bytes) -> bytes:
        body = self._body(value, _NONCE_BYTES + CHECKSUM_BYTES)
        nonce, sealed = body[:_NONCE_BYTES], body[_NONCE_BYTES:]
        try:
            return self._aes_gcm(self._key_of(name)).decrypt(nonce, sealed, self._head)
        except self._invalid_tag as error:
            raise DamagedValueError(Damage.CHECKSUM, _FORGED_SMALL) from error

    def _body(self, value: bytes, min_bytes: int) -> bytes:
        if len(value) < _HEAD.size + min_bytes:
            raise DamagedValueError(Damage.LENGTH, "the value is shorter than its header")
        if not value.startswith(self._head):
            raise DamagedValueError(
                Damage.VERSION, "the value is not sealed: give all nodes the same storage.trust"
            )
        return value[_HEAD.size :]

    def _key_of(self, name: str) -> bytes:
        return _derive(self._key, b"tierkv small value v1" + name.encode())


T = TypeVar("T")
_RECORD_HEAD = struct.Struct("<4sH16s")


def seal(magic: bytes, version: int, record: object) -> bytes:
    """Return a record as bytes with a checksum.

    record   | magic, 4 bytes | version, u16 | xxh3_128 of the other fields | msgpack body |

    Args:
        magic: 4 bytes that name the kind of record.
        version: version of the record's format, 0 to 65,535.
        record: a msgspec struct or plain values.
    """
    body: bytes = msgpack.packb(msgspec.to_builtins(record, builtin_types=(bytes,)))
    return _RECORD_HEAD.pack(magic, version, _record_checksum(magic, version, body)) + body


def unseal(magic: bytes, version: int, value: bytes, kind: type[T]) -> T:
    """Check the bytes that `seal` returned, and return their record.

    Args:
        magic: 4 bytes that name the kind of record, as passed to `seal`.
        version: version of the record's format, as passed to `seal`.
        value: the bytes.
        kind: type of the record.

    Raises:
        StoreCorruptError: a byte differs, or the magic or version is another one.
    """
    if len(value) < _RECORD_HEAD.size:
        raise StoreCorruptError(f"a record of {len(value)} bytes is too short")
    found, found_version, checksum = _RECORD_HEAD.unpack_from(value)
    body = value[_RECORD_HEAD.size :]
    if found != magic:
        raise StoreCorruptError(f"the record starts with {found!r}, not {magic!r}")
    if checksum != _record_checksum(magic, found_version, body):
        raise StoreCorruptError("the record's checksum does not match its bytes")
    if found_version != version:
        raise StoreCorruptError(
            f"the record has version {found_version}, not {version}: run the same version "
            "of tierkv in all processes"
        )
    try:
        # Without `builtin_types` msgspec expects bytes as text in base64.
        return msgspec.convert(msgpack.unpackb(body), kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, ValueError, msgpack.UnpackException) as error:
        raise StoreCorruptError(f"the record cannot be read: {error}") from error


def _record_checksum(magic: bytes, version: int, body: bytes) -> bytes:
    return xxhash.xxh3_128(magic + version.to_bytes(2, "little") + body).digest()
