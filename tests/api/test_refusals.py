"""Whatever comes in, the answer is a problem with a stable code, never a 500 or a traceback."""

from __future__ import annotations

import logging

import msgpack
import pytest
from aiohttp.test_utils import make_mocked_request

from tests.api.guarded import Callers, bearer, guarded
from tests.api.nodes import Here, here
from tests.api.test_limits import connected
from tests.latch import until
from tierkv.errors import HandoffError
from tierkv.http.bodies import JSON, MSGPACK, REQUEST_ID
from tierkv.http.callers import RoleName
from tierkv.http.problems import problem_headers, problem_of
from tierkv.pd.tickets import HandoffProblem

HUGE = "9" * 5000
DEEP = b'{"prompt": ' + b"[" * 200_000

JSON_BODIES = [
    (b"", 400, "malformed_body"),
    (b'{"prompt": "a"} and more', 400, "malformed_body"),
    (b'{"prompt": "\xff\xfe"}', 400, "malformed_body"),
    (b'{"prompt": "\\ud800"}', 400, "malformed_body"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "malformed_body"),
    (b'{"prompt":"a","seed":1,"seed":2}', 400, "malformed_body"),
    (b'{ "prompt" : "a",\n "pr\\u006fmpt": "b" }', 400, "malformed_body"),
    (b'{"tokens": [' + b"1, " * 200_000 + b'1], "seed": 1, "seed": 2}', 400, "malformed_body"),
    (b'{"unknown": ' + b"[" * 200_000, 422, "invalid_body"),
    (b"[]", 422, "invalid_body"),
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
    (f'{{"prompt": "a", "max_tokens": {HUGE}}}'.encode(), 422, "invalid_body"),
    (b'{"prompt": "a", "temperature": 1e999}', 422, "invalid_body"),
    (f'{{"prompt": "a", "seed": {HUGE}}}'.encode(), 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": ""}', 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": "a b"}', 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": ".."}', 422, "invalid_body"),
    (b'{"prompt": "a", "request_id": "a\\r\\nX-Evil: 1"}', 422, "invalid_body"),
    (f'{{"prompt": "a", "request_id": "{"x" * 257}"}}'.encode(), 422, "invalid_body"),
    (b'{"prompt": ""}', 400, "bad_request"),
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


OTHER_TYPES = [
    ("text/plain", b'{"prompt": "a"}', 415, "unsupported_media_type"),
    ("x", b'{"prompt": "a"}', 415, "unsupported_media_type"),
    ("application/octet-stream", b"\x01\0\0\0", 415, "unsupported_media_type"),
]
BAD_BODIES = [(JSON, *case) for case in JSON_BODIES] + [(MSGPACK, *case) for case in MSGPACK_BODIES]


@pytest.mark.promise("Any body is decoded or refused with a stable code.")
async def test_bad_bodies_are_refused_with_a_stable_code(caplog: pytest.LogCaptureFixture) -> None:
    async with here() as on:
        for content_type, raw, status, code in BAD_BODIES + OTHER_TYPES:
            headers = {"Content-Type": content_type}
            answer = await on.client.ask("POST", "/v1/generate", data=raw, headers=headers)
            assert (answer.status, answer.code) == (status, code), raw[:80]
            assert len(answer.body["detail"]) < 500
            assert answer.body["detail"].startswith("the body is empty") == (not raw)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


CLAIM = b'{"prompt": "a", "ticket_id": "t", "%s": %s}'


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1", b"", 404, "not_found"),
        ("GET", "/%00/../../etc/passwd", b"", 404, "not_found"),
        ("GET", f"/live/requests/{HUGE}/explain", b"", 404, "unknown_id"),
        ("GET", "/v1/generate", b"", 405, "method_not_allowed"),
        ("DELETE", "/v1/stats", b"", 405, "method_not_allowed"),
        ("POST", "/v1/prefill", b'{"ticket_id": "", "prompt": "a"}', 422, "invalid_body"),
        ("POST", "/v1/decode", b'{"prompt": "a", "ticket_id": "with space"}', 422, "invalid_body"),
        ("POST", "/v1/decode", CLAIM % (b"policy", b'"perhaps"'), 422, "invalid_body"),
        ("POST", "/v1/decode", CLAIM % (b"deadline_s", b"0"), 422, "invalid_body"),
        ("POST", "/v1/decode", CLAIM % (b"deadline_s", b"3601"), 422, "invalid_body"),
    ],
)
async def test_paths_methods_and_fields_that_there_are_not(
    on: Here, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    headers = {"Content-Type": JSON} if body else {}
    answer = await on.client.ask(method, path, data=body or None, headers=headers)
    assert (answer.status, answer.code) == (status, code)
    assert ("Allow" in answer.headers) == (status == 405)


async def test_a_body_that_is_not_of_its_encoding_is_refused(on: Here) -> None:
    for encoding, status, code in (
        ("compress", 415, "unsupported_media_type"),
        ("gzip", 400, "malformed_body"),  # and the connection is closed
    ):
        headers = {"Content-Type": JSON, "Content-Encoding": encoding}
        answer = await on.client.ask("POST", "/v1/generate", data=b"{}", headers=headers)
        assert (answer.status, answer.code) == (status, code)


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


async def test_an_optional_body_that_turns_out_to_be_empty_is_none(on: Here) -> None:
    async with connected(on.client.url) as (reader, writer):
        writer.write(b"POST /v1/sleep HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await until(lambda: on.node.num_working == 1, "a call that waits for its body")
        writer.write(b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_message_calls_things_as_their_caller_does_and_not_by_inner_names(
    callers: Callers,
) -> None:
    headers = bearer(await callers.token(RoleName.WRITE, "acme"))
    async with guarded(callers) as on:
        body = {"prompt": "a", "ticket_id": "mine", "deadline_s": 0.05}
        answer = await on.client.ask("POST", "/v1/decode", json=body, headers=headers)
        assert answer.code == "handoff_failed"
        assert "'mine'" in answer.body["detail"]
