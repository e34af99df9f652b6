"""No field of a body takes a value that fails later: each is refused, or goes on to a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import msgspec
import pytest

from tests.fuzz.seeds import some
from tierkv.api import types
from tierkv.api.settings import NodeSettings
from tierkv.api.types import PromptBody, job_of
from tierkv.cache.keys import Prompt
from tierkv.errors import BadRequestError
from tierkv.gateway.failures import InvalidRequestError
from tierkv.gateway.openai import ChatBody, CompletionBody
from tierkv.http.bodies import JSON, MSGPACK, decode

NODE_BODIES = [
    kind
    for name, kind in vars(types).items()
    if name.endswith("Body") and isinstance(kind, type) and kind is not PromptBody
]
ENOUGH = 4
SPEC = NodeSettings().engine_spec()


def nested(depth: int) -> list[Any]:
    """Return a list in a list, so many times."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


EXTENSION = msgpack.ExtType(5, b"a")
OF_MSGPACK: list[Any] = [
    *(2**31, 2**63, 2**64 - 1, -1, -(2**63), 1.5, float("nan"), float("inf"), True, None),
    *(EXTENSION, [EXTENSION], [[EXTENSION]], {"a": EXTENSION}, msgpack.Timestamp(1, 2)),
    *(b"\xff", {1: 2}, {b"a": 1}, {"a": float("nan")}, [float("nan")], [[2**64 - 1]], [[-1]]),
    *("", "\x00", [""], [1, "a"], nested(400)),
]
OF_JSON = [
    *(str(2**64), str(-(2**64)), str(2**200), "9" * 5000, "1e400", "-1e400", "1e999999", "1.5"),
    *("NaN", "Infinity", '"\\ud800"', '"\\u0000"', "[" * 1200 + "]" * 1200, "true", "null"),
    *('{"a":1e999}', '{"a":%s}' % ("9" * 5000), f"[{2**64}]", f"[[{2**64}]]", '[1,"a"]'),
]


_OWN: dict[type, dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
    types.MediaBody: {"start": 0, "num_tokens": 1, "hash": "00" * 16},
    types.PrefillBody: {"prompt": "a"},
    types.StorageBody: {"url": "memory://"},
}


def minimal(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a body that is right."""
    return _OWN[kind] if kind in _OWN else some(kind)


def hostile(kind: type[msgspec.Struct]) -> Iterator[tuple[str, bytes]]:
    """Yield content type and bytes of right bodies, each with one field of another value."""
    body = minimal(kind)
    texts = {name: "AQAAAA==" if isinstance(one, bytes) else one for name, one in body.items()}
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        for value in OF_MSGPACK:
            yield MSGPACK, msgpack.packb({**body, name: value})
        for text in OF_JSON:
            yield JSON, json.dumps({**texts, name: "@"}).replace('"@"', text).encode()


def use(body: object) -> None:
    """Do with a decoded body what a route does before anything is computed."""
    if isinstance(body, CompletionBody | ChatBody):
        body.stops()
        prompts = body.prompts(max_prompts=ENOUGH, max_tokens=1000)
        for job in body.jobs(prompts, "id", None, None):
            tokens = job.prompt  # the relay asks a node for those of a text or a chat
            if isinstance(tokens, str):
                tokens = SPEC.tokenizer.encode(tokens)
            elif not isinstance(tokens, bytes):
                tokens = SPEC.tokenizer.encode_chat(tokens)
            replace(job, prompt=tokens).work(
                {"max_tokens": job.max_tokens, "request_id": job.request_id}
            )
    elif isinstance(body, PromptBody):
        prompt = Prompt(body.packed(SPEC.tokenizer), 16)
        body.media_items()
        if isinstance(body, types.GenerateBody | types.PrefillBody | types.DecodeBody):
            request = job_of(body, SPEC, "id", prompt, getattr(body, "max_tokens", 1))
            sampling = request.sampling
            msgspec.msgpack.encode((request.max_tokens, sampling.top_k, sampling.seed))


@pytest.mark.promise("Every field of every body refuses values that would fail later.")
@pytest.mark.parametrize("kind", [*NODE_BODIES, CompletionBody, ChatBody])
def test_a_value_that_a_field_cannot_have_is_refused_where_it_is_read(
    kind: type[msgspec.Struct],
) -> None:
    use(decode(msgpack.packb(minimal(kind)), kind, content_type=MSGPACK))
    num_refused = 0
    for content_type, raw in hostile(kind):
        try:
            use(decode(raw, kind, content_type=content_type))
        except (BadRequestError, InvalidRequestError):
            num_refused += 1
    assert num_refused >= ENOUGH
