"""Bodies of any form mean what they say, and what is said twice is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.api.types import LookupBody
from tierkv.cache.keys import pack
from tierkv.gateway.openai import ChatBody
from tierkv.http.bodies import JSON, MSGPACK, BodyError, decode
from tierkv.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
TEXTS = st.text(alphabet='ab"\\[]{}:, \u00e4\n', max_size=60)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])


def read(raw: bytes, kind: Any = LookupBody) -> Any:
    return decode(bytearray(raw), kind, content_type=JSON)


@given(TOKENS, TEXTS, SPACES, st.booleans())
def test_fields_mean_what_they_say_however_they_are_spaced(
    tokens: list[int], text: str, spaces: tuple[str, str], ascii_only: bool
) -> None:
    body = {"tokens": tokens, "request_id": text}
    found = read(json.dumps(body, separators=spaces, ensure_ascii=ascii_only).encode())
    assert (found.packed(TOKENIZER), found.request_id) == (pack(tokens), text)


@pytest.mark.promise("Packed tokens equal a list, in JSON and msgpack.")
@given(TOKENS)
def test_packed_tokens_are_the_same_as_a_list_in_json_and_in_msgpack(tokens: list[int]) -> None:
    for given_ in (tokens, pack(tokens)):
        body = {"tokens": given_}
        assert read(msgspec.json.encode(body)).packed(TOKENIZER) == pack(tokens)
        in_msgpack = decode(msgspec.msgpack.encode(body), LookupBody, content_type=MSGPACK)
        assert in_msgpack.packed(TOKENIZER) == pack(tokens)


@pytest.mark.parametrize(
    "messages",
    [
        b'[{"role":"user","content":"aaaaaaaaaaaaaaaaaa","content":"b"}]',
        b'[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]',
        b'[ {"role": "user", "role": "user", "content": "a"}]',
    ],
)
def test_a_key_twice_is_refused_in_objects_of_a_list(messages: bytes) -> None:
    with pytest.raises(BodyError, match="twice"):
        read(b'{"messages":' + messages + b"}", ChatBody)
