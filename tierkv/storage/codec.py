"""How blocks and small values become stored bytes: a header with a checksum, or with a signature or
cipher where others can write to the store; and records for other processes (`seal`, `unseal`).

    value   | header, 88 bytes | payload, exactly the bytes of the host slot |

The format is written down in docs/storage-format.md, with a test vector.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
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


# Codecs for a store that others can write to: each tenant's values are made with its key.
#
#     signed  | fields, 72 | BLAKE3 with key, 16 | payload |
#     sealed  | fields, 72 | nonce, 12 | zeros, 4 | tag, 16 | payload, AES-256-GCM |
#
# Both find forgeries, a sealed value also hides its bytes. Sealed is the faster one: 5.1 GB/s
# against 2.8 on one core with AES instructions. Needs the extra `untrusted` (blake3, cryptography).

if TYPE_CHECKING:  # an extra
    from blake3 import blake3
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
FLAG_SIGNED = 1
FLAG_SEALED = 2
_NONCE_BYTES = 12
_NONCE_FIELD_BYTES = 16
SEALED_HEADER_BYTES = FIELDS_BYTES + _NONCE_FIELD_BYTES + CHECKSUM_BYTES
_FORGED = "the value was not made with this tenant's key, or was changed"


class Trust(Enum):
    """What is believed of whoever else can write to the store."""

    TRUSTED = "trusted"  # values are checked for accidents
    SIGNED = "signed"  # and for forgeries
    SEALED = "sealed"  # and nobody without the key can read them


def codec_for(trust: Trust, key: bytes | None) -> Codec:
    """key: the tenant's, 32 bytes; None where none is needed.

    Raises ConfigError if it is missing or malformed, or a package is.
    """
    if trust is Trust.TRUSTED:
        return PlainCodec()
    key = check_key(trust, key)
    return SignedCodec(key) if trust is Trust.SIGNED else SealedCodec(key)


def check_key(trust: Trust, key: bytes | None) -> bytes:
    """The key that a store which is not trusted needs. Raises ConfigError."""
    if key is None or len(key) != KEY_BYTES:
        raise ConfigError(f"a store that is {trust.value} needs a key of {KEY_BYTES} bytes")
    return key


class TenantCodecs:
    """A codec for each fingerprint (model, layout, adapter, tenant), with a key derived from the
    deployment's: a value of one tenant is damaged for another, whatever its name."""

    def __init__(self, trust: Trust, key: bytes | None) -> None:
        """key: 32 bytes that every node of the deployment has; None where none is needed.

        Raises ConfigError as `codec_for` does, at once.
        """
        self._trust = trust
        self._key = key
        self._codecs: dict[str, Codec] = {}
        codec_for(trust, key)

    def __call__(self, fingerprint: str) -> Codec:
        """fingerprint: the short form that stored names have in their second field."""
        codec = self._codecs.get(fingerprint)
        if codec is None:
            key = self._key and _derive(self._key, b"tierkv tenant v1" + fingerprint.encode())
            codec = self._codecs[fingerprint] = codec_for(self._trust, key)
        return codec


_MOST_KEY_FILE_BYTES = 4096  # of which a key takes 64


def read_key(path: str | Path) -> bytes:
    """As `parse_key` of a file. Raises ConfigError if it cannot be read or holds no key."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_KEY_FILE_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read") from error
    return parse_key(text)


def parse_key(text: str) -> bytes:
    """The 32 bytes that 64 hex digits stand for. Raises ConfigError, which does not repeat them."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"a storage key is {2 * KEY_BYTES} hex digits: make one with `openssl rand -hex 32`"
        )
    return key


def import_blake3() -> type[blake3]:
    """Raises ConfigError if the package is not installed."""
    try:
        from blake3 import blake3  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _missing("blake3") from error
    return blake3


def import_aes_gcm() -> tuple[type[AESGCM], type[Exception]]:
    """The cipher, and what it raises at a forgery. Raises ConfigError if it is not installed."""
    try:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
    except ImportError as error:
        raise _missing("cryptography") from error
    return AESGCM, InvalidTag


def _missing(package: str) -> ConfigError:
    return ConfigError(f"the package {package} is not installed: {how_to_install('untrusted')}")


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, purpose, hashlib.sha256)


