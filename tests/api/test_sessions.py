"""Sessions of agents and hints of routers on a node: blocks kept, fetched, counted, released."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.api.nodes import Client, Here, Json, compute, here, holding, prefetched
from tests.e2e.exact import text, truth
from tests.gateway.scripted import in_front
from tests.latch import until
from tierkv.api import pins
from tierkv.gateway.settings import GatewaySection, GatewaySettings
from tierkv.refmodel.model import decode
from tierkv.sched.worth import FetchPolicy

PROMPT = text(100)
BODY = {"prompt": decode(PROMPT), "max_tokens": 8}
TOKENS = list(range(40))
FETCH = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": {"x": 1}}


def hints(*actions: Mapping[str, Any], protocol: str = "0.1") -> Json:
    """Return the field of a body with the envelope of these actions."""
    envelope = {"protocol_version": protocol, "message_id": "m", "actions": list(actions)}
    return {"kv_hints": envelope}


UNKNOWN = {
    "action": hints(FETCH | {"action_type": "kv.drop"}),
    "version": hints(FETCH | {"action_version": "2.0"}),
    "protocol": hints(FETCH, protocol="0.2"),
    "none": hints(),
}


async def ask_others(client: Client) -> None:
    """Ask for other prompts, more than the device and the host have room for."""
    for seed in range(30):
        answer = await client.post("/v1/generate", {"tokens": [seed + 1] * 100, "max_tokens": 1})
        assert answer.status == 200


async def num_found(client: Client, tokens: list[int]) -> int:
    found = await client.post("/v1/lookup", {"tokens": tokens})
    return int(found.body["host_tokens"] + found.body["device_tokens"])


async def num_hints(client: Client) -> tuple[float, float]:
    """Return the numbers of followed and of ignored actions."""
    found = await client.metrics()
    name = 'tierkv_kv_hints_total{{outcome="{}"}}'
    return found[name.format("followed")], found[name.format("ignored")]


async def stored_only(on: Here) -> None:
    """Leave TOKENS in storage, and nothing on the device and the host."""
    await compute(on.node, TOKENS, ticket_id="t")
    await on.settle()
    assert (await on.client.ask("POST", "/v1/reset")).body["held_copies"] == 0


@pytest.mark.promise("A node evicts a session's last turn after all other blocks, until its end.")
@pytest.mark.parametrize("place", ["field", "header"])
async def test_a_turn_of_a_session_is_evicted_after_all_other_blocks(on: Here, place: str) -> None:
    field = {"session_id": "s"} if place == "field" else {}
    headers = {"X-Session-ID": "s"} if place == "header" else {}
    body = BODY | field
    turn = await on.client.ask("POST", "/v1/generate", json=body, headers=headers)
    other = await on.client.post("/v1/generate", {"tokens": [99] * 100, "max_tokens": 1})
    assert turn.status == other.status == 200
    kept = (await on.client.get("/v1/pins/s")).body
    assert (kept["soft"], kept["num_tokens"], kept["prompt_tokens"]) == (True, 96, 108)
    assert 0 < kept["expires_in_s"] <= 300
    await ask_others(on.client)
    whole = [*PROMPT, *turn.body["tokens"]]
    assert await num_found(on.client, whole) >= 96
    assert await num_found(on.client, [99] * 100) == 0
    assert (await on.client.ask("DELETE", "/v1/pins/s")).status == 200
    assert on.node.service.tiers.pins.soft_ends == []
    await ask_others(on.client)
    assert await num_found(on.client, whole) == 0


async def test_a_session_that_cannot_be_kept_is_no_error(
    on: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 1)
    for session in ("a", "b"):
        answer = await on.client.post("/v1/generate", BODY | {"session_id": session})
        assert answer.status == 200
    assert (await on.client.get("/v1/pins/a")).status == 200
    assert (await on.client.get("/v1/pins/b")).status == 404
    found = await on.client.metrics()
    assert found["tierkv_sessions"] == 1
    assert found['tierkv_session_turns_total{outcome="kept"}'] == 1
    assert found['tierkv_session_turns_total{outcome="not_kept"}'] == 1
    refused = await on.client.post("/v1/generate", BODY | {"session_id": "a b"})
    assert (refused.status, refused.code) == (422, "invalid_body")


@pytest.mark.promise("Metrics count the kept sessions and their turns; an ended session leaves.")
async def test_metrics_count_kept_sessions_and_their_turns(on: Here) -> None:
    for session in ("a", "a", "b", "c"):
        await on.client.post("/v1/generate", BODY | {"session_id": session})
    await on.client.post("/v1/generate", BODY)
    found = await on.client.metrics()
    assert found["tierkv_sessions"] == 3
    assert found['tierkv_session_turns_total{outcome="kept"}'] == 4
    await on.client.ask("DELETE", "/v1/pins/a")
    pin = {"prompt": BODY["prompt"], "ttl_s": 60.0}
    await on.client.ask("PUT", "/v1/pins/b", json=pin)  # a pin of the caller, no session
    assert (await on.client.metrics())["tierkv_sessions"] == 1


@pytest.mark.promise("After a session's time its blocks are evicted like others.")
async def test_a_session_whose_time_has_passed_keeps_nothing() -> None:
    async with here(session_ttl_s=0.05) as on:
        await on.client.post("/v1/generate", BODY | {"session_id": "s"})
        assert (await on.client.metrics())['tierkv_session_turns_total{outcome="kept"}'] == 1
        await until(lambda: on.node.service.tiers.pins.soft_ends == [], "the end of the session")
        assert (await on.client.metrics())["tierkv_sessions"] == 0
        assert (await on.client.get("/v1/pins/s")).status == 404


async def test_sessions_are_not_kept_where_their_time_is_0() -> None:
    async with here(session_ttl_s=0.0) as on:
        await on.client.post("/v1/generate", BODY | {"session_id": "s"})
        found = await on.client.metrics()
        assert found["tierkv_sessions"] == 0
        assert found['tierkv_session_turns_total{outcome="not_kept"}'] == 1


@pytest.mark.promise("Protected sessions never make a request fail for lack of blocks.")
async def test_sessions_that_fill_all_tiers_keep_no_request_waiting(on: Here) -> None:
    # device and host have 64 blocks each, a turn 7
    for number in range(30):
        body = {"tokens": [number + 1] * 100, "max_tokens": 1, "session_id": f"s{number}"}
        assert (await on.client.post("/v1/generate", body)).status == 200
    assert (await on.client.metrics())["tierkv_sessions"] == 30
    whole_device = {"tokens": [99] * (62 * 16), "max_tokens": 4}
    answer = await on.client.post("/v1/generate", whole_device)
    assert answer.status == 200


@pytest.mark.promise("A session's next turn is fetched from storage while it waits for room.")
async def test_the_next_turn_is_fetched_from_storage_while_it_waits_for_room() -> None:
    async with here(fetch_policy=FetchPolicy.WAIT_COMPLETE) as on:
        await on.client.post("/v1/prefill", {"tokens": TOKENS, "session_id": "s", "ticket_id": "t"})
        await on.settle()
        await on.client.ask("POST", "/v1/reset")
        turn = {"tokens": [*TOKENS, *range(60, 80)], "max_tokens": 2, "session_id": "s"}
        async with asyncio.TaskGroup() as tasks:
            async with holding(on.node, [7] * (63 * 16)):
                asked = tasks.create_task(on.client.post("/v1/generate", turn))
                stats = on.node.service.stats
                await until(lambda: stats().waiting_requests == 1, "a turn that waits for room")
                assert await num_found(on.client, TOKENS) == 40
            answer = await asked
        assert answer.status == 200
        assert answer.body["matched"]["storage"] == 40


@pytest.mark.promise("A `kv.fetch` hint ahead of a turn brings its stored blocks to the host.")
async def test_a_hint_to_fetch_ahead_of_a_turn_brings_its_blocks_to_the_host(on: Here) -> None:
    await stored_only(on)
    body = {"tokens": TOKENS, "request_id": "p", **hints(FETCH)}
    begun = await on.client.post("/v1/prefetches", body)
    assert begun.status == 202
    done = await prefetched(on.client, "p")
    assert (done["state"], done["fetched_tokens"], done["problem"]) == ("done", 40, None)
    turn = {"tokens": [*TOKENS, 60], "max_tokens": 1, "session_id": "s"}
    matched = (await on.client.post("/v1/generate", turn)).body["matched"]
    assert (matched["host"], matched["storage"]) == (40, 0)
    assert await num_hints(on.client) == (1, 0)


@pytest.mark.promise("Hints of unknown actions, versions and protocols are ignored and counted.")
@pytest.mark.parametrize("unknown", UNKNOWN)
async def test_an_unknown_hint_is_ignored_and_counted(on: Here, unknown: str) -> None:
    given = UNKNOWN[unknown]
    num_ignored = len(given["kv_hints"]["actions"])
    await stored_only(on)
    body = {"tokens": TOKENS, "request_id": "p", **given}
    ahead = await on.client.post("/v1/prefetches", body)
    assert (ahead.status, ahead.body["state"]) == (202, "partial")
    assert ahead.body["problem"] == "kv_hints has no action kv.fetch 1.0 of protocol 0.1"
    assert (await on.client.post("/v1/prefetches", body)).body == ahead.body
    assert (await on.client.get("/v1/prefetches/p")).body == ahead.body
    assert await num_found(on.client, TOKENS) == 0
    assert await num_hints(on.client) == (0, 2 * num_ignored)
    answer = await on.client.post("/v1/generate", BODY | given)
    assert answer.body["tokens"] == list(truth(PROMPT, 8).tokens)
    assert await num_hints(on.client) == (0, 3 * num_ignored)


async def test_a_request_repeated_with_other_hints_or_session_is_the_same_request(on: Here) -> None:
    body = BODY | {"request_id": "r"}
    first = await on.client.post("/v1/generate", body)
    for more in (hints(FETCH), {"session_id": "s"}):
        again = await on.client.post("/v1/generate", body | more)
        assert (again.status, again.body) == (200, first.body)


@pytest.mark.parametrize(
    "envelope", [{"actions": []}, {"protocol_version": "0.1", "actions": [FETCH] * 257}, "0.1"]
)
async def test_a_malformed_envelope_is_refused(on: Here, envelope: object) -> None:
    refused = await on.client.post("/v1/generate", BODY | {"kv_hints": envelope})
    assert (refused.status, refused.code) == (422, "invalid_body")
    assert await num_hints(on.client) == (0, 0)


@pytest.mark.parametrize("end", ["cancel", "shutdown"])
async def test_a_hinted_fetch_that_is_cut_off_leaves_no_block_held(on: Here, end: str) -> None:
    # closing recounts all blocks and leases, and raises what is left
    await stored_only(on)
    await on.client.post("/v1/generate", BODY | {"session_id": "s"})
    on.store.hold()
    body = {"tokens": TOKENS, "request_id": "p", **hints(FETCH)}
    assert (await on.client.post("/v1/prefetches", body)).body["state"] == "running"
    if end == "cancel":
        await on.client.ask("DELETE", "/v1/prefetches/p")
    on.settles = end == "cancel"  # else the node closes while it fetches


@pytest.mark.promise("Through the gateway, a session's next turn goes to the node that kept it.")
async def test_through_a_gateway_the_next_turn_goes_to_the_node_that_kept_the_session() -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(here()) for _ in range(2)]
        section = GatewaySection(both=tuple(on.client.url for on in nodes))
        behind = in_front(GatewaySettings(gateway=section))
        _, caller = await stack.enter_async_context(behind)
        conversation, kept = decode(PROMPT), [0, 0]
        for turn in range(3):
            asked = await caller.ask({"prompt": conversation}, **{"X-Session-ID": "s"})
            assert asked.status == 200, asked.body
            conversation += asked.text + "And then?"
            kept = [len(on.node.pins.all_of("")) for on in nodes]
            assert sorted(kept) == [0, 1], turn
        at = nodes[kept.index(1)]
        assert (await at.client.metrics())['tierkv_session_turns_total{outcome="kept"}'] == 3
