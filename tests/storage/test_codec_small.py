"""Small values are bound to their names: a change, another name or another key is detected."""

from __future__ import annotations

import pytest

from tierkv.errors import ConfigError
from tierkv.storage.codec import DamagedValueError, SmallCodec, Trust
from tierkv.storage.factory import StorageSettings

pytest.importorskip("blake3")
pytest.importorskip("cryptography")

KEYED = (Trust.SIGNED, Trust.SEALED)
KEY = bytes(range(32))
NAME = "tierkv:ticket:1"
CONTENT = b"a ticket, as it is"


@pytest.mark.parametrize("trust", Trust)
@pytest.mark.parametrize("content", [b"", CONTENT, bytes(100_000)])
def test_what_was_sealed_for_a_name_comes_back_under_it(trust: Trust, content: bytes) -> None:
    codec = SmallCodec(trust, None if trust is Trust.TRUSTED else KEY)
    value = codec.seal_small(NAME, content)
    assert codec.unseal_small(NAME, value) == content
    assert len(value) - len(content) <= 56


def test_where_the_store_is_trusted_nothing_is_added() -> None:
    assert SmallCodec(Trust.TRUSTED, None).seal_small(NAME, CONTENT) == CONTENT


@pytest.mark.parametrize("trust", KEYED)
def test_every_flipped_bit_and_every_cut_is_found(trust: Trust) -> None:
    codec = SmallCodec(trust, KEY)
    value = codec.seal_small(NAME, CONTENT)
    for bit in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedValueError):
            codec.unseal_small(NAME, bytes(flipped))
    for cut in (*(value[:end] for end in range(len(value))), value + b"\0"):
        with pytest.raises(DamagedValueError):
            codec.unseal_small(NAME, cut)


@pytest.mark.parametrize("trust", KEYED)
def test_another_name_another_key_and_another_way_of_sealing_are_refused(trust: Trust) -> None:
    value = SmallCodec(trust, KEY).seal_small(NAME, CONTENT)
    with pytest.raises(DamagedValueError):
        SmallCodec(trust, KEY).unseal_small("tierkv:ticket:2", value)
    with pytest.raises(DamagedValueError):
        SmallCodec(trust, bytes(32)).unseal_small(NAME, value)
    for other in KEYED:
        if other is not trust:
            with pytest.raises(DamagedValueError):
                SmallCodec(other, KEY).unseal_small(NAME, value)
    with pytest.raises(DamagedValueError):
        SmallCodec(trust, KEY).unseal_small(NAME, CONTENT * 4)


def test_a_sealed_value_does_not_show_its_content_and_is_never_the_same_twice() -> None:
    codec = SmallCodec(Trust.SEALED, KEY)
    values = {codec.seal_small(NAME, CONTENT) for _ in range(100)}
    assert len(values) == 100
    assert not any(CONTENT in value for value in values)


@pytest.mark.parametrize("trust", KEYED)
def test_a_store_that_is_not_trusted_needs_a_key(trust: Trust) -> None:
    for key in (None, b"short"):
        with pytest.raises(ConfigError, match="needs a key"):
            SmallCodec(trust, key)


def test_the_settings_make_the_same_codec_on_every_node() -> None:
    one, other = (StorageSettings(trust=Trust.SEALED, key=KEY.hex()) for _ in range(2))
    value = one.small_codec().seal_small(NAME, CONTENT)
    assert other.small_codec().unseal_small(NAME, value) == CONTENT
