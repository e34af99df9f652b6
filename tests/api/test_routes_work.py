"""The routes that work: what they answer, in which formats, to which roles."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.api.nodes import Here, here, holding
from tests.e2e.exact import text, truth
from tests.latch import turns, until
from tierkv.api.settings import Role
from tierkv.engine import Sampling
from tierkv.pd.tickets import Standing
from tierkv.refmodel.model import decode as decode_text
from tierkv.storage.memory import MemoryStore

PROMPT = text(100)
BODY = {"prompt": decode_text(PROMPT), "max_tokens": 8}


async def test_text_goes_in_and_comes_out_the_same_from_the_cache(on: Here) -> None:
    cold = await on.client.post("/v1/generate", BODY)
    began = time.monotonic()
    warm = await on.client.post("/v1/generate", BODY)
    took_s = time.monotonic() - began
    assert cold.status == warm.status == 200
    assert cold.body["tokens"] == warm.body["tokens"] == list(truth(PROMPT, 8).tokens)
    assert cold.body["text"] == decode_text(cold.body["tokens"])
    assert cold.body["matched"] == {"device": 0, "host": 0, "storage": 0, "direct": 0}
    assert warm.body["matched"] == {"device": 99, "host": 0, "storage": 0, "direct": 0}
    assert (warm.body["prompt_tokens"], warm.body["computed_tokens"]) == (100, 1)
    assert warm.body["load_problem"] is None
    assert 0 < warm.body["time_to_first_token_s"] <= warm.body["total_s"] <= took_s


async def test_sampling_is_what_the_body_says(on: Here) -> None:
    sampling = {"temperature": 0.9, "seed": 2**64 - 1, "top_k": 40}
    answer = await on.client.post("/v1/generate", BODY | sampling)
    expected = truth(PROMPT, 8, Sampling(temperature=0.9, seed=2**64 - 1, top_k=40))
    assert answer.body["tokens"] == list(expected.tokens)


async def test_a_stop_text_ends_an_answer_and_is_no_part_of_its_text(on: Here) -> None:
    expected = truth(PROMPT, 24).tokens
    whole = decode_text(expected)
    stop, max_tokens = whole[5:8], {"max_tokens": 24}
    end = whole.index(stop)
    answer = (await on.client.post("/v1/generate", BODY | max_tokens | {"stop": [stop]})).body
    assert (answer["text"], answer["finish_reason"]) == (whole[:end], "stop")
    assert answer["tokens"] == list(expected[: end + len(stop)])
    letter, at = whole[5], whole.index(whole[5]) + 1
    early, late = (
        BODY | max_tokens | {"stop": [letter], "min_tokens": least} for least in (at - 1, at)
    )
    assert (await on.client.post("/v1/generate", early)).body["text"] == whole[: at - 1]
    assert (await on.client.post("/v1/generate", late)).body["text"].startswith(whole[:at])
    streamed = BODY | max_tokens | {"stop": [stop]}
    *events, (_, done) = await on.client.events("/v1/generate", streamed)
    assert "".join(event["text"] for _, event in events) == whole[:end]
    assert (done["text"], done["finish_reason"]) == (whole[:end], "stop")


async def test_log_probabilities_are_the_same_computed_cached_streamed_and_handed_over(
    on: Here,
) -> None:
    asked = BODY | {"logprobs": 3}
    alone = (await on.client.post("/v1/generate", asked | {"use_cache": False})).body
    found = alone["logprobs"]
    assert [one["chosen"]["token"] for one in found] == alone["tokens"]
    assert all(one["top"][0] == one["chosen"] and len(one["top"]) == 3 for one in found)
    assert all(one["chosen"]["logprob"] > one["top"][1]["logprob"] for one in found)
    assert "".join(one["chosen"]["text"] for one in found) == alone["text"]
    for _ in range(2):
        again = (await on.client.post("/v1/generate", asked)).body
        assert again["logprobs"] == found
    *events, (_, done) = await on.client.events("/v1/generate", asked)
    assert [one for _, event in events for one in event["logprobs"]] == found == done["logprobs"]
    prefill = {"prompt": BODY["prompt"], "ticket_id": "t", "logprobs": 3}
    assert (await on.client.post("/v1/prefill", prefill)).body["logprobs"] == found[:1]
    decode = (await on.client.post("/v1/decode", prefill | {"max_tokens": 8})).body
    assert decode["logprobs"] == [None, *found[1:]]
    assert (await on.client.post("/v1/generate", BODY)).body["logprobs"] is None


async def test_one_node_publishes_and_another_goes_on(store: MemoryStore) -> None:
    async with here(Role.PREFILL, store=store) as on:
        body = {"prompt": BODY["prompt"], "ticket_id": "a ticket/1".replace(" ", "-")}
        published = await on.client.post("/v1/prefill", body)
        assert published.status == 200
        assert published.body["ticket_id"] == body["ticket_id"]
        assert published.body["tokens"] == list(truth(PROMPT, 1).tokens)
        assert (published.body["num_blocks"], published.body["tail_tokens"]) == (7, 4)
        assert published.body["flushed_bytes"] > 0
    async with here(Role.DECODE, store=store) as on:
        answer = await on.client.post("/v1/decode", body | {"max_tokens": 8})
        assert answer.status == 200
        assert answer.body["tokens"] == list(truth(PROMPT, 8).tokens)
        assert answer.body["matched"] == {"device": 0, "host": 0, "storage": 100, "direct": 0}
        assert answer.body["computed_tokens"] == 0
        assert answer.body["first_tokens"] == published.body["tokens"]
        assert answer.body["producer"].startswith("prefill@127.0.0.1:")


async def test_a_ticket_is_named_like_its_request_if_it_has_no_name(on: Here) -> None:
    body = {"prompt": "hello", "request_id": "r-1"}
    published = await on.client.post("/v1/prefill", body)
    assert published.body["ticket_id"] == "r-1"
    answer = await on.client.post("/v1/decode", {"prompt": "hello", "ticket_id": "r-1"})
    assert answer.status == 200


@pytest.mark.parametrize(
    ("role", "path", "right"),
    [(Role.DECODE, "/v1/prefill", "prefill"), (Role.PREFILL, "/v1/decode", "decode")],
)
async def test_the_wrong_role_names_the_right_one(role: Role, path: str, right: str) -> None:
    async with here(role) as on:
        answer = await on.client.post(path, {"prompt": "hello", "ticket_id": "t"})
        assert (answer.status, answer.code) == (409, "wrong_role")
        assert f"the role {right} or both" in answer.body["detail"]
        assert (await on.client.post("/v1/generate", {"prompt": "hello"})).status == 200


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"ticket_id": "another", "deadline_s": 1.0}, 503, "not_yet"),
        ({"prompt": "another prompt"}, 409, "other_prompt"),
        ({"temperature": 0.9, "seed": 7}, 409, "incompatible"),
    ],
)
async def test_a_claim_that_fails_says_why(
    on: Here, change: dict[str, object], status: int, reason: str
) -> None:
    await on.client.post("/v1/prefill", {"prompt": "hello", "ticket_id": "t"})
    answer = await on.client.post("/v1/decode", {"prompt": "hello", "ticket_id": "t"} | change)
    assert (answer.status, answer.code) == (status, "handoff_failed")
    assert answer.body["reason"] == reason
    metrics = (await on.client.get("/metrics")).body.decode()
    counted = f'tierkv_handoff_failures_total{{reason="{reason}",side="claim"}} 1.0'
    assert counted in metrics


async def test_sampling_that_differs_from_the_tickets_is_named_field_by_field(on: Here) -> None:
    sampling = {"temperature": 0.9, "seed": 7, "top_k": 40}
    body = {"prompt": "hello", "ticket_id": "t"}
    await on.client.post("/v1/prefill", body | sampling)
    refused = await on.client.post("/v1/decode", body | sampling | {"seed": 8})
    assert (refused.status, refused.body["reason"]) == (409, "incompatible")
    assert "seed (here '8', there '7')" in refused.body["detail"]
    assert "top_k" not in refused.body["detail"]
    answer = await on.client.post("/v1/decode", body | sampling | {"max_tokens": 4})
    assert answer.status == 200
    expected = Sampling(temperature=0.9, seed=7, top_k=40)
    assert answer.body["tokens"] == list(truth(list(b"hello"), 4, expected).tokens)


async def test_a_seed_does_not_matter_where_the_best_token_is_taken(on: Here) -> None:
    body = {"prompt": "hello", "ticket_id": "t"}
    await on.client.post("/v1/prefill", body)
    greedy = body | {"seed": 9, "temperature": 0.7, "top_k": 1}
    assert (await on.client.post("/v1/decode", greedy)).status == 200


async def test_a_ticket_id_that_another_prompt_waits_under_is_a_conflict(on: Here) -> None:
    body = {"prompt": "hello", "ticket_id": "t"}
    assert (await on.client.post("/v1/prefill", body)).status == 200
    other = body | {"prompt": "something else"}
    refused = await on.client.post("/v1/prefill", other)
    assert (refused.status, refused.code) == (409, "duplicate_request")
    assert "another prompt of 5 tokens" in refused.body["detail"]
    assert (await on.client.post("/v1/prefill", body)).status == 200  # the same once more
    assert (await on.client.post("/v1/decode", body)).status == 200
    state_of = on.node.service.require_handoff().ledger.state_of
    await until(lambda: state_of("t") is Standing.ACKNOWLEDGED, "an acknowledgement")
    assert (await on.client.post("/v1/prefill", other)).status == 200  # nobody waits any more
    assert (await on.client.post("/v1/decode", other)).status == 200


# Ids


async def test_the_request_id_of_body_or_header_comes_back_and_one_is_made_otherwise(
    on: Here,
) -> None:
    given = await on.client.post("/v1/generate", {"prompt": "a", "request_id": "mine"})
    assert given.headers["X-Request-Id"] == given.body["request_id"] == "mine"
    asked = {"json": {"prompt": "a"}, "headers": {"X-Request-Id": "header-id"}}
    header = await on.client.ask("POST", "/v1/generate", **asked)
    assert header.headers["X-Request-Id"] == header.body["request_id"] == "header-id"
    made = [await on.client.post("/v1/generate", {"prompt": "a"}) for _ in range(2)]
    assert len({answer.body["request_id"] for answer in made}) == 2


FULL = list(range(64 * 16))  # all 64 blocks


async def test_a_request_in_the_line_is_ended_and_every_caller_that_waits_for_it_is_told(
    on: Here,
) -> None:
    body = {"tokens": [1, 2, 3], "request_id": "second", "max_tokens": 1}
    async with holding(on.node, FULL):
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(on.client.post("/v1/generate", body)) for _ in range(3)]
            await until(lambda: on.node.service.stats().waiting_requests == 1, "one in line")
            await until(lambda: on.node.num_working == len(asked), "all three calls")
            await turns(50)  # until the last one's body has been read
            ended = await on.client.ask("DELETE", "/v1/requests/second")
        assert ended.status == 200
        assert ended.body == {"request_id": "second", "state": "aborted"}
        for task in asked:
            assert (task.result().status, task.result().code) == (409, "aborted")
        again = await on.client.ask("DELETE", "/v1/requests/second")
        assert (again.status, again.code) == (404, "unknown_id")
    assert (await on.client.post("/v1/generate", body)).status == 200
    over = await on.client.ask("DELETE", "/v1/requests/second")
    assert (over.status, over.code) == (404, "unknown_id")


# Texts and tokens


async def test_a_lookup_changes_nothing_and_says_if_storage_did_not_answer(on: Here) -> None:
    on.store.fail_next(1)
    answer = await on.client.post("/v1/lookup", {"prompt": "x" * 40})
    assert answer.body["storage_tokens"] is None
    assert answer.body["num_tokens"] == 40


@pytest.mark.promise("A stream's text is right within a multi-byte character.")
@pytest.mark.parametrize(("answered", "before"), [(0, ""), (1, "\ufffd")])
async def test_the_text_of_a_stream_goes_on_in_the_middle_of_a_character(
    on: Here, answered: int, before: str
) -> None:
    """Where the prompt's last token, the first byte of two, was answered, its text is still due."""
    body = {"tokens": [*PROMPT, 0xC3], "max_tokens": 4, "answered_tokens": answered}
    *events, _ = await on.client.events("/v1/generate", body)
    tokens = [token for _, event in events for token in event["tokens"]]
    pieces = [piece for _, event in events for piece in event["pieces"]]
    assert len(pieces) == 4
    said = "".join(event["text"] for _, event in events)
    assert said == "".join(pieces) == before + decode_text(tokens)


async def test_a_text_is_told_its_tokens_up_to_the_most_that_a_prompt_may_have() -> None:
    async with here(max_prompt_tokens=9) as on:
        answer = await on.client.post("/v1/tokenize", {"prompt": "h\u00e4lloooo"})
        assert (answer.status, answer.body["num_tokens"]) == (200, 9)
        found = await on.client.post("/v1/lookup", {"tokens": answer.body["tokens"]})
        assert found.body["num_tokens"] == 9
        answer = await on.client.post("/v1/tokenize", {"prompt": "h\u00e4llooooo"})
        assert (answer.status, answer.code) == (422, "request_too_large")
