"""What callers may ask, how they are told no, and what happens when they go."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.guarded import callers_in
from tests.gateway.scripted import CHATS, Stage, answer_to, script, stage, text_of
from tests.latch import until
from tierkv.gateway.nodes import NodeState
from tierkv.gateway.settings import LimitsSection
from tierkv.http.callers import RoleName
from tierkv.http.settings import AuthSection

PROMPT = "a prompt of some length, " * 8


async def test_prompts_come_as_text_tokens_or_several_of_either(on: Stage) -> None:
    one, two = b"first prompt", b"another, second prompt"
    texts = [text_of(answer_to(prompt, 8)) for prompt in (one, two)]
    for prompt in (one.decode(), list(one)):
        asked = await on.caller.ask({"prompt": prompt})
        assert asked.text == texts[0]
        assert (asked.usage["prompt_tokens"], asked.usage["completion_tokens"]) == (12, 8)
    for prompts in ([one.decode(), two.decode()], [list(one), list(two)]):
        asked = await on.caller.ask({"prompt": prompts})
        assert asked.texts == dict(enumerate(texts))
        assert asked.usage["completion_tokens"] == 16


@pytest.mark.promise("The gateway gives a session's id and a router's hints to the nodes.")
@pytest.mark.parametrize("place", ["field", "header"])
async def test_nodes_get_the_session_and_the_hints_of_a_request(place: str) -> None:
    action = {"action_id": "a", "action_type": "kv.drop", "action_version": "9"}
    hints = {"protocol_version": "0.7", "message_id": "m", "actions": [action]}
    field = {"session_id": "s"} if place == "field" else {}
    headers = {"X-Session-ID": "s"} if place == "header" else {}
    async with stage(prefill=1, decode=1) as on:
        asked = await on.caller.ask({"prompt": PROMPT, "kv_hints": hints, **field}, **headers)
        assert asked.text == text_of(answer_to(PROMPT.encode(), 8))
        await on.caller.ask({"prompt": PROMPT, "seed": 1})
        for [node] in (on.prefill, on.decode):
            (_, first, _), (_, second, _) = node.calls
            assert (first["session_id"], first["kv_hints"]) == ("s", hints)
            assert "session_id" not in second
            assert "kv_hints" not in second


async def test_a_session_id_of_a_header_that_is_no_id_is_refused(on: Stage) -> None:
    asked = await on.caller.ask({"prompt": PROMPT}, **{"X-Session-ID": "."})
    assert asked.status == 422
    assert "session_id must have 1 to 256 visible ASCII" in asked.body["detail"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_answer_and_the_nodes_work(on: Stage, stream: bool) -> None:
    whole = text_of(answer_to(PROMPT.encode(), 900))
    stop = whole[20:25]
    expected = whole[: whole.index(stop)]
    asked = await on.caller.ask(
        {"prompt": PROMPT, "stop": [stop, "never said"], "stream": stream, "max_tokens": 900}
    )
    assert (asked.text, asked.finish_reason) == (expected, "stop")
    await until(lambda: not any(n.running for n in on.nodes))
    assert sum(node.finished for node in on.decode) == 0


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    *(({"prompt": prompt}, 400, "prompt") for prompt in ("", [], ["x", 3], [-1], ["x"] * 33)),
    ({"prompt": "x", "n": 0}, 400, "n"),
    ({"prompt": ["x"] * 20, "n": 2}, 400, "n"),
    ({"prompt": "x", "top_p": 0}, 400, "top_p"),
    ({"prompt": "x", "min_tokens": 9}, 400, "min_tokens"),
    ({"prompt": "x", "echo": True}, 400, "echo"),
    ({"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "x", "temperature": 3}, 400, "temperature"),
    *(({"prompt": "x", "stop": stop}, 400, "stop") for stop in ([""], ["a"] * 5)),
    ({"prompt": "x", "model": "other"}, 404, "model"),
    ({"prompt": "x", "colour": "red"}, 422, None),
    ({"prompt": 3}, 422, None),
    ({"prompt": "x", "session_id": "a b"}, 422, None),
]


async def test_a_wrong_request_is_refused_with_the_field_that_is_wrong(on: Stage) -> None:
    for body, status, param in WRONG:
        asked = await on.caller.ask(body)
        assert (asked.status, asked.error["param"]) == (status, param), body
        assert asked.headers["Content-Type"] == "application/problem+json"
        assert asked.error["type"] == "invalid_request_error"
        assert asked.error["code"] == asked.body["code"]
        assert status != 400 or asked.body["code"] == "invalid_request"
        assert asked.body["request_id"] == asked.headers["X-Request-Id"]
    assert not any(node.calls for node in on.nodes)


LOAD_GENERATORS_SEND: dict[str, Any] = {
    "top_p": 1.0,
    "n": 1,
    "logprobs": None,
    "ignore_eos": True,
    "min_tokens": 8,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
CHATS_SEND: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "reasoning_effort": None,
    "logprobs": False,
    "chat_template_kwargs": {},
    "metadata": {"run": "1"},
    "store": False,
    "service_tier": "auto",
}
NULLS = ("max_tokens", "temperature", "top_k", "min_tokens", "stop", "seed", "stream", "n", "user")
QUESTION = {"role": "user", "content": "Why?"}


async def test_fields_that_change_nothing_are_accepted(on: Stage) -> None:
    asked = await on.caller.ask({"prompt": PROMPT, "temperature": 1, **LOAD_GENERATORS_SEND})
    assert (asked.status, asked.is_whole, bool(asked.usage)) == (200, True, True)
    greedy = await on.caller.ask({"prompt": PROMPT, "top_p": 0.9})
    assert greedy.text == text_of(answer_to(PROMPT.encode(), 8))
    assert (await on.caller.ask({"prompt": PROMPT, **dict.fromkeys(NULLS)})).status == 200
    assert (await on.caller.ask({"messages": [QUESTION], **CHATS_SEND}, CHATS)).status == 200


async def test_what_a_chat_asks_beyond_text_and_messages_without_content_are_refused(
    on: Stage,
) -> None:
    for field, value in (
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "high"),
        ("top_logprobs", 2),
        ("max_completion_tokens", 0),
    ):
        asked = await on.caller.ask({"messages": [QUESTION], field: value}, CHATS)
        assert (asked.status, asked.error["param"]) == (400, field)
    for message in ({"role": "user"}, {"role": "assistant", "content": None}, {"content": "a"}):
        asked = await on.caller.ask({"messages": [QUESTION, message]}, CHATS)
        assert asked.status == 422
        assert "$.messages[1]" in asked.error["message"]
    assert not any(node.calls for node in on.nodes)


@pytest.mark.promise("Nodes get the gateway's token and never the caller's.")
@pytest.mark.parametrize(("forwards", "seen"), [(False, "secret"), (True, "of-the-caller")])
async def test_nodes_get_the_gateways_token_or_where_that_is_set_the_callers_alone(
    forwards: bool, seen: str
) -> None:
    async with stage(node_token="secret", forward_authorization=forwards) as on:
        nodes = on.nodes
        await on.caller.ask({"prompt": PROMPT}, Authorization="Bearer of-the-caller")
        told = {headers["Authorization"] for node in nodes for _, _, headers in node.calls}
        assert told == {f"Bearer {seen}"}
        for node in nodes:
            node.calls.clear()
            node.refusal = (401, {"code": "unauthorized"})
        asked = await on.caller.ask({"prompt": PROMPT})
        assert asked.status == 401 or not forwards
        told = {headers.get("Authorization", "") for node in nodes for _, _, headers in node.calls}
        assert told == ({""} if forwards else {"Bearer secret"})


async def test_no_stop_text_counts_before_min_tokens(on: Stage) -> None:
    whole = text_of(answer_to(PROMPT.encode(), 40))
    body = {"prompt": PROMPT, "stop": list(set(whole[:4])), "max_tokens": 40}
    asked = await on.caller.ask(body | {"min_tokens": 10})
    assert asked.text.startswith(whole[:10])
    assert len((await on.caller.ask(body)).text) < 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_becomes_one_prompt_with_a_line_for_each_message(
    on: Stage, stream: bool
) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Why? "}]},
    ]
    prompt = b"system: Be short.\nuser: Why? \nassistant: "
    body = {"messages": messages, "max_completion_tokens": 6, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    asked = await on.caller.ask(body, CHATS)
    assert (asked.status, asked.is_whole) == (200, True)
    assert asked.text == text_of(answer_to(prompt, 6))
    assert (asked.finish_reason, asked.usage["prompt_tokens"]) == ("length", len(prompt))
    kind = "chat.completion.chunk" if stream else "chat.completion"
    assert {event["object"] for event in asked.events} == {kind}
    said = asked.events[0]["choices"][0]["delta" if stream else "message"]
    assert said["role"] == "assistant"


async def test_what_is_no_json_or_no_route_is_answered_in_the_same_shape() -> None:
    async with stage(max_body_bytes=1000) as on:
        for method, path, data, status, words in (
            ("POST", "/v1/completions", b"{", 400, "cannot be read"),
            ("POST", "/v1/completions", b"\xff", 400, "cannot be read"),
            ("POST", "/v1/completions", b'"' + b"x" * 2000 + b'"', 413, "1000 bytes"),
            ("GET", "/v1/completions", None, 405, "POST"),
            ("GET", "/nowhere", None, 404, "/nowhere"),
        ):
            async with on.caller.session.request(
                method,
                on.caller.url + path,
                data=data,
                headers={"Content-Type": "application/json"},
            ) as response:
                answer = await response.json(content_type=None)
                assert (response.status, answer["status"]) == (status, status)
                assert words in answer["error"]["message"]


async def test_the_request_id_of_the_caller_is_the_nodes_too(on: Stage) -> None:
    asked = await on.caller.ask({"prompt": PROMPT}, **{"X-Request-Id": "mine-1"})
    assert asked.headers["X-Request-Id"] == "mine-1"
    assert asked.body["id"] == "cmpl-mine-1"
    for node in on.nodes:
        for _, body, headers in node.calls:
            assert headers["X-Request-Id"] == "mine-1"
            assert body["request_id"].startswith("mine-1.")


async def test_with_an_auth_file_only_its_callers_are_served(tmp_path: Path) -> None:
    callers = await asyncio.to_thread(callers_in, tmp_path)
    writer, reader = await callers.token(RoleName.WRITE), await callers.token(RoleName.READ)
    async with stage(auth=AuthSection(file=str(callers.path))) as on:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer nonsense"}, 401),
            ({"Authorization": f"Bearer {reader}"}, 403),
            ({"Authorization": f"Bearer {writer}"}, 200),
        ):
            asked = await on.caller.ask({"prompt": PROMPT}, **headers)
            assert asked.status == status
            assert ("WWW-Authenticate" in asked.headers) == (status in (401, 403))
            assert bool(asked.error) == (status != 200)
        assert (await on.caller.get("/readyz"))[0] == 200
        assert (await on.caller.get("/metrics"))[0] == 401


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_goes_away_cancels_the_nodes_work(on: Stage, stream: bool) -> None:
    script(on.decode, stalls_after=3)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(
            session.post(
                on.caller.url + "/v1/completions",
                json={"prompt": PROMPT, "max_tokens": 8, "stream": stream},
            )
        )
        await until(lambda: any(node.running for node in on.decode), "the work to begin")
        if stream:
            response = await task
            await response.content.readline()
            response.close()
        else:
            task.cancel()
    await until(lambda: not any(n.running for n in on.nodes), "it to end")
    await until(lambda: on.gateway.backend.admission.num_running == 0)


@pytest.mark.promise("A gateway queues requests over its limit and refuses more.")
async def test_more_than_may_run_wait_and_more_than_may_wait_are_refused() -> None:
    limits = LimitsSection(max_running=2, max_queued=2)
    async with stage(limits=limits) as on:
        script(on.prefill, is_held=True)
        async with asyncio.TaskGroup() as tasks:
            some = [tasks.create_task(on.caller.ask({"prompt": PROMPT})) for _ in range(4)]
            await until(lambda: on.gateway.backend.admission.num_waiting == 2)
            refused = await on.caller.ask({"prompt": PROMPT})
            assert (refused.status, refused.body["code"]) == (429, "too_many_requests")
            assert refused.headers["Retry-After"] == "1"
            assert refused.error["type"] == "rate_limit_error"
            script(on.prefill, is_held=False)
        assert [task.result().status for task in some] == [200] * 4
        assert max(node.most_running for node in on.prefill) <= 2


async def test_who_waits_too_long_for_room_is_told() -> None:
    async with stage(limits=LimitsSection(max_running=1, queue_timeout_s=0.1)) as on:
        script(on.prefill, is_held=True)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(on.caller.ask({"prompt": PROMPT}))
            await until(lambda: on.gateway.backend.admission.num_running == 1)
            late = await on.caller.ask({"prompt": PROMPT})
            assert (late.status, late.body["code"]) == (503, "overloaded")
            script(on.prefill, is_held=False)
        assert first.result().status == 200


async def test_while_draining_streams_end_in_order_and_nothing_new_begins(on: Stage) -> None:
    script(on.decode, is_held=True)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(on.caller.ask({"prompt": PROMPT, "stream": True}))
        await until(lambda: any(node.running for node in on.decode))
        on.gateway.drain()
        assert (await on.caller.get("/readyz"))[0] == 503
        assert (await on.caller.get("/livez"))[0] == 200
        refused = await on.caller.ask({"prompt": PROMPT})
        assert (refused.status, refused.body["code"]) == (503, "shutting_down")
        script(on.decode, is_held=False)
        await on.gateway.idle(grace_s=20)
    assert running.result().is_whole


async def test_what_outlasts_the_grace_is_cut_off_and_told(on: Stage) -> None:
    script(on.decode, stalls_after=3)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(on.caller.ask({"prompt": PROMPT, "stream": True}))
        await until(lambda: any(node.running for node in on.decode))
        on.gateway.drain()
        await on.gateway.idle(grace_s=0.2)
    assert running.result().error["code"] == "shutting_down"
    await until(lambda: not any(n.running for n in on.nodes))


async def test_probes_models_and_metrics_are_there(on: Stage) -> None:
    assert (await on.caller.get("/readyz"))[0] == 200
    assert '"tierkv-ref-tiny"' in (await on.caller.get("/v1/models"))[1]
    status, model = await on.caller.get("/v1/models/tierkv-ref-tiny")
    assert (status, json.loads(model)["id"]) == (200, "tierkv-ref-tiny")
    status, problem = await on.caller.get("/v1/models/meta/llama")
    assert (status, json.loads(problem)["code"]) == (404, "model_not_found")
    await on.caller.ask({"prompt": PROMPT})
    text = (await on.caller.get("/metrics"))[1]
    assert 'tierkv_gateway_requests_total{outcome="ok"} 1.0' in text
    assert 'tierkv_gateway_routed_total{how="handoff"} 1.0' in text
    assert 'tierkv_gateway_routed_total{how="resumed"} 0.0' in text
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    exposed = set(re.findall(r"^# TYPE (tierkv_\w+)", text, re.MULTILINE))
    told = set(re.findall(r"`(tierkv_\w+)", page.partition("## Metrics")[2]))
    assert told == {name for name in exposed if not name.endswith("_created")}
    assert "process_resident_memory_bytes" in text
    script(on.nodes, is_ready=False)
    await until(lambda: not any(s is NodeState.READY for s, _ in on.gateway.states().values()))
    assert (await on.caller.get("/readyz"))[0] == 503


async def test_a_node_that_is_degraded_gets_work_and_readyz_says_so(on: Stage) -> None:
    assert json.loads((await on.caller.get("/readyz"))[1]) == {"status": "ok"}
    script(on.nodes, trouble="redis://store is not used")
    await until(lambda: all(word for _, word in on.gateway.states().values()), "the probes")
    status, raw = await on.caller.get("/readyz?verbose")
    said = json.loads(raw)
    assert (status, said["status"]) == (200, "degraded")
    part = said["parts"][on.prefill[0].url]
    assert part == {"status": "degraded", "detail": "storage: redis://store is not used"}
    assert (await on.caller.ask({"prompt": PROMPT})).status == 200
    on.prefill[0].trouble = ""
    first = on.prefill[0].url
    await until(lambda: not on.gateway.states()[first][1], "a good probe")


async def test_a_streamed_batch_is_answered_in_order() -> None:
    prompts = [f"prompt {number}" for number in range(50)]
    async with stage(0, 0, both=2, limits=LimitsSection(max_batch=50)) as on:
        asked = await on.caller.ask({"prompt": prompts, "max_tokens": 2, "stream": True})
    expected = [text_of(answer_to(prompt.encode(), 2)) for prompt in prompts]
    assert asked.texts == dict(enumerate(expected))


async def test_several_choices_are_answered_in_order_and_the_prompt_counts_once(on: Stage) -> None:
    body = {"prompt": [PROMPT, PROMPT[:-1]], "n": 2, "max_tokens": 4}
    asked = await on.caller.ask(body)
    expected = [text_of(answer_to(text.encode(), 4)) for text in (PROMPT, PROMPT[:-1])]
    assert asked.texts == dict(enumerate(text for text in expected for _ in "12"))
    assert asked.usage["prompt_tokens"] == 2 * len(PROMPT) - 1
    assert asked.usage["completion_tokens"] == 16


async def test_the_sampling_of_a_caller_goes_to_the_nodes(on: Stage) -> None:
    fields = {"top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 1.0}
    asked = await on.caller.ask({"prompt": PROMPT, "temperature": 1.0, **fields})
    assert asked.status == 200
    calls = [call for node in on.nodes for call in node.calls]
    bodies = [body for path, body, _ in calls if path in {"/v1/prefill", "/v1/decode"}]
    assert bodies
    for body in bodies:
        assert {name: body[name] for name in fields} == fields
