"""Values in a store that others write to: forgeries are found, sealed bytes hidden."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.storage.codec import (
    Codec,
    Damage,
    DamagedValueError,
    PlainCodec,
    SealedCodec,
    SignedCodec,
    Trust,
    ValueIdentity,
    codec_for,
)

pytest.importorskip("blake3", reason="needs the extra untrusted")
pytest.importorskip("cryptography", reason="needs the extra untrusted")

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
IDENTITY = ValueIdentity(bytes(range(100, 132)), bytes(range(32)), 16)
PAYLOADS = (b"", b"x", bytes(range(256)) * 40)


@pytest.fixture(params=list(Trust), ids=lambda trust: trust.value)
def codec(request: pytest.FixtureRequest) -> Codec:
    return codec_for(request.param, KEY)


def decoded(
    codec: Codec, header: bytes, stored: bytes, identity: ValueIdentity = IDENTITY
) -> bytes:
    payload = bytearray(stored)
    codec.decode(header, memoryview(payload), identity)
    return bytes(payload)


@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_what_was_encoded_comes_back(codec: Codec, payload: bytes) -> None:
    header, stored = codec.encode(payload, IDENTITY)
    assert len(header) == codec.header_bytes
    assert memoryview(stored).nbytes == len(payload)
    assert decoded(codec, header, bytes(stored)) == payload


def test_every_flipped_bit_is_found(codec: Codec) -> None:
    header, stored = codec.encode(b"some bytes", IDENTITY)
    value = header + bytes(stored)
    for bit in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedValueError):
            decoded(codec, bytes(flipped[: len(header)]), bytes(flipped[len(header) :]))


@pytest.mark.parametrize("kind", [SignedCodec, SealedCodec])
def test_a_value_of_another_tenant_or_for_another_block_is_refused(
    kind: type[SignedCodec | SealedCodec],
) -> None:
    header, stored = kind(OTHER_KEY).encode(b"payload", IDENTITY)
    with pytest.raises(DamagedValueError, match="key") as caught:
        decoded(kind(KEY), header, bytes(stored))
    assert caught.value.damage is Damage.CHECKSUM
    header, stored = kind(KEY).encode(b"payload", IDENTITY)
    other = ValueIdentity(IDENTITY.layout_digest, bytes(32), 16)
    forged = header[:24] + bytes(32) + header[56:]  # filed under another block's name
    with pytest.raises(DamagedValueError, match="key"):
        decoded(kind(KEY), forged, bytes(stored), other)


def test_values_made_for_another_kind_of_trust_are_not_believed(codec: Codec) -> None:
    for trust in Trust:
        other = codec_for(trust, KEY)
        if type(other) is type(codec):
            continue
        header, stored = other.encode(b"payload", IDENTITY)
        with pytest.raises(DamagedValueError):
            decoded(codec, header, bytes(stored))


def test_a_sealed_value_shows_nothing_and_differs_each_time() -> None:
    payload = b"a secret " * 100
    first, second = (SealedCodec(KEY).encode(payload, IDENTITY) for _ in range(2))
    assert b"secret" not in bytes(first[1])
    assert first[0][72:84] != second[0][72:84]
    assert bytes(first[1]) != bytes(second[1])


@pytest.mark.parametrize("trust", [Trust.SIGNED, Trust.SEALED])
@pytest.mark.parametrize("key", [None, b"", b"short", bytes(33)])
def test_a_key_that_is_none_is_refused(trust: Trust, key: bytes | None) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        codec_for(trust, key)


def test_a_trusted_store_needs_no_key() -> None:
    assert isinstance(codec_for(Trust.TRUSTED, None), PlainCodec)


def documented(title: str) -> bytes:
    text = (Path(__file__).parents[2] / "docs" / "storage-format.md").read_text()
    match = re.search(rf"{title}.*?```hex\n(.*?)```", text, re.DOTALL)
    assert match is not None
    return bytes.fromhex(match[1])


def test_the_documents_test_vectors_are_what_is_written() -> None:
    identity = ValueIdentity(bytes(range(0x10, 0x20)), bytes(range(0x20, 0x40)), 3)
    payload = bytes(range(16))
    header, stored = SignedCodec(KEY).encode(payload, identity)
    assert documented("Test vector, signed") == header + bytes(stored)
    header, stored = SealedCodec(KEY, make_nonce=lambda _: bytes(range(0xA0, 0xAC))).encode(
        payload, identity
    )
    assert documented("Test vector, sealed") == header + bytes(stored)
    assert decoded(SealedCodec(KEY), header, bytes(stored), identity) == payload
