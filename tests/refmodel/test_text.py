"""Text is bytes is tokens, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import BadRequestError
from tierkv.refmodel.model import PRINTABLE, TOKENIZER, decode, encode


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert decode(encode(text)) == text


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assert decode([0x41, 0xFF, 0x42]) == "A�B"


@pytest.mark.parametrize("token", [-1, 256])
def test_what_is_no_byte_is_refused(token: int) -> None:
    with pytest.raises(BadRequestError):
        decode([token])


def test_printable_tokens_decode_to_themselves() -> None:
    allowed = [token for token in range(256) if PRINTABLE[token]]
    assert len(allowed) == 96
    assert all(char == "\n" or char.isprintable() for char in decode(allowed))


@given(st.text(max_size=5) | st.binary(max_size=20))
def test_the_pieces_of_tokens_and_the_rest_are_their_text(given_: str | bytes) -> None:
    tokens = list(given_.encode() if isinstance(given_, str) else given_)
    decoder = TOKENIZER.decoder(b"")
    pieces = [decoder.feed(token) for token in tokens]
    assert "".join(pieces) + decoder.rest() == decode(tokens)
