"""Small values, such as tickets, for a store that others can write to, bound to their names.

    signed  | TKVS, version 1, flags 1 | BLAKE3 with key, 32 | content |
    sealed  | TKVS, version 1, flags 2 | nonce, 12 | content, AES-256-GCM | tag, 16 |

Finds what was forged, changed, or filed under another name; not what is old: who can write to the
store can put back a value that once had this name, or remove it. A value says itself until when it
counts.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable

from tierkv.storage.codec import Damage, DamagedValueError
from tierkv.storage.codec_keyed import (
    FLAG_SEALED,
    FLAG_SIGNED,
    Trust,
    check_key,
    import_aes_gcm,
    import_blake3,
)

_HEAD = struct.Struct("<4sHH")
_MAGIC = b"TKVS"
_VERSION = 1
_NONCE_BYTES = 12
_TAG_BYTES = 16
_DIGEST_BYTES = 32
_FORGED = "the value was not made with this key and for this name, or was changed"


class SmallCodec:
    """Safe from several threads. Where the store is trusted, a value is its content as it is."""

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
            self._head = _HEAD.pack(_MAGIC, _VERSION, FLAG_SIGNED)
            self._seal, self._unseal = self._sign, self._check
        else:
            self._aes_gcm, self._invalid_tag = import_aes_gcm()
            self._head = _HEAD.pack(_MAGIC, _VERSION, FLAG_SEALED)
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
            raise DamagedValueError(Damage.CHECKSUM, _FORGED)
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
            raise DamagedValueError(Damage.CHECKSUM, _FORGED) from error

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