class _KeyedCodec(ABC):
    """What codecs with a key have in common."""

    flags: ClassVar[int]
    header_bytes: int

    def header_later(self, payload: Buffer, identity: ValueIdentity) -> None:  # noqa: B027
        """None: it takes too long for the loop."""

    def digest(self, header: Buffer) -> None:  # noqa: ARG002 - the protocol's
        """None: 256 KiB would take BLAKE3 90 us of the loop, and the cipher takes whole values."""
        return

    def decode(
        self,
        header: Buffer,
        payload: memoryview,
        identity: ValueIdentity,
        digest: Digest | None = None,
    ) -> None:
        assert digest is None, "there are none"
        header = memoryview(header)
        check_fields(
            header, payload.nbytes, identity, flags=self.flags, header_bytes=self.header_bytes
        )
        self._open(header[:FIELDS_BYTES], header[FIELDS_BYTES:], payload, identity)

    @abstractmethod
    def _open(
        self, fields: memoryview, rest: memoryview, payload: memoryview, identity: ValueIdentity
    ) -> None:
        """Raises DamagedValueError if the key did not make this value; else `payload` is what was
        encoded. rest: of the header, behind its fields."""


class SignedCodec(_KeyedCodec):
    """A keyed digest instead of the checksum; `payload` is read once and not copied."""

    flags = FLAG_SIGNED
    header_bytes = HEADER_BYTES

    def __init__(self, key: bytes) -> None:
        self._blake3 = import_blake3()
        self._key = _derive(key, b"tierkv signed value v1")

    def encode(self, payload: Buffer, identity: ValueIdentity) -> tuple[bytes, Buffer]:
        fields = pack_fields(identity, memoryview(payload).nbytes, flags=FLAG_SIGNED)
        return fields + self._digest(fields, payload), payload

    def _open(
        self,
        fields: memoryview,
        rest: memoryview,
        payload: memoryview,
        identity: ValueIdentity,  # noqa: ARG002 - in the fields
    ) -> None:
        if not hmac.compare_digest(self._digest(fields, payload), rest):
            raise DamagedValueError(Damage.CHECKSUM, _FORGED)

    def _digest(self, fields: Buffer, payload: Buffer) -> bytes:
        digest = self._blake3(fields, key=self._key)
        digest.update(memoryview(payload))
        return digest.digest(CHECKSUM_BYTES)


class SealedCodec(_KeyedCodec):
    """AES-256-GCM with a key per block, derived from the tenant's, and a random nonce: the same
    block can be written twice with different bytes, so its name must not decide the nonce.

    Both ways copy: the cipher wants the tag behind the bytes, which end where the host slot does.
    """

    flags = FLAG_SEALED
    header_bytes = SEALED_HEADER_BYTES

    def __init__(self, key: bytes) -> None:
        self._aes_gcm, self._invalid_tag = import_aes_gcm()
        self._key = key

    def encode(self, payload: Buffer, identity: ValueIdentity) -> tuple[bytes, Buffer]:
        return self.encode_with(os.urandom(_NONCE_BYTES), payload, identity)

    def encode_with(
        self, nonce: bytes, payload: Buffer, identity: ValueIdentity
    ) -> tuple[bytes, Buffer]:
        """nonce: never used before for this block and key; for test vectors."""
        num_bytes = memoryview(payload).nbytes
        fields = pack_fields(identity, num_bytes, flags=FLAG_SEALED)
        sealed = memoryview(bytearray(num_bytes + CHECKSUM_BYTES))
        self._cipher(identity).encrypt_into(nonce, payload, fields, sealed)
        header = fields + nonce.ljust(_NONCE_FIELD_BYTES, b"\0") + bytes(sealed[num_bytes:])
        return header, sealed[:num_bytes]

    def _open(
        self, fields: memoryview, rest: memoryview, payload: memoryview, identity: ValueIdentity
    ) -> None:
        nonce, padding = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:_NONCE_FIELD_BYTES]
        if any(padding):
            raise DamagedValueError(Damage.VERSION, "bytes that must be 0 are not")
        try:
            # The tag lies in the header, so the payload alone is what lands in the host slot.
            sealed = b"".join((payload, rest[_NONCE_FIELD_BYTES:]))
            self._cipher(identity).decrypt_into(bytes(nonce), sealed, bytes(fields), payload)
        except self._invalid_tag as error:
            raise DamagedValueError(Damage.CHECKSUM, _FORGED) from error

    def _cipher(self, identity: ValueIdentity) -> AESGCM:
        return self._aes_gcm(_derive(self._key, b"tierkv sealed value v1" + identity.key_digest))


_HEAD = struct.Struct("<4sHH")
_SMALL_MAGIC = b"TKVS"
_SMALL_VERSION = 1
_TAG_BYTES = 16
_DIGEST_BYTES = 32
_FORGED_SMALL = "the value was not made with this key and for this name, or was changed"


