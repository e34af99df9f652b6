"""Text to tokens and back, whole and in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cache.keys import unpack
from tierkv.errors import BadRequestError
from tierkv.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_any_text_comes_back_in_at_least_the_tokens_that_were_counted_before(text: str) -> None:
    tokens = unpack(TOKENIZER.encode(text)).tolist() if text else []
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.fewest_tokens(text) <= len(tokens)


@given(st.lists(st.integers(0, 255)))
def test_pieces_of_tokens_that_come_one_by_one_join_to_the_whole_text(tokens: list[int]) -> None:
    decoder = TOKENIZER.decoder(b"")
    pieces = [decoder.feed(token) for token in tokens]
    assert "".join([*pieces, decoder.rest()]) == TOKENIZER.decode(tokens)


def test_no_piece_has_half_a_character() -> None:
    decoder = TOKENIZER.decoder(b"")
    assert [decoder.feed(token) for token in "a\u20ac".encode()] == ["a", "", "", "\u20ac"]
    assert (decoder.feed(0xE2), decoder.rest()) == ("", "\ufffd")


def test_a_text_that_is_no_utf8_and_a_token_that_is_no_byte_are_refused() -> None:
    with pytest.raises(BadRequestError, match="UTF-8"):
        TOKENIZER.encode("\ud800")
    with pytest.raises(BadRequestError, match="byte"):
        TOKENIZER.decode([256])
