"""Whatever nodes do, a caller gets the right tokens once and in order, or a clear error."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.gateway.scripted import (
    CHATS,
    ScriptedNode,
    Stage,
    answer_to,
    logprobs_to,
    script,
    stage,
    text_of,
)
from tests.latch import PATIENCE_S, until
from tierkv.gateway.nodes import NodeState
from tierkv.gateway.settings import DeadlineSection, HealthSection, LimitsSection

PROMPT = "a prompt of some length, " * 8
TRUTH = text_of(answer_to(PROMPT.encode(), 8))
DEEP = b'{"unknown": ' + b"[" * 200_000
STREAMED = pytest.mark.parametrize("stream", [False, True])


async def answered(on: Stage, *, stream: bool = False) -> None:
    asked = await on.caller.ask({"prompt": PROMPT, "stream": stream})
    assert (asked.status, asked.text, asked.error) == (200, TRUTH, {})
    assert asked.is_whole
    assert asked.finish_reason == "length"


def at_all(nodes: list[ScriptedNode], name: str) -> int:
    return sum(node.paths().count(f"/v1/{name}") for node in nodes)


@STREAMED
async def test_a_prompt_goes_to_one_prefill_and_one_decode_node_at_the_same_time(
    on: Stage, stream: bool
) -> None:
    await answered(on, stream=stream)
    assert (at_all(on.prefill, "prefill"), at_all(on.decode, "decode")) == (1, 1)
    (_, asked, _), (_, claimed, _) = [call for node in on.nodes for call in node.calls]
    assert asked["ticket_id"] == claimed["ticket_id"]
    assert (asked["tokens"], asked["seed"]) == (claimed["tokens"], claimed["seed"])


async def test_the_first_token_is_passed_on_while_the_prompt_is_still_being_published() -> None:
    async with stage(1, 1) as on:
        on.decode[0].is_held = True  # so that only the prefill node can have said it
        async with (
            asyncio.timeout(10),
            on.caller.session.post(
                on.caller.url + "/v1/completions",
                json={"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True},
            ) as response,
        ):
            line = await response.content.readline()
            assert f'"text":"{TRUTH[0]}"'.encode() in line
            on.decode[0].is_held = False
            assert b"[DONE]" in await response.read()


@STREAMED
@pytest.mark.parametrize("after", [0, 7])
async def test_a_decode_node_that_dies_is_replaced_without_losing_or_repeating_a_token(
    on: Stage, after: int, stream: bool
) -> None:
    script(on.decode, breaks_after=after, breaks_left=1)
    await answered(on, stream=stream)
    script(on.nodes, breaks_left=0)
    await answered(on, stream=stream)


async def test_more_tokens_than_were_asked_for_are_dropped(on: Stage) -> None:
    script(on.decode, adds_tokens=3)
    await answered(on)


@pytest.mark.parametrize(("breaks_left", "rest"), [(0, "?"), (1, "")])
async def test_text_that_was_held_back_counts_only_behind_the_last_token(
    on: Stage, breaks_left: int, rest: str
) -> None:
    script(on.decode[:1], holds_back="?", breaks_after=3, breaks_left=breaks_left)
    asked = await on.caller.ask({"prompt": PROMPT})
    assert asked.text == TRUTH + rest


@pytest.mark.parametrize("fault", ["none", "decode node dies", "first token has no event"])
async def test_log_probabilities_are_those_of_each_token_whichever_node_sends_them(
    on: Stage, fault: str
) -> None:
    """A ticket has the first token without its log probabilities."""
    script(on.decode, breaks_after=3 if fault == "decode node dies" else None, breaks_left=1)
    script(on.prefill, hides_first_token=fault == "first token has no event")
    asked = await on.caller.ask({"prompt": PROMPT, "logprobs": 2})
    expected = [logprobs_to(token) for token in answer_to(PROMPT.encode(), 8)]
    chosen = [one["chosen"] for one in expected]
    assert (asked.status, asked.text) == (200, TRUTH)
    assert asked.body["choices"][0]["logprobs"] == {
        "tokens": [one["text"] for one in chosen],
        "token_logprobs": [one["logprob"] for one in chosen],
        "top_logprobs": [
            {each["text"]: each["logprob"] for each in one["top"]} for one in expected
        ],
        "text_offset": [*range(8)],
    }


async def test_a_streamed_chat_has_log_probabilities_up_to_the_end_of_a_stop_text(
    on: Stage,
) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True}
    whole = (await on.caller.ask(body, CHATS)).text
    asked = await on.caller.ask(body | {"stream": True, "stop": [whole[2:4]]}, CHATS)
    choices = [event["choices"][0] for event in asked.events]
    found = [one for choice in choices for one in (choice["logprobs"] or {}).get("content", ())]
    assert (asked.text, asked.finish_reason) == (whole[:2], "stop")
    assert "".join(one["token"] for one in found) == whole[:4]
    assert [bytes(one["bytes"]).decode() for one in found] == [*whole[:4]]


async def test_after_the_first_token_only_the_rest_is_generated(on: Stage) -> None:
    script(on.decode, breaks_after=3)
    await answered(on)  # one dies in its claim, the other going on: 3 + 3 tokens, 2 are left
    resumed = [body for node in on.nodes for path, body, _ in node.calls if path == "/v1/generate"]
    assert sorted(body["max_tokens"] for body in resumed) == [2, 5]
    assert sorted(body["answered_tokens"] for body in resumed) == [3, 6]
    prompts = [body["tokens"] for body in resumed]
    assert sorted(len(prompt) // 4 for prompt in prompts) == [len(PROMPT) + 3, len(PROMPT) + 6]


@STREAMED
@pytest.mark.parametrize("when", ["before the first token", "before the ticket"])
async def test_a_prefill_node_that_dies_is_replaced_under_the_same_ticket(
    on: Stage, when: str, stream: bool
) -> None:
    first, second = on.prefill
    first.near = len(PROMPT) // 2  # so that it is the first choice
    if when == "before the ticket":
        first.dies_unpublished = True
    else:
        first.breaks_after = 0
    await answered(on, stream=stream)
    tickets = {body["ticket_id"] for n in on.prefill for _, body, _ in n.calls}
    assert len(tickets) == 1
    assert (len(first.calls), len(second.calls)) == (1, 1)
    assert at_all(on.decode, "decode") == 1


async def test_a_caller_is_told_what_the_prefill_node_had_cached_and_not_what_it_handed_over(
    on: Stage,
) -> None:
    script(on.prefill, near=64)
    script(on.decode, near=len(PROMPT) - 65)  # fewer would be computed without a hand-off
    asked = await on.caller.ask({"prompt": PROMPT})
    assert asked.usage["prompt_tokens_details"]["cached_tokens"] == 64


async def test_the_prefill_node_that_holds_the_prefix_is_asked(on: Stage) -> None:
    on.prefill[1].near = len(PROMPT) - 100
    for _ in range(4):
        await answered(on)
    assert [len(node.calls) for node in on.prefill] == [0, 4]


async def test_a_node_that_does_not_say_what_it_has_is_taken_to_have_what_it_was_sent() -> None:
    async with stage(0, 0, 2) as on:
        on.both[1].near = len(PROMPT) - 100
        await answered(on)
        script(on.both, is_mute=True)
        await answered(on)
        assert [len(node.calls) for node in on.both] == [0, 2]


async def test_a_node_that_is_busy_with_long_prompts_is_passed_over_despite_its_prefix(
    on: Stage,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        on.prefill[0].near = len(PROMPT) - 100
        on.prefill[0].is_held = True
        first = tasks.create_task(on.caller.ask({"prompt": PROMPT * 20}))
        await until(lambda: on.prefill[0].running == 1, "the long prompt to begin")
        await answered(on)
        assert len(on.prefill[1].calls) == 1
        on.prefill[0].is_held = False
        assert (await first).status == 200


async def test_the_load_of_many_callers_is_shared_by_all_nodes() -> None:
    async with stage(3, 3) as on:
        script(on.decode, is_held=True)
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(on.caller.ask({"prompt": f"{number} {PROMPT}"}))
            await until(lambda: sum(node.running for node in on.decode) == 12)
            assert [node.running for node in on.decode] == [4, 4, 4]
            script(on.decode, is_held=False)
        assert min(len(node.calls) for node in on.prefill) >= 2


async def test_without_any_prefill_node_a_decode_node_does_it_all(on: Stage) -> None:
    script(on.prefill, breaks_after=0)
    await answered(on)
    assert at_all(on.decode, "generate") == 1


async def test_without_any_decode_node_a_prefill_node_does_it_all() -> None:
    async with stage(2, 0) as on:
        await answered(on)
        assert at_all(on.prefill, "generate") == 1


async def test_nodes_that_do_both_are_asked_alone() -> None:
    async with stage(0, 0, 2) as on:
        await answered(on)
        assert at_all(on.both, "generate") == 1


async def test_the_only_node_gets_another_chance_after_it_has_failed() -> None:
    async with stage(0, 0, 1) as on:
        on.both[0].breaks_after, on.both[0].breaks_left = 0, 1
        await answered(on)
        assert at_all(on.both, "generate") == 2


async def test_a_text_becomes_tokens_at_a_node_that_answers_and_once() -> None:
    """Those that did not are left alone, as after any failure."""
    health = HealthSection(probe_interval_s=PATIENCE_S, eject_s=PATIENCE_S, max_eject_s=PATIENCE_S)
    async with stage(health=health) as on:
        script(on.nodes[:-1], raw=b"no tokens")
        await answered(on)
        assert [node.texts for node in on.nodes] == [[], [], [], [PROMPT.encode()]]
        states = [on.gateway.states()[node.url][0] for node in on.nodes]
        assert states == [NodeState.EJECTED] * 3 + [NodeState.READY]


@STREAMED
async def test_when_nobody_is_left_the_caller_is_told_so(stream: bool) -> None:
    async with stage(limits=LimitsSection(max_attempts=5)) as on:
        script(on.nodes, breaks_after=0)
        asked = await on.caller.ask({"prompt": PROMPT, "stream": stream})
        assert (asked.status, asked.body["code"]) == (503, "no_nodes")
        assert asked.headers["Retry-After"] == "1"
        # A prefill and a claim may be on their way beside the attempt that was the last.
        assert sum(len(node.calls) for node in on.nodes) <= 5 + 2


async def test_an_error_in_the_middle_of_a_stream_ends_it_with_an_error_and_no_done() -> None:
    async with stage(limits=LimitsSection(max_attempts=2)) as on:
        script(on.nodes, breaks_after=2)
        asked = await on.caller.ask({"prompt": PROMPT, "stream": True})
        assert asked.status == 200
        assert asked.error["code"] == "no_nodes"
        assert TRUTH.startswith(asked.text)
        assert not asked.is_whole


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'event: tokens\ndata: {"tokens": [999]}\n\n',
        b"event: done\ndata: {}\n\n",
        b"<html>hello</html>",
        b'event: tokens\ndata: {"tokens": %b\n\n' % DEEP,
    ],
)
async def test_a_node_that_answers_garbage_is_left_alone(on: Stage, raw: bytes) -> None:
    on.decode[0].raw = on.prefill[0].raw = raw
    for _ in range(4):
        await answered(on)
    probes = on.decode[0].num_probes
    await until(lambda: on.decode[0].num_probes > probes + 1, "the gateway to live on")


@pytest.mark.promise("A node that continues a stream with other tokens is rejected.")
async def test_a_node_that_goes_on_otherwise_than_the_one_before_it_is_not_believed() -> None:
    async with stage(1, 2) as on:
        # They wait until the prefill node's first token is there.
        script(on.decode, lies_from=0, is_held=True)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(on.caller.ask({"prompt": PROMPT, "stream": True}))
            await until(lambda: on.prefill[0].finished == 1, "the first token")
            script(on.decode, is_held=False)
        asked = task.result()
        # After the first token nobody can tell who is right about the rest; the first is kept.
        assert asked.text.startswith(TRUTH[0])
        assert at_all(on.decode, "decode") >= 1
        failed = 'tierkv_gateway_failed_attempts_total{node="%s",why="node_failed"} 1.0'
        text = (await on.caller.get("/metrics"))[1]
        assert any(failed % node.url in text for node in on.decode)


async def test_a_prompt_that_a_decode_node_computes_without_its_ticket_is_counted() -> None:
    async with stage(1, 1) as on:
        name = f'{{node="{on.decode[0].url}",why="without_ticket"}}'
        for computes, count in ((False, 0), (True, 1)):
            on.decode[0].claims_nothing = computes
            await answered(on)
            text = (await on.caller.get("/metrics"))[1]
            assert f"tierkv_gateway_failed_attempts_total{name} {count}.0" in text


async def test_a_node_that_hangs_is_replaced_after_the_stall_deadline() -> None:
    deadlines = DeadlineSection(stall_s=0.2, lookup_s=5.0)
    async with stage(deadlines=deadlines) as on:
        on.decode[0].stalls_after = on.decode[1].stalls_after = 5
        await answered(on)
        await until(lambda: not any(n.running for n in on.decode), "the hung calls to end")


async def test_a_machine_that_is_gone_is_noticed_long_before_its_streams_stall() -> None:
    health = HealthSection(probe_interval_s=0.05, probe_timeout_s=1.0, gone_after_probes=2)
    async with stage(1, 2, health=health) as on:  # stall_s is 20 s, longer than a test may wait
        script(on.decode, stalls_after=5)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(answered(on, stream=True))
            await until(lambda: any(node.running for node in on.decode), "the stream to begin")
            gone = next(node for node in on.decode if node.running)
            other = next(node for node in on.decode if node is not gone)
            other.stalls_after = None
            gone.is_frozen = True
            async with asyncio.timeout(15):
                await task
        assert len(other.calls) == 1


async def test_a_busy_node_is_passed_over_and_one_that_drains_gets_nothing_more(on: Stage) -> None:
    on.decode[0].refusal = (503, {"code": "out_of_blocks"})
    on.decode[1].refusal = (503, {"code": "shutting_down"})
    on.decode[1].is_ready = False
    await answered(on)  # by a prefill node, alone
    before = len(on.decode[1].calls)
    await answered(on)
    assert len(on.decode[1].calls) == before


@pytest.mark.promise("If all nodes are full, a gateway answers 503 and no node counts as failed.")
@pytest.mark.parametrize("code", ["out_of_blocks", "too_much_in_work"])
async def test_when_all_are_busy_the_caller_is_to_come_back_and_no_node_is_blamed(
    code: str,
) -> None:
    async with stage(limits=LimitsSection(max_attempts=3)) as on:
        script(on.nodes, refusal=(503, {"code": code}))
        asked = await on.caller.ask({"prompt": PROMPT})
        assert (asked.status, asked.body["code"]) == (503, "overloaded")
        assert "Retry-After" in asked.headers
        assert not [node.url for node in on.gateway.backend.nodes.all if node.num_failures]


@pytest.mark.parametrize(("status", "reason"), [(502, "storage_unavailable"), (503, "not_yet")])
async def test_a_prompt_that_cannot_be_handed_over_is_one_nodes_work(
    on: Stage, status: int, reason: str
) -> None:
    script(on.prefill, refusal=(status, {"code": "handoff_failed", "reason": reason}))
    await answered(on)
    assert at_all(on.decode, "generate") == 1


@STREAMED
async def test_nodes_of_different_models_never_make_one_answer_together(
    on: Stage, stream: bool
) -> None:
    script(
        on.decode,
        refusal=(409, {"code": "handoff_failed", "reason": "incompatible"}),
        near=len(PROMPT) // 2,
        is_held=True,
    )
    task = asyncio.create_task(answered(on, stream=stream))
    await until(lambda: any(node.finished for node in on.prefill), "the first token")
    script(on.decode, is_held=False)
    await task
    # The other decode node is fresh and has the least to do, but would speak for itself.
    assert at_all(on.decode, "generate") == 0
    assert sorted(len(node.calls) for node in on.prefill) == [0, 2]


@pytest.mark.promise("A gateway never asks a node of another model.")
async def test_a_node_of_another_model_is_never_asked_and_readyz_names_the_difference() -> None:
    """Not even at the gateway's start, when nothing has failed yet."""
    async with stage(prefill=1, decode=2, models=("a", "b", "a")) as on:
        stranger = on.decode[0].url
        assert on.gateway.states()[stranger][0] is NodeState.OTHER_MODEL
        for _ in range(4):
            await answered(on, stream=True)
        assert (len(on.decode[0].calls), len(on.decode[1].calls)) == (0, 4)
        status, text = await on.caller.get("/readyz?verbose")
        assert (status, json.loads(text)["status"]) == (200, "degraded")
        assert json.loads(text)["parts"][stranger] == {
            "status": "other_model",
            "detail": "differs in model (here 'a', there 'b')",
        }
        # It is taken away, and another one started in its place.
        on.decode[0].is_frozen = True
        on.decode[0].model = "a"
        await until(lambda: on.gateway.backend.nodes.all[1].num_failures > 0)
        on.decode[0].is_frozen = False
        await until(lambda: on.gateway.states()[stranger][0] is NodeState.READY)
        for _ in range(4):
            await answered(on, stream=True)
        assert len(on.decode[0].calls) > 0


async def test_what_no_node_can_do_is_the_callers_error_and_tried_once(on: Stage) -> None:
    script(on.nodes, refusal=(422, {"code": "request_too_large"}))
    asked = await on.caller.ask({"prompt": PROMPT})
    assert (asked.status, asked.body["code"]) == (422, "request_too_large")
    assert sum(len(node.calls) for node in on.nodes) <= 2


async def test_a_request_that_takes_too_long_ends() -> None:
    async with stage(deadlines=DeadlineSection(request_s=0.3, lookup_s=5.0)) as on:
        script(on.nodes, is_held=True)
        asked = await on.caller.ask({"prompt": PROMPT})
        assert (asked.status, asked.body["code"]) == (504, "deadline_exceeded")
        await until(lambda: not any(n.running for n in on.nodes))
        assert all(not n.running and not n.outstanding_tokens for n in on.gateway.backend.nodes.all)
