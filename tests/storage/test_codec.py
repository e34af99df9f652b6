"""Headers of stored blocks, and small values that are bound to their names, for each `Trust`.

Changed bytes, forged values, and values of other blocks or under another name are detected. Sealed
bytes are encrypted. The format is that of the document.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.storage.codec import (
    HEADER_BYTES,
    Codec,
    Damage,
    DamagedValueError,
    PlainCodec,
    SealedCodec,
    SignedCodec,
    SmallCodec,
    Trust,
    ValueIdentity,
    codec_for,
)

pytest.importorskip("blake3", reason="needs the extra untrusted")
pytest.importorskip("cryptography", reason="needs the extra untrusted")

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
IDENTITY = ValueIdentity(bytes(range(100, 132)), KEY, 16)
KEYED = (Trust.SIGNED, Trust.SEALED)
NAME, CONTENT = "tierkv:ticket:1", b"a ticket, as it is"
payloads = st.binary(min_size=0, max_size=4_096)


def encode(payload: bytes) -> bytes:
    return PlainCodec().encode(payload, IDENTITY)[0]


def damage_of(header: bytes, payload: bytes, **expected: bytes | int) -> Damage | None:
    identity = ValueIdentity(
        bytes(expected.get("layout_digest", IDENTITY.layout_digest)),
        bytes(expected.get("key_digest", KEY)),
        int(expected.get("num_tokens", 16)),
    )
    try:
        PlainCodec().decode(header, memoryview(payload), identity)
    except DamagedValueError as error:
        return error.damage
    return None


def decoded(
    codec: Codec, header: bytes, stored: bytes, identity: ValueIdentity = IDENTITY
) -> bytes:
    payload = bytearray(stored)
    codec.decode(header, memoryview(payload), identity)
    return bytes(payload)


@settings(deadline=None)
@given(payloads, st.lists(st.integers(0, 300), max_size=6), st.data())
def test_a_digest_of_the_pieces_as_they_land_finds_what_a_digest_of_the_whole_finds(
    payload: bytes, places: list[int], data: st.DataObject
) -> None:
    codec = PlainCodec()
    value = memoryview(bytearray(encode(payload) + payload))
    bit = data.draw(st.none() | st.integers(0, 8 * len(value) - 1))
    if bit is not None:
        value[bit // 8] ^= 1 << bit % 8
    header, landed = value[:HEADER_BYTES], value[HEADER_BYTES:]
    digest = codec.digest(header)
    cuts = sorted({0, len(value), *(place % len(value) for place in places)})
    for start, stop in pairwise(cuts):
        digest.update(value[start:stop])
    with nullcontext() if bit is None else pytest.raises(DamagedValueError):
        codec.decode(header, landed, IDENTITY, digest)


@settings(deadline=None)
@given(payloads, st.data())
def test_any_truncation_and_any_addition_is_found(payload: bytes, data: st.DataObject) -> None:
    value = encode(payload) + payload
    cut = value[: data.draw(st.integers(0, len(value) - 1))]
    assert damage_of(cut[:HEADER_BYTES], cut[HEADER_BYTES:]) is Damage.LENGTH
    longer = payload + data.draw(st.binary(min_size=1, max_size=20))
    assert damage_of(encode(payload), longer) is Damage.LENGTH


@pytest.mark.parametrize("trust", Trust)
def test_every_flipped_bit_is_found(trust: Trust) -> None:
    codec = codec_for(trust, KEY)
    header, stored = codec.encode(b"some bytes", IDENTITY)
    value = header + bytes(stored)
    for bit in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedValueError):
            decoded(codec, bytes(flipped[: len(header)]), bytes(flipped[len(header) :]))


def test_each_kind_of_damage_is_told_apart() -> None:
    payload = b"some bytes"
    header = encode(payload)
    assert damage_of(header, payload) is None
    assert damage_of(header, payload, layout_digest=bytes(32)) is Damage.LAYOUT
    assert damage_of(header, payload, key_digest=bytes(32)) is Damage.KEY
    assert damage_of(header, payload, num_tokens=15) is Damage.TOKENS
    assert damage_of(header, payload[:-1]) is Damage.LENGTH
    assert damage_of(header[:-1], payload) is Damage.LENGTH
    assert damage_of(header, b"SOME bytes") is Damage.CHECKSUM
    assert damage_of(b"PK\3\4" + header[4:], payload) is Damage.MAGIC
    assert damage_of(header[:4] + b"\2" + header[5:], payload) is Damage.VERSION
    assert damage_of(header[:6] + b"\1" + header[7:], payload) is Damage.VERSION
    assert damage_of(header[:60] + b"\1" + header[61:], payload) is Damage.VERSION


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
    forged = header[:24] + bytes(32) + header[56:]  # stored under another block's name
    with pytest.raises(DamagedValueError, match="key"):
        decoded(kind(KEY), forged, bytes(stored), other)


@pytest.mark.parametrize("trust", Trust)
def test_values_made_for_another_kind_of_trust_are_refused(trust: Trust) -> None:
    for other in set(Trust) - {trust}:
        header, stored = codec_for(other, KEY).encode(b"payload", IDENTITY)
        with pytest.raises(DamagedValueError):
            decoded(codec_for(trust, KEY), header, bytes(stored))


def test_a_sealed_value_shows_nothing_and_differs_each_time() -> None:
    payload = b"a secret " * 100
    first, second = (SealedCodec(KEY).encode(payload, IDENTITY) for _ in range(2))
    assert b"secret" not in bytes(first[1])
    assert first[0][72:84] != second[0][72:84]
    assert bytes(first[1]) != bytes(second[1])


@pytest.mark.parametrize("make", [codec_for, SmallCodec])
@pytest.mark.parametrize("trust", KEYED)
def test_a_key_of_another_length_is_refused(trust: Trust, make: Callable[..., object]) -> None:
    for key in (None, b"", b"short", bytes(33)):
        with pytest.raises(ConfigError, match="needs a key of 32 bytes"):
            make(trust, key)


@pytest.mark.parametrize(
    ("title", "codec"),
    [
        ("", PlainCodec()),
        ("Test vector, signed", SignedCodec(KEY)),
        ("Test vector, sealed", SealedCodec(KEY, make_nonce=lambda _: bytes(range(0xA0, 0xAC)))),
    ],
)
def test_the_documents_test_vectors_are_what_is_written(title: str, codec: Codec) -> None:
    document = (Path(__file__).parents[2] / "docs" / "storage-format.md").read_text()
    vector = re.search(rf"{title}.*?```hex\n(.*?)```", document, re.DOTALL)
    assert vector is not None
    identity = ValueIdentity(bytes(range(0x10, 0x20)), bytes(range(0x20, 0x40)), 3)
    header, stored = codec.encode(bytes(range(16)), identity)
    assert bytes.fromhex(vector[1]) == header + bytes(stored)
    assert decoded(codec, header, bytes(stored), identity) == bytes(range(16))


@pytest.mark.parametrize("num_bytes", [256 << 10, (256 << 10) + 13, 8 << 20])
def test_a_header_that_is_made_later_is_the_same_and_made_once(num_bytes: int) -> None:
    payload = bytearray(num_bytes)
    later = PlainCodec().header_later(payload, IDENTITY)
    assert later is not None
    assert not any(later.content)
    payload[-1] = 7
    later()
    assert later.content == encode(bytes(payload))
    payload[-1] = 8  # after the send the buffer has other content
    later()
    payload[-1] = 7
    assert later.content == encode(bytes(payload))


# Small values


@pytest.mark.parametrize("trust", Trust)
@pytest.mark.parametrize("content", [b"", CONTENT, bytes(100_000)])
def test_what_was_sealed_for_a_name_comes_back_under_it(trust: Trust, content: bytes) -> None:
    """Whoever has the same key reads it."""
    value = SmallCodec(trust, KEY).seal_small(NAME, content)
    assert SmallCodec(trust, KEY).unseal_small(NAME, value) == content
    assert len(value) - len(content) <= 56
    if trust is Trust.TRUSTED:
        assert value == content


@pytest.mark.parametrize("trust", KEYED)
def test_every_change_of_a_small_value_is_found(trust: Trust) -> None:
    codec = SmallCodec(trust, KEY)
    value = codec.seal_small(NAME, CONTENT)
    changed = [value[:end] for end in range(len(value))] + [value + b"\0"]
    for bit in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(flipped))
    for wrong in changed:
        with pytest.raises(DamagedValueError):
            codec.unseal_small(NAME, wrong)


@pytest.mark.parametrize("trust", KEYED)
def test_a_small_value_of_another_name_key_or_trust_is_refused(trust: Trust) -> None:
    codec, [other_trust] = SmallCodec(trust, KEY), set(KEYED) - {trust}
    for wrong in (
        codec.seal_small("tierkv:ticket:2", CONTENT),
        SmallCodec(trust, OTHER_KEY).seal_small(NAME, CONTENT),
        SmallCodec(other_trust, KEY).seal_small(NAME, CONTENT),
        CONTENT * 4,
    ):
        with pytest.raises(DamagedValueError):
            codec.unseal_small(NAME, wrong)


def test_a_sealed_small_value_does_not_show_its_content_and_is_never_the_same_twice() -> None:
    codec = SmallCodec(Trust.SEALED, KEY)
    values = {codec.seal_small(NAME, CONTENT) for _ in range(100)}
    assert len(values) == 100
    assert not any(CONTENT in value for value in values)
