"""Long bodies are read as short ones are, though in pieces, and what is too long is not read."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.api.types import LookupBody
from tierkv.cache.keys import pack
from tierkv.errors import BadRequestError, RequestTooLargeError, TierKVError
from tierkv.gateway.openai import ChatBody, CompletionBody
from tierkv.http import bodies
from tierkv.http.bodies import JSON, MSGPACK, BodyError, FieldError, decode

TEXTS = st.text(alphabet='ab"\\[]{}:, \u00e4\n', max_size=60)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])


@pytest.fixture(autouse=True)
def _everything_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LARGE_BYTES", 12)  # more than a key of ours
    monkeypatch.setattr(bodies, "_PIECE_BYTES", 16)
    monkeypatch.setattr(bodies, "_LONG_TEXT_BYTES", 12)
    pattern = bodies._SHORT_TEXTS.pattern.replace(b"{0,16}", b"{0,1}")  # noqa: SLF001
    monkeypatch.setattr(bodies, "_SHORT_TEXTS", re.compile(pattern, re.DOTALL))


def read(raw: bytes, kind: Any = LookupBody, **more: Any) -> Any:
    return decode(bytearray(raw), kind, content_type=JSON, **more)


@given(TEXTS, SPACES, st.booleans(), st.booleans())
def test_a_long_text_means_what_it_says(
    text: str, spaces: tuple[str, str], ascii_only: bool, is_raw: bool
) -> None:
    body = {"prompt": text} | ({"model": text} if is_raw else {"request_id": text})
    raw = json.dumps(body, separators=spaces, ensure_ascii=ascii_only).encode()
    found = read(raw, CompletionBody if is_raw else LookupBody)
    if is_raw:
        assert (msgspec.json.decode(found.prompt), found.model) == (text, text)
    else:
        assert (found.prompt, found.request_id) == (text, text)


@given(TOKENS, TEXTS, SPACES, st.booleans())
def test_a_long_list_of_tokens_is_packed_as_it_is(
    tokens: list[int], text: str, spaces: tuple[str, str], comes_first: bool
) -> None:
    fields: list[tuple[str, Any]] = [("tokens", tokens), ("request_id", text)]
    body = dict(fields if comes_first else reversed(fields))
    found = read(json.dumps(body, separators=spaces).encode(), most_tokens=40)
    assert (found.packed(), found.request_id) == (pack(tokens), text)


@given(st.lists(TOKENS, min_size=1, max_size=4), TEXTS, SPACES)
def test_lists_that_are_left_raw_are_whole(
    prompts: list[list[int]], text: str, spaces: tuple[str, str]
) -> None:
    raw = json.dumps({"user": text, "prompt": prompts}, separators=spaces).encode()
    found = read(raw, CompletionBody)
    assert (msgspec.json.decode(found.prompt), found.user) == (prompts, text)


@given(st.lists(st.lists(TEXTS, max_size=4), min_size=1, max_size=4), SPACES, st.booleans())
def test_a_long_chat_means_what_it_says(
    messages: list[list[str]], spaces: tuple[str, str], ascii_only: bool
) -> None:
    given_ = [
        {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
        for texts in messages
    ]
    body = {"messages": given_}
    raw = json.dumps(body, separators=spaces, ensure_ascii=ascii_only).encode()
    found = read(raw, ChatBody)
    assert [message.text() for message in found.messages] == ["".join(one) for one in messages]


def test_packed_tokens_in_base64_may_be_long() -> None:
    packed = pack(list(range(100)))
    assert read(msgspec.json.encode({"tokens": packed}), most_tokens=100).packed() == packed


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        (b"1,2,3,4,5,6,7,8,", BodyError),
        (b",1,2,3,4,5,6,7,8", BodyError),
        (b"1,2,3,4,5,6,7,8" + b" " * 40 + b", ", BodyError),
        (b"1,2,3,4,5,6,,7,8,9,10,11,12", BodyError),
        (b"1,2,3,4,5,6,7,8] , [9,10,11,12", BadRequestError),
        (b"1,2,3,4,5,6,7,8,x,10,11,12", BodyError),
        (b"1,2,3,4,5,6,7,8,1.5,10,11,12", FieldError),
        (b"1,2,3,4,5,6,7,8,null,10,11,12", FieldError),
        (b"1,2,3,4,5,6,7,8,[9],10,11,12", FieldError),
        (b"1,2,3,4,5,6,7,8,-9,10,11,12", BadRequestError),
        (b"1,2,3,4,5,6,7,8,2147483648,10,11", BadRequestError),
    ],
)
def test_what_is_no_list_of_tokens_is_refused_wherever_it_is_cut(
    inside: bytes, error: type[Exception]
) -> None:
    for before in range(20):
        raw = b'{"tokens":[' + b" " * before + inside + b"]}"
        with pytest.raises(error):
            read(raw)


def test_a_gap_longer_than_a_piece_is_no_end() -> None:
    assert read(b'{"tokens":[1' + b" " * 100 + b",2" + b" " * 100 + b"]}").packed() == pack([1, 2])


@pytest.mark.parametrize(
    "raw",
    [
        b'{"tokens":[1,2,3,4,5,6,7],"tokens":[1,2,3,4,5,6,7]}',
        b'{"tokens":[1,2,3,4,5,6,7],"request_id":"aaaaaaaaaa","request_id":"aaaaaaaaaa"}',
    ],
)
def test_a_key_twice_is_refused_in_a_long_body(raw: bytes) -> None:
    with pytest.raises(BodyError, match="twice"):
        read(raw)


@pytest.mark.parametrize("large_bytes", [12, 1 << 20], ids=["long", "short"])
@pytest.mark.parametrize(
    "messages",
    [
        b'[{"role":"user","content":"aaaaaaaaaaaaaaaaaa","content":"b"}]',
        b'[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]',
        b'[ {"role": "user", "role": "user", "content": "a"}]',
    ],
)
def test_a_key_twice_is_refused_in_objects_of_a_list(
    messages: bytes, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LARGE_BYTES", large_bytes)
    with pytest.raises(BodyError, match="twice"):
        read(b'{"messages":' + messages + b"}", ChatBody)


@pytest.mark.parametrize(
    "body", [{"tokens": [1] * 21}, {"prompt": "a" * 121}, {"request_id": "a", "prompt": '"' * 61}]
)
def test_more_than_the_most_tokens_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestTooLargeError, match="at most 20 tokens"):
        read(json.dumps(body).encode(), most_tokens=20).packed(20)


def test_a_longer_list_in_msgpack_is_refused_before_it_is_read() -> None:
    raw = msgspec.msgpack.encode({"tokens": [1] * 70_000})
    whole = decode(raw, LookupBody, content_type=MSGPACK, most_tokens=70_000)
    assert whole.packed() == pack([1] * 70_000)
    with pytest.raises(RequestTooLargeError, match="at most 69999 tokens"):
        decode(raw[:100], LookupBody, content_type=MSGPACK, most_tokens=69_999)


_MIB = 1 << 20


def filled(head: bytes, piece: bytes, end: bytes, size: int = 15 * _MIB) -> bytes:
    return head + piece * (size // len(piece)) + end


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (CompletionBody, filled(b'{"prompt":"', rb"\"", b'"}')),
        (CompletionBody, filled(b'{"prompt":"', rb"\u00e4", b'"}')),
        (CompletionBody, filled(b'{"prompt":[', b'"a",', b'"a"]}')),
        (CompletionBody, filled(b'{"prompt":[', b"[1],", b"[1]]}")),
        (CompletionBody, filled(b'{"prompt":[', b"1", b"]}")),
        (CompletionBody, filled(b'{"prompt":"a","seed":', b"1", b"}")),
        (CompletionBody, filled(b'{"prompt":"a","stop":[', b'"a",', b'"a"]}')),
        (CompletionBody, filled(b'{"prompt":"a","logit_bias":{', b'"a":1,', b'"a":1}}')),
        (CompletionBody, filled(b'{"prompt":"a",', b'"user":"a",', b'"user":"a"}')),
        (CompletionBody, filled(b'{"prompt":', b"[", b"}")),
        (CompletionBody, filled(b'{"prompt":', b'{"a":', b"}")),
        (ChatBody, filled(b'{"messages":[{"role":"user","content":"', b"a", b'"}]}')),
        (ChatBody, filled(b'{"messages":[{"role":"user","content":"', rb"\n", b'"}]}')),
        (ChatBody, filled(b'{"messages":[', b'{"role":"user","content":"a"},', b"0]}")),
        (
            ChatBody,
            filled(
                b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"},', b"0]}]}"
            ),
        ),
        (ChatBody, filled(b'{"messages":[{"role":"user","content":[', b"1,", b"1]}]}")),
        (LookupBody, filled(b'{"prompt":"', rb"\"", b'"}')),
        (LookupBody, filled(b'{"prompt":"a","media":[', b"1,", b"1]}")),
        (LookupBody, filled(b'{"prompt":"', b"a", b"")),
    ],
    ids=lambda value: bytes(value[:60]).decode() if isinstance(value, bytes) else value.__name__,
)
def test_no_body_is_read_in_one_piece_that_keeps_all_others_waiting(
    kind: Any, raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder runs alone until it has read what it is given."""
    monkeypatch.undo()  # everything is as long as it is
    most, read_json = 0, msgspec.json.decode

    def noted(piece: Any, **more: Any) -> Any:
        nonlocal most
        most = max(most, len(memoryview(piece)))
        return read_json(piece, **more)

    monkeypatch.setattr(msgspec.json, "decode", noted)

    def take() -> None:
        body = read(raw, kind, most_tokens=_MIB)
        for prompt in body.prompts(most_prompts=64, most_tokens=_MIB):
            prompt.packed()

    with pytest.raises(TierKVError):
        take()
    assert most <= 7 * _MIB
