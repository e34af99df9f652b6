"""Whatever comes in, the answer is a problem with a stable code, never a 500 or a traceback."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgpack
import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.guarded import callers_in, guarded
from tests.api.nodes import here
from tests.latch import until
from tierkv.api.settings import NodeSettings
from tierkv.api.types import DecodeBody, GenerateBody, PrefillBody, job_of
from tierkv.cache.keys import Prompt
from tierkv.engine import EngineSpec
from tierkv.errors import BadRequestError, HandoffError
from tierkv.http.bodies import JSON, MSGPACK, OCTETS, REQUEST_ID, decode
from tierkv.http.callers import RoleName
from tierkv.http.problems import ERRORS, HTTP_CODES, PROBLEMS, problem_headers, problem_of
from tierkv.pd.tickets import HandoffProblem

HUGE = "9" * 5000
DEEP = b'{"prompt": ' + b"[" * 200_000

JSON_BODIES = [
    (b"", 400, "malformed_body"),
    (b"{", 400, "malformed_body"),
    (b'{"prompt": "a"} and more', 400, "malformed_body"),
    (b'{"prompt": "\xff\xfe"}', 400, "malformed_body"),
    (b'{"prompt": "\\ud800"}', 400, "malformed_body"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "malformed_body"),
    (b'{"prompt": "a", "prompt": "a"}', 400, "malformed_body"),
    (b'{"prompt":"a","seed":1,"seed":2}', 400, "malformed_body"),
    (b'{ "prompt" : "a",\n "pr\\u006fmpt": "b" }', 400, "malformed_body"),
    (b'{"tokens": [' + b"1, " * 200_000 + b'1], "seed": 1, "seed": 2}', 400, "malformed_body"),
    (b'{"seed": 1, "tokens": [1], "tokens": [' + b"1," * 200_000 + b"1]}", 400, "malformed_body"),
    (b'{"prompt": "a", "temperature": -Infinity}', 400, "malformed_body"),
    (b'{"unknown": ' + b"[" * 200_000, 422, "invalid_body"),
    (b"[]", 422, "invalid_body"),
    (b"null", 422, "invalid_body"),
    (b"{}", 422, "invalid_body"),
    (DEEP, 422, "invalid_body"),
    (b'{"prompt": "a", "tokens": [1]}', 422, "invalid_body"),
    (b'{"prompt": null, "tokens": null}', 422, "invalid_body"),
    (b'{"prompt": "a", "promt": "b"}', 422, "invalid_body"),
    (b'{"prompt": 7}', 422, "invalid_body"),
    (b'{"tokens": [1.5]}', 422, "invalid_body"),
    (b'{"tokens": [true]}', 422, "invalid_body"),
    (b'{"tokens": "not base64!"}', 422, "invalid_body"),
    (f'{{"tokens": [{HUGE}]}}'.encode(), 422, "invalid_body"),
    (b'{"prompt": "a", "max_tokens": 0}', 422, "invalid_body"),
    (b'{"prompt": "a", "max_tokens": -1}', 422, "invalid_body"),
    (f'{{"prompt": "a", "max_tokens": {HUGE}}}'.encode(), 422, "invalid_body"),
    (b'{"prompt": "a", "temperature": 1e999}', 422, "invalid_body"),
    (f'{{"prompt": "a", "seed": {HUGE}}}'.encode(), 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": ""}', 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": "a b"}', 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": "."}', 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": ".."}', 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": "a\\r\\nX-Evil: 1"}', 422, "invalid_body"),
    (f'{{"prompt": "a", "request_id": "{"x" * 257}"}}'.encode(), 422, "invalid_body"),
    (b'{"prompt": ""}', 400, "bad_request"),
    (b'{"tokens": []}', 400, "bad_request"),
    (b'{"tokens": ""}', 400, "bad_request"),
    (b'{"tokens": "YWJj"}', 400, "bad_request"),  # 3 bytes
    (b'{"tokens": [256]}', 400, "bad_request"),
    (b'{"tokens": [-1]}', 400, "bad_request"),
    (b'{"tokens": [99999999999999999999]}', 400, "bad_request"),
    (b'{"prompt": "a", "temperature": -1}', 400, "bad_request"),
    (b'{"prompt": "a", "seed": -1}', 400, "bad_request"),
    (b'{"prompt": "a", "seed": 18446744073709551616}', 400, "bad_request"),
    (b'{"prompt": "a", "top_k": -1}', 400, "bad_request"),
    (b'{"prompt": "a", "max_tokens": 131072}', 400, "bad_request"),
    (b'{"prompt": "a", "max_tokens": 9223372036854775808}', 422, "invalid_body"),
    (b'{"prompt": "a", "max_tokens": 2000}', 422, "request_too_large"),
]

MSGPACK_BODIES = [
    (b"", 400, "malformed_body"),
    (b"\xc1", 400, "malformed_body"),
    (msgpack.packb({"prompt": "a"})[:-1], 400, "malformed_body"),
    (b"\x81\xa6prompt\xa1\xff", 400, "malformed_body"),
    (b"\x81\xa1x" + b"\x91" * 200_000, 422, "invalid_body"),
    (b"\x81\xa6prompt" + b"\x91" * 200_000, 422, "invalid_body"),
    (msgpack.packb({"prompt": b"a"}), 422, "invalid_body"),
    (msgpack.packb({"tokens": b"abc"}), 400, "bad_request"),
    (msgpack.packb({"tokens": b"\xff\xff\xff\xff"}), 400, "bad_request"),
    (msgpack.packb({"tokens": b"\x00\x01\x00\x00"}), 400, "bad_request"),
    (msgpack.packb({"tokens": [2**64 - 1]}), 400, "bad_request"),
    (msgpack.packb({"prompt": "a", "temperature": float("nan")}), 400, "bad_request"),
    (msgpack.packb({"prompt": "a", "temperature": float("inf")}), 400, "bad_request"),
]


@pytest.mark.promise("Any body is decoded or refused with a stable code.")
async def test_bad_bodies_are_refused_with_a_stable_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cases = [(JSON, *case) for case in JSON_BODIES] + [(MSGPACK, *case) for case in MSGPACK_BODIES]
    async with here() as on:
        for content_type, raw, status, code in cases:
            headers = {"Content-Type": content_type}
            answer = await on.client.ask("POST", "/v1/generate", data=raw, headers=headers)
            assert (answer.status, answer.code) == (status, code), raw[:80]
            assert len(answer.body["detail"]) < 500
            assert answer.body["detail"].startswith("the body is empty") == (not raw)
        await on.settle()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("media", "status"),
    [
        ('{"start": 0, "start": 0, "num_tokens": 1, "hash": "%s"}', 400),
        ('{ "start":0 , "num_tokens" : 1, "hash": "%s"}', 200),
    ],
)
async def test_a_key_twice_in_an_inner_object_is_refused_and_spacing_is_not(
    media: str, status: int
) -> None:
    raw = '{"tokens": [1, 2], "media" : [' + media % ("ab" * 16) + "]}"
    async with here() as on:
        headers = {"Content-Type": JSON}
        answer = await on.client.ask("POST", "/v1/lookup", data=raw.encode(), headers=headers)
        assert answer.status == status
        await on.settle()


def test_a_body_that_memory_does_not_suffice_for_is_no_bug() -> None:
    request = make_mocked_request("POST", "/v1/lookup")
    request[REQUEST_ID] = "r"
    found = problem_of(request, MemoryError())
    assert (found.status, found.code, bool(found.detail)) == (503, "too_much_in_work", True)


@pytest.mark.promise("A refused claim's status separates caller, wait and failure.")
@pytest.mark.parametrize("problem", HandoffProblem)
def test_only_what_a_producer_or_a_store_failed_at_is_a_bad_gateway(
    problem: HandoffProblem,
) -> None:
    others = {"other_prompt": 409, "incompatible": 409, "expired": 410, "already_claimed": 410}
    others |= {"not_yet": 503, "no_room": 503, "load_failed": 503}  # it helps to wait
    request = make_mocked_request("POST", "/v1/decode")
    request[REQUEST_ID] = "r"
    found = problem_of(request, HandoffError(problem.value, "why"))
    assert (found.status, found.code) == (others.get(problem.value, 502), "handoff_failed")
    assert found.reason == problem.value
    if found.status == 503:
        assert "Retry-After" in problem_headers(HandoffError(problem.value, "why"), found)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"ticket_id": "with space"}, 422, "invalid_body"),
        ({"ticket_id": ""}, 422, "invalid_body"),
        ({"ticket_id": None}, 422, "invalid_body"),
        ({"policy": "perhaps"}, 422, "invalid_body"),
        ({"deadline_s": 0}, 422, "invalid_body"),
        ({"deadline_s": -1}, 422, "invalid_body"),
        ({"deadline_s": 3601}, 422, "invalid_body"),
    ],
)
async def test_bad_claims_are_refused(change: dict[str, object], status: int, code: str) -> None:
    async with here() as on:
        body = {"prompt": "a", "ticket_id": "t"} | change
        answer = await on.client.post("/v1/decode", body)
        assert (answer.status, answer.code) == (status, code)


@pytest.mark.promise("Any body is decoded or refused with a stable code.")
@given(raw=st.binary(max_size=200), content_type=st.sampled_from([JSON, MSGPACK]))
def test_any_bytes_decode_or_are_refused(raw: bytes, content_type: str) -> None:
    decoded_or_refused(raw, content_type)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
_fields = st.sampled_from(
    ["prompt", "tokens", "max_tokens", "temperature", "seed", "top_k", "request_id", "ticket_id"]
)


@settings(max_examples=50, deadline=None)
@given(body=st.dictionaries(_fields, _json))
def test_any_fields_make_a_job_or_are_refused(body: dict[str, object]) -> None:
    decoded_or_refused(json.dumps(body).encode(), JSON)


@cache
def _spec() -> EngineSpec:
    return NodeSettings().engine_spec()


def decoded_or_refused(raw: bytes, content_type: str) -> None:
    kinds: list[type[GenerateBody | PrefillBody | DecodeBody]]
    kinds = [GenerateBody, PrefillBody, DecodeBody]
    spec = _spec()
    for kind in kinds:
        with suppress(BadRequestError):
            body = decode(raw, kind, content_type=content_type)
            job_of(body, spec, "id", Prompt(body.packed(spec.tokenizer), 16))


async def test_an_empty_ticket_id_is_wrong_and_not_the_same_as_none() -> None:
    async with here() as on:
        answer = await on.client.post("/v1/prefill", {"ticket_id": "", "prompt": "hello"})
        assert (answer.status, answer.code) == (422, "invalid_body")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/%00/../../etc/passwd", 404, "not_found"),
        ("GET", f"/live/requests/{HUGE}/explain", 404, "unknown_id"),
        ("GET", "/v1/generate", 405, "method_not_allowed"),
        ("DELETE", "/v1/stats", 405, "method_not_allowed"),
        ("POST", "/readyz", 405, "method_not_allowed"),
    ],
)
async def test_paths_and_methods_that_there_are_not(
    method: str, path: str, status: int, code: str
) -> None:
    async with here() as on:
        answer = await on.client.ask(method, path)
        assert (answer.status, answer.code) == (status, code)
        assert ("Allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "x"]
)
async def test_bodies_of_other_types_are_not_guessed_at(content_type: str) -> None:
    async with here() as on:
        answer = await on.client.ask(
            "POST", "/v1/generate", data=b'{"prompt": "a"}', headers={"Content-Type": content_type}
        )
        assert (answer.status, answer.code) == (415, "unsupported_media_type")


async def test_a_field_given_twice_beside_packed_tokens_is_refused() -> None:
    async with here() as on:
        path, headers = "/v1/generate?max_tokens=1&max_tokens=2", {"Content-Type": OCTETS}
        answer = await on.client.ask("POST", path, data=bytes(4), headers=headers)
        assert (answer.status, answer.code) == (422, "invalid_body")


async def test_an_optional_body_that_turns_out_to_be_empty_is_none() -> None:
    async with here() as on:
        host, _, port = on.client.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/sleep HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        await until(lambda: on.node.num_working == 1, "a call that waits for its body")
        writer.write(b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_body_that_is_not_what_its_encoding_says_is_refused() -> None:
    async with here() as on:
        headers = {"Content-Type": JSON, "Content-Encoding": "gzip"}
        answer = await on.client.ask("POST", "/v1/generate", data=b"not gzip", headers=headers)
        assert (answer.status, answer.code) == (400, "malformed_body")


# Slow and broken connections


async def test_a_client_that_goes_in_the_middle_of_its_body_leaves_nothing() -> None:
    async with here() as on:
        host, port = on.client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        await writer.drain()
        await until(lambda: on.node.num_working == 1)
        writer.close()
        await until(lambda: on.node.num_working == 0)
        await on.settle()


def test_every_code_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    codes = {code for _, _, code, _ in ERRORS} | set(HTTP_CODES.values())
    codes |= {code for code, _, _ in PROBLEMS.values()}
    assert not [code for code in codes if f"`{code}`" not in text]


async def test_a_message_calls_things_as_their_caller_does_and_not_by_inner_names(
    tmp_path: Path,
) -> None:
    callers = await asyncio.to_thread(callers_in, tmp_path)
    token = await callers.token(RoleName.WRITE, "acme")
    headers = {"Authorization": f"Bearer {token}"}
    async with guarded(callers) as on:
        body = {"prompt": "a", "ticket_id": "mine", "deadline_s": 0.05}
        answer = await on.client.ask("POST", "/v1/decode", json=body, headers=headers)
        assert answer.code == "handoff_failed"
        assert "'mine'" in answer.body["detail"]