class SmallCodec:
    """How small values, such as tickets, are stored, each bound to its name. Safe from several
    threads. Where the store is trusted, a value is its content as it is.

        signed  | TKVS, version 1, flags 1 | BLAKE3 with key, 32 | content |
        sealed  | TKVS, version 1, flags 2 | nonce, 12 | content, AES-256-GCM | tag, 16 |

    Finds what was forged, changed, or filed under another name; not that an old value of the name
    was put back, or removed: a value says itself until when it counts.
    """

    def __init__(self, trust: Trust, key: bytes | None) -> None:
        """key: 32 bytes that every node of the deployment has; None where none is needed. Raises
        ConfigError if it is missing or malformed, or a package is."""
        self._seal: Callable[[str, bytes], bytes] = _as_it_is
        self._unseal: Callable[[str, bytes], bytes] = _as_it_is
        if trust is Trust.TRUSTED:
            return
        self._key = check_key(trust, key)
        if trust is Trust.SIGNED:
            self._blake3 = import_blake3()
            self._head = _HEAD.pack(_SMALL_MAGIC, _SMALL_VERSION, FLAG_SIGNED)
            self._seal, self._unseal = self._sign, self._check
        else:
            self._aes_gcm, self._invalid_tag = import_aes_gcm()
            self._head = _HEAD.pack(_SMALL_MAGIC, _SMALL_VERSION, FLAG_SEALED)
            self._seal, self._unseal = self._encrypt, self._decrypt

    def seal_small(self, name: str, content: bytes) -> bytes:
        """What is stored under `name`; at most 56 bytes longer."""
        return self._seal(name, content)

    def unseal_small(self, name: str, value: bytes) -> bytes:
        """The content sealed for `name`. Raises DamagedValueError if it was not, with this key."""
        return self._unseal(name, value)

    def _sign(self, name: str, content: bytes) -> bytes:
        return self._head + self._digest(name, content) + content

    def _check(self, name: str, value: bytes) -> bytes:
        body = self._body(value, _DIGEST_BYTES)
        digest, content = body[:_DIGEST_BYTES], body[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(name, content)):
            raise DamagedValueError(Damage.CHECKSUM, _FORGED_SMALL)
        return content

    def _digest(self, name: str, content: bytes) -> bytes:
        return self._blake3(self._head + content, key=self._key_of(name)).digest(_DIGEST_BYTES)

    def _encrypt(self, name: str, content: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        cipher = self._aes_gcm(self._key_of(name))
        return self._head + nonce + cipher.encrypt(nonce, content, self._head)

    def _decrypt(self, name: str, value: bytes) -> bytes:
        body = self._body(value, _NONCE_BYTES + _TAG_BYTES)
        nonce, sealed = body[:_NONCE_BYTES], body[_NONCE_BYTES:]
        try:
            return self._aes_gcm(self._key_of(name)).decrypt(nonce, sealed, self._head)
        except self._invalid_tag as error:
            raise DamagedValueError(Damage.CHECKSUM, _FORGED_SMALL) from error

    def _body(self, value: bytes, least: int) -> bytes:
        if len(value) < _HEAD.size + least:
            raise DamagedValueError(Damage.LENGTH, "the value is shorter than its header")
        if not value.startswith(self._head):
            raise DamagedValueError(Damage.VERSION, "the value is not sealed as this node seals")
        return value[_HEAD.size :]

    def _key_of(self, name: str) -> bytes:
        return hmac.digest(self._key, b"tierkv small value v1" + name.encode(), hashlib.sha256)


def _as_it_is(_: str, content: bytes) -> bytes:
    return content


T = TypeVar("T")
_RECORD_HEAD = struct.Struct("<4sH16s")


def seal(magic: bytes, version: int, record: object) -> bytes:
    """`record` (a msgspec struct or plain values) as one framed value.

    record   | magic, 4 bytes | version, u16 | xxh3_128 of all the rest | msgpack body |
    """
    body: bytes = msgpack.packb(msgspec.to_builtins(record, builtin_types=(bytes,)))
    return _RECORD_HEAD.pack(magic, version, _record_checksum(magic, version, body)) + body


def unseal(magic: bytes, version: int, value: bytes, kind: type[T]) -> T:
    """The record in `value`. Raises StoreCorruptError if a byte of it is not as sealed, or if it
    is of another version."""
    if len(value) < _RECORD_HEAD.size:
        raise StoreCorruptError(f"a record of {len(value)} bytes is too short")
    found, found_version, checksum = _RECORD_HEAD.unpack_from(value)
    body = value[_RECORD_HEAD.size :]
    if found != magic:
        raise StoreCorruptError(f"the record starts with {found!r}, not {magic!r}")
    if checksum != _record_checksum(magic, found_version, body):
        raise StoreCorruptError("the record's checksum does not fit its bytes")
    if found_version != version:
        raise StoreCorruptError(f"the record has version {found_version}, not {version}")
    try:
        # Without the builtin types text would be taken for bytes in base64.
        return msgspec.convert(msgpack.unpackb(body), kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, ValueError, msgpack.UnpackException) as error:
        raise StoreCorruptError(f"the record cannot be read: {error}") from error


def _record_checksum(magic: bytes, version: int, body: bytes) -> bytes:
    return xxhash.xxh3_128(magic + version.to_bytes(2, "little") + body).digest()
