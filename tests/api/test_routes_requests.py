"""Engines that compute by themselves: a request from admission to its end, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import msgpack
import pytest

from tests.api.nodes import Answer, Client, Here, here
from tests.faulty import FaultyStore
from tests.latch import EVERY, until
from tierkv.clock import SystemClock
from tierkv.gpu.protocol import Direction
from tierkv.storage.memory import MemorySettings, MemoryStore

Json = dict[str, Any]
TOKENS = list(range(40))  # two blocks of 16 and a tail of 8
PACKED = struct.pack("<40i", *TOKENS)


async def admit(client: Client, request_id: str | None = "r", **fields: Any) -> Answer:
    body: Json = {"tokens": TOKENS, "max_new_tokens": 8}
    if request_id:
        body["request_id"] = request_id
    body |= fields
    return await client.post("/v1/requests", body)


async def cache(client: Client, request_id: str = "first") -> None:
    """Leave TOKENS in the cache."""
    assert (await admit(client, request_id)).status == 200
    assert (
        await client.post(f"/v1/requests/{request_id}/finish", {"num_tokens": 40})
    ).status == 200


def used(on: Here) -> int:
    return on.node.service.stats().device.used


async def test_a_request_gets_its_blocks_commits_and_ends() -> None:
    async with here() as on:
        answer = await admit(on.client)
        assert answer.status == 200
        assert answer.body["state"] == "running"
        assert answer.body["loads"] == "loaded"
        assert (answer.body["prompt_tokens"], answer.body["cached_tokens"]) == (40, 0)
        assert len(set(answer.body["block_table"])) == 3
        assert answer.body["block_size"] == 16
        answer = await on.client.post("/v1/requests/r/commit", {"num_tokens": 32})
        assert (answer.status, answer.body["computed_tokens"]) == (200, 32)
        answer = await on.client.post("/v1/requests/r/commit", {"new_tokens": [7, 8]})
        assert (answer.status, answer.body["computed_tokens"]) == (200, 42)
        answer = await on.client.post("/v1/requests/r/finish", {})
        assert answer.body == {"request_id": "r", "state": "finished", "computed_tokens": 42}
        again = await admit(on.client, "again", tokens=[*TOKENS, 7, 8, 9])
        assert again.body["cached_tokens"] == 42
        assert again.body["matched"] == {"device": 42, "host": 0, "storage": 0, "direct": 0}
        await on.client.ask("DELETE", "/v1/requests/again")
        await on.settle()


@pytest.mark.parametrize("form", ["list", "base64", "msgpack list", "msgpack bin", "octets"])
async def test_tokens_in_any_form_are_the_same_request(form: str) -> None:
    async with here() as on:
        await cache(on.client)
        url = "/v1/requests"
        packed = base64.b64encode(PACKED).decode()
        headers = {"Content-Type": "application/msgpack"}
        if form == "list":
            answer = await admit(on.client, "x")
        elif form == "base64":
            answer = await admit(on.client, "x", tokens=packed)
        elif form == "octets":
            headers = {"Content-Type": "application/octet-stream", "Idempotency-Key": "x"}
            query = {"max_new_tokens": "8", "wait": "loaded"}
            answer = await on.client.ask("POST", url, data=PACKED, headers=headers, params=query)
        else:
            tokens: Any = PACKED if form == "msgpack bin" else TOKENS
            raw = msgpack.packb({"tokens": tokens, "request_id": "x", "max_new_tokens": 8})
            answer = await on.client.ask("POST", url, data=raw, headers=headers)
        assert answer.status == 200
        assert (answer.body["request_id"], answer.body["cached_tokens"]) == ("x", 39)
        repeated = await admit(on.client, "x", tokens=packed)
        if form != "octets":  # which waited for its loads, so the two do not ask the same
            assert repeated.body["block_table"] == answer.body["block_table"]
        await on.client.ask("DELETE", "/v1/requests/x")
        await on.settle()


async def test_an_answer_in_msgpack_has_a_packed_block_table() -> None:
    async with here() as on:
        table = (await admit(on.client)).body["block_table"]
        answer = await on.client.get("/v1/requests/r", headers={"Accept": "application/msgpack"})
        assert msgpack.unpackb(answer.body)["block_table"] == struct.pack(f"<{len(table)}i", *table)
        await on.client.ask("DELETE", "/v1/requests/r")


async def bring_to_host(on: Here) -> None:
    """Leave TOKENS on the host, and there alone."""
    await cache(on.client, "one")
    for name in ("two", "three"):  # its second hit brings it to the host
        await admit(on.client, name)
        await on.client.post(f"/v1/requests/{name}/finish", {"num_tokens": 40})
    await on.settle()
    filler = list(range(100, 100 + 64 * 16))
    await admit(on.client, "filler", tokens=filler, max_new_tokens=0)
    await on.client.ask("DELETE", "/v1/requests/filler")


async def test_loads_that_fail_while_they_are_waited_for_leave_no_request() -> None:
    async with here() as on:
        await bring_to_host(on)
        on.latch.fail_next(Direction.LOAD, EVERY)
        failed = await admit(on.client, "r", wait="loaded")
        assert (failed.status, failed.code) == (503, "transfer_failed")
        assert (await on.client.get("/v1/requests/r")).status == 404
        await on.settle()
        on.latch.fail_next(Direction.LOAD, 0)
        assert (await admit(on.client, "r", wait="loaded")).body["loads"] == "loaded"
        await on.client.ask("DELETE", "/v1/requests/r")
        await on.settle()


async def test_a_client_that_goes_while_it_waits_for_loads_leaves_no_request() -> None:
    async with here() as on:
        await bring_to_host(on)
        on.latch.hold(Direction.LOAD)
        waiting = asyncio.ensure_future(admit(on.client, "r", wait="loaded"))
        await until(lambda: on.node.sessions.num_open == 1, "a request that waits for its loads")
        waiting.cancel()
        await until(lambda: on.node.sessions.num_open == 0, "the end of the request")
        on.latch.release()
        await on.settle()


async def test_a_prompt_on_the_host_is_loaded_before_the_answer_if_asked_for() -> None:
    async with here() as on:
        await bring_to_host(on)
        on.latch.hold()
        answer = await admit(on.client, "polling")
        assert (answer.body["loads"], answer.body["matched"]["host"]) == ("loading", 32)
        waiting = asyncio.ensure_future(admit(on.client, "waiting", wait="loaded"))
        await until(lambda: on.node.sessions.num_open == 2, "a request that waits for its loads")
        assert not waiting.done()
        on.latch.release()
        assert (await waiting).body["loads"] == "loaded"
        assert (await on.client.get("/v1/requests/polling")).body["loads"] == "loaded"
        for name in ("polling", "waiting"):
            await on.client.ask("DELETE", f"/v1/requests/{name}")
        await on.settle()


async def test_extend_preempt_and_resume() -> None:
    async with here() as on:
        await admit(on.client, max_new_tokens=0)
        answer = await on.client.post("/v1/requests/r/extend", {"num_tokens": 30})
        assert len(answer.body["block_table"]) == 5
        await on.client.post("/v1/requests/r/commit", {})
        answer = await on.client.ask("POST", "/v1/requests/r/preempt")
        assert (answer.body["state"], answer.body["loads"]) == ("preempted", "none")
        assert answer.body["block_table"] == []
        for path in ("commit", "preempt", "extend"):
            refused = await on.client.post(f"/v1/requests/r/{path}", {"num_tokens": 1})
            assert (refused.status, refused.code) == (409, "wrong_state")
        answer = await on.client.post("/v1/requests/r/resume", {"max_new_tokens": 4})
        assert (answer.body["state"], answer.body["cached_tokens"]) == ("running", 40)
        refused = await on.client.ask("POST", "/v1/requests/r/resume")
        assert (refused.status, refused.code) == (409, "wrong_state")
        await on.client.ask("POST", "/v1/requests/r/finish")
        await on.settle()


async def test_a_preempted_request_can_be_aborted() -> None:
    async with here() as on:
        await admit(on.client)
        await on.client.post("/v1/requests/r/commit", {})
        await on.client.ask("POST", "/v1/requests/r/preempt")
        answer = await on.client.ask("DELETE", "/v1/requests/r")
        assert answer.body["state"] == "aborted"
        await on.settle()


async def test_a_request_aborted_while_it_waits_to_come_back_holds_nothing() -> None:
    async with here() as on:
        await admit(on.client)
        await on.client.post("/v1/requests/r/commit", {})
        await on.client.ask("POST", "/v1/requests/r/preempt")
        await admit(on.client, "all", tokens=list(range(64 * 16)), max_new_tokens=0)
        resuming = asyncio.ensure_future(on.client.ask("POST", "/v1/requests/r/resume"))
        await until(lambda: on.node.service.stats().waiting_requests == 1, "a resume that waits")
        assert (await on.client.ask("DELETE", "/v1/requests/r")).body["state"] == "aborted"
        assert (await resuming).status in (409, 503)
        await on.client.ask("DELETE", "/v1/requests/all")
        await on.settle()


async def test_finishing_or_aborting_again_is_no_error() -> None:
    async with here() as on:
        await admit(on.client)
        first = await on.client.post("/v1/requests/r/finish", {})
        for method, path in (("POST", "/finish"), ("DELETE", "")):
            again = await on.client.ask(method, f"/v1/requests/r{path}")
            assert (again.status, again.body) == (200, first.body)
        late = await on.client.post("/v1/requests/r/commit", {})
        assert (late.status, late.code) == (409, "wrong_state")
        look = await on.client.get("/v1/requests/r")
        assert (look.body["state"], look.body["block_table"]) == ("finished", [])
        assert look.body["expires_in_s"] is None


async def test_a_wrong_commit_is_refused_and_changes_nothing() -> None:
    async with here() as on:
        await admit(on.client)
        for body, status in (
            ({"tokens": [1, 2, 3]}, 400),
            ({"tokens": TOKENS, "num_tokens": 3}, 422),
            ({"num_tokens": 41}, 422),
            ({"num_tokens": 3, "new_tokens": [1]}, 422),
            ({"new_tokens": [1] * 1000}, 400),
            ({"new_tokens": [-1]}, 400),
        ):
            answer = await on.client.post("/v1/requests/r/commit", body)
            assert answer.status == status, body
            assert answer.code
        assert (await on.client.get("/v1/requests/r")).body["computed_tokens"] == 0
        await on.client.ask("DELETE", "/v1/requests/r")
        await on.settle()


async def test_a_request_that_nobody_names_any_more_is_ended() -> None:
    async with here() as on:
        await admit(on.client, ttl_s=1)
        assert used(on) == 3
        await until(lambda: used(on) == 0, "blocks given back")
        answer = await on.client.get("/v1/requests/r")
        assert answer.body["state"] == "expired"
        late = await on.client.post("/v1/requests/r/finish", {"num_tokens": 40})
        assert (late.status, late.code) == (409, "wrong_state")
        await on.settle()


async def test_each_call_renews_the_lease() -> None:
    async with here() as on:
        await admit(on.client, ttl_s=2)
        for _ in range(6):
            await asyncio.sleep(0.4)
            assert (await on.client.get("/v1/requests/r")).body["state"] == "running"
        await on.client.ask("DELETE", "/v1/requests/r")


async def test_a_request_does_not_end_under_a_call_that_takes_longer_than_its_lease() -> None:
    async with here() as on:
        await admit(on.client, "r", ttl_s=1, tokens=list(range(64)))
        others = list(range(1000, 1000 + 16 * 58))
        await admit(on.client, "forgotten", ttl_s=2.5, tokens=others, max_new_tokens=0)
        body = {"num_tokens": 64 * 8, "deadline_s": 100.0}
        extended = await on.client.post("/v1/requests/r/extend", body)
        assert extended.status == 200, extended.body
        forgotten = await on.client.get("/v1/requests/forgotten")
        assert forgotten.body["state"] == "expired"  # what it has waited for
        await until(lambda: used(on) == 0, "its own lease to end")
        await on.settle()


async def test_a_request_does_not_end_while_its_prompt_goes_out() -> None:
    store = FaultyStore(MemoryStore(MemorySettings(), SystemClock()))
    async with here(store=store) as on, asyncio.TaskGroup() as group:
        await admit(on.client, "r", ttl_s=1)
        await on.client.post("/v1/requests/r/commit", {})
        store.hold_writes()
        call = on.client.post("/v1/requests/r/publish", {"ticket_id": "t"})
        published = group.create_task(call)
        await store.until_held(1)
        await admit(on.client, "forgotten", ttl_s=2.5, tokens=[5])
        await until(lambda: used(on) == 3, "the lease of another")
        assert on.node.sessions.num_expired == 1
        store.release()
        assert (await published).status == 200
        assert (await on.client.post("/v1/requests/r/finish", {})).status == 200
        await on.settle()


async def test_a_request_that_finds_no_room_is_refused_after_its_deadline() -> None:
    async with here() as on:
        await admit(on.client, "all", tokens=list(range(64 * 16)), max_new_tokens=0)
        answer = await admit(on.client, "late", deadline_s=0.05)
        assert (answer.status, answer.code) == (503, "out_of_blocks")
        answer = await on.client.post("/v1/requests/all/extend", {"num_tokens": 8})
        assert (answer.status, answer.code) == (422, "request_too_large")
        missing = await on.client.get("/v1/requests/late")
        assert (missing.status, missing.code) == (404, "unknown_id")
        await on.client.ask("DELETE", "/v1/requests/all")
        assert (await admit(on.client, "late", deadline_s=5)).status == 200
        await on.client.ask("DELETE", "/v1/requests/late")
        await on.settle()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"tokens": []}, 400),
        ({"tokens": [-1]}, 400),
        ({"tokens": None}, 422),
        ({"prompt": "both"}, 422),
        ({"max_new_tokens": -1}, 422),
        ({"max_new_tokens": 100_000}, 422),
        ({"ttl_s": 0}, 422),
        ({"ttl_s": 1e9}, 422),
        ({"wait": "forever"}, 422),
        ({"request_id": "a b"}, 422),
        ({"deadline_s": -1}, 422),
        ({"priority": 2**40}, 422),
        ({"surprise": 1}, 422),
    ],
)
async def test_bad_admissions_are_refused(change: Json, status: int) -> None:
    async with here() as on:
        answer = await admit(on.client, **change)
        assert answer.status == status
        assert answer.code
        assert on.node.sessions.num_open == 0
        await on.settle()


async def test_draining_refuses_new_requests_but_lets_those_open_end() -> None:
    async with here() as on:
        await admit(on.client)
        on.node.drain()
        refused = await admit(on.client, "new")
        assert (refused.status, refused.code) == (503, "shutting_down")
        assert (await on.client.post("/v1/requests/r/commit", {})).status == 200
        assert (await on.client.post("/v1/requests/r/finish", {})).status == 200
        await on.settle()


async def test_what_an_engine_leaves_behind_does_not_hold_up_the_end_of_the_node() -> None:
    async with here() as on:
        await admit(on.client)
        await admit(on.client, "preempted")
        await on.client.ask("POST", "/v1/requests/preempted/preempt")
    assert on.node.sessions.num_open == 0
