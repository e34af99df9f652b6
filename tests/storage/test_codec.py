"""The header of a stored block: what it catches, and that its bytes are those of the document."""

from __future__ import annotations

import re
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.storage.codec import (
    HEADER_BYTES,
    Damage,
    DamagedValueError,
    PlainCodec,
    ValueIdentity,
)

LAYOUT = bytes(range(100, 132))
KEY = bytes(range(32))
payloads = st.binary(min_size=0, max_size=4_096)


def encode(payload: bytes) -> bytes:
    return PlainCodec().encode(payload, ValueIdentity(LAYOUT, KEY, 16))[0]


def damage_of(header: bytes, payload: bytes, **expected: bytes | int) -> Damage | None:
    identity = ValueIdentity(
        bytes(expected.get("layout_digest", LAYOUT)),
        bytes(expected.get("key_digest", KEY)),
        int(expected.get("num_tokens", 16)),
    )
    try:
        PlainCodec().decode(header, memoryview(payload), identity)
    except DamagedValueError as error:
        return error.damage
    return None


@settings(deadline=None)
@given(payloads, st.lists(st.integers(0, 300), max_size=6), st.data())
def test_a_digest_of_the_pieces_as_they_land_finds_what_a_digest_of_the_whole_finds(
    payload: bytes, places: list[int], data: st.DataObject
) -> None:
    codec, identity = PlainCodec(), ValueIdentity(LAYOUT, KEY, 16)
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
        codec.decode(header, landed, identity, digest)


@settings(deadline=None)
@given(payloads, st.data())
def test_any_truncation_and_any_addition_is_found(payload: bytes, data: st.DataObject) -> None:
    value = encode(payload) + payload
    cut = value[: data.draw(st.integers(0, len(value) - 1))]
    assert damage_of(cut[:HEADER_BYTES], cut[HEADER_BYTES:]) is Damage.LENGTH
    longer = payload + data.draw(st.binary(min_size=1, max_size=20))
    assert damage_of(encode(payload), longer) is Damage.LENGTH


def test_each_kind_of_damage_is_told_apart() -> None:
    payload = b"some bytes"
    header = encode(payload)
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


def test_buffers_of_any_element_are_read_as_bytes() -> None:
    payload = bytes(range(64))
    identity = ValueIdentity(LAYOUT, KEY, 16)
    header, _ = PlainCodec().encode(memoryview(payload).cast("I"), identity)
    assert damage_of(header, payload) is None


@pytest.mark.parametrize(("layout", "key"), [(15, 32), (16, 31), (16, 33)])
def test_digests_of_other_sizes_are_refused(layout: int, key: int) -> None:
    with pytest.raises(AssertionError):
        ValueIdentity(bytes(layout), bytes(key), 1)


def test_the_documents_test_vector_is_what_is_written() -> None:
    document = (Path(__file__).parents[2] / "docs" / "storage-format.md").read_text()
    vector = re.search(r"```hex\n(.*?)```", document, re.DOTALL)
    assert vector is not None
    value = bytes.fromhex(vector[1])
    payload = bytes(range(16))
    identity = ValueIdentity(bytes(range(0x10, 0x20)), bytes(range(0x20, 0x40)), 3)
    header, _ = PlainCodec().encode(payload, identity)
    assert value == header + payload


@pytest.mark.parametrize("num_bytes", [0, 1, (256 << 10) - 1, (8 << 20) + 1])
def test_headers_of_short_and_of_very_long_values_are_made_at_once(num_bytes: int) -> None:
    """There is nothing to gain, or the loop would stand still for too long."""
    assert PlainCodec().header_later(bytes(num_bytes), ValueIdentity(LAYOUT, KEY, 16)) is None


@pytest.mark.parametrize("num_bytes", [256 << 10, (256 << 10) + 13, 8 << 20])
def test_a_header_that_is_made_later_is_the_same_and_made_once(num_bytes: int) -> None:
    payload, identity = bytearray(num_bytes), ValueIdentity(LAYOUT, KEY, 16)
    later = PlainCodec().header_later(payload, identity)
    assert later is not None
    assert not any(later.content)
    payload[-1] = 7
    later()
    assert later.content == PlainCodec().encode(payload, identity)[0]
    payload[-1] = 8  # it is somebody else's when the value has been sent
    later()
    payload[-1] = 7
    assert later.content == PlainCodec().encode(payload, identity)[0]
