"""Lookup, explain, prefetches, pins and tickets."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.api.nodes import Here, Json, compute, here, prefetched
from tests.latch import until
from tierkv.api import pins, prefetches
from tierkv.cache.keys import MediaItem, pack
from tierkv.sched.tenants import MAX_ADAPTERS
from tierkv.storage.memory import MemoryStore

TOKENS = list(range(40))


async def test_lookup_and_explain_tell_where_a_prompt_is(on: Here) -> None:
    answer = await on.client.post("/v1/lookup", {"tokens": TOKENS})
    assert (answer.body["num_tokens"], answer.body["device_tokens"]) == (40, 0)
    answer = await on.client.post("/v1/explain", {"tokens": TOKENS})
    assert (answer.body["first_miss"], answer.body["reason"]) == (0, "never stored")
    await compute(on.node, TOKENS)
    answer = await on.client.post("/v1/explain", {"tokens": [*TOKENS[:32], *range(900, 950)]})
    assert answer.body["runs"] == [{"start": 0, "stop": 2, "where": "device"}]
    assert answer.body["first_miss"] == 2


async def test_a_prefetch_brings_a_prompt_from_storage_to_the_host(store: MemoryStore) -> None:
    async with here(store=store) as on:
        await compute(on.node, TOKENS, ticket_id="t")
        await on.settle()
        assert (await on.client.ask("POST", "/v1/reset")).body["held_copies"] == 0
        answer = await on.client.post("/v1/prefetches", {"tokens": TOKENS, "request_id": "p"})
        assert answer.status == 202
        assert answer.headers["Location"] == "/v1/prefetches/p"
        done = await prefetched(on.client, "p")
        assert (done["state"], done["fetched_tokens"], done["problem"]) == ("done", 40, None)
        found = (await on.client.post("/v1/lookup", {"tokens": TOKENS})).body
        assert found["host_tokens"] >= 32
        again = await on.client.post("/v1/prefetches", {"tokens": TOKENS, "request_id": "p"})
        assert again.body == done
        other = await on.client.post("/v1/prefetches", {"tokens": [1], "request_id": "p"})
        assert (other.status, other.code) == (409, "duplicate_request")


async def test_a_prefetch_of_what_storage_lacks_says_so(on: Here) -> None:
    await on.client.post("/v1/prefetches", {"tokens": TOKENS, "request_id": "p"})
    done = await prefetched(on.client, "p")
    assert (done["state"], done["fetched_tokens"]) == ("partial", 0)
    assert done["problem"]
    for method in ("GET", "DELETE"):
        missing = await on.client.ask(method, "/v1/prefetches/none")
        assert (missing.status, missing.code) == (404, "unknown_id")


async def test_a_prefetch_can_be_given_up(on: Here) -> None:
    on.store.hold()
    await on.client.post("/v1/prefetches", {"tokens": TOKENS, "request_id": "p"})
    answer = await on.client.ask("DELETE", "/v1/prefetches/p")
    assert answer.body["state"] == "cancelled"
    assert (await on.client.get("/v1/prefetches/p")).body["state"] == "cancelled"
    on.store.release()


MEDIA: Json = {"start": 4, "num_tokens": 8, "hash": "ab" * 16}


@pytest.mark.parametrize(
    ("keys", "others"),
    [
        ({"media": [MEDIA]}, {}),
        ({"media": [MEDIA]}, {"media": [MEDIA | {"hash": "cd" * 16}]}),
        ({"adapter": "chat-v1"}, {}),
        ({"adapter": "chat-v1"}, {"adapter": "chat-v2"}),
    ],
)
async def test_prompts_of_other_media_or_adapters_share_no_block(
    on: Here, keys: Json, others: Json
) -> None:
    media = [MediaItem(4, 8, bytes.fromhex(one["hash"])) for one in keys.get("media", [])]
    adapter = keys.get("adapter", "")
    await compute(on.node, TOKENS, media=media, adapter=adapter, ticket_id="t")
    for fields, is_there in ((keys, True), (others, False)):
        found = (await on.client.post("/v1/lookup", {"tokens": TOKENS, **fields})).body
        assert (found["device_tokens"] > 0) == is_there
    state = (await on.client.get("/v1/tickets/t")).body
    assert state["state"] == "whole"  # under these keys every block is found


async def test_media_and_adapters_are_refused_where_nothing_reads_them(on: Here) -> None:
    for fields in ({"media": [MEDIA]}, {"adapter": "chat-v1"}):
        answer = await on.client.post("/v1/generate", {"prompt": "a" * 40, **fields})
        assert (answer.status, answer.code) == (422, "invalid_body")
    beyond = {"tokens": [1] * 8, "media": [MEDIA]}
    assert (await on.client.post("/v1/lookup", beyond)).status == 400


async def test_a_tenant_with_many_adapters_makes_room_among_its_own(on: Here) -> None:
    await compute(on.node, TOKENS, adapter="first")
    await compute(on.node, TOKENS)
    for number in range(MAX_ADAPTERS):
        body = {"tokens": TOKENS, "adapter": f"a{number}"}
        assert (await on.client.post("/v1/lookup", body)).status == 200
    for fields, is_there in (({}, True), ({"adapter": "first"}, False)):
        found = (await on.client.post("/v1/lookup", {"tokens": TOKENS, **fields})).body
        assert (found["device_tokens"] > 0) == is_there


async def test_a_prefetch_too_many_is_refused_until_one_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetches, "MAX_RUNNING", 1)
    async with here() as on:
        on.store.hold()
        first = {"tokens": TOKENS, "request_id": "first"}
        assert (await on.client.post("/v1/prefetches", first)).status == 202
        other = {"tokens": TOKENS, "request_id": "other"}
        refused = await on.client.post("/v1/prefetches", other)
        assert (refused.status, refused.code) == (429, "too_many")
        assert "Retry-After" in refused.headers
        on.store.release()
        await prefetched(on.client, "first")
        assert (await on.client.post("/v1/prefetches", other)).status == 202
        await prefetched(on.client, "other")


async def test_of_prefetches_that_are_over_only_the_last_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetches, "MAX_DONE", 1)
    async with here() as on:
        for name in ("first", "last"):
            await on.client.post("/v1/prefetches", {"tokens": TOKENS, "request_id": name})
            await prefetched(on.client, name)
        assert (await on.client.get("/v1/prefetches/first")).status == 404
        assert (await on.client.get("/v1/prefetches/last")).status == 200


async def test_a_pin_too_many_is_refused_until_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 2)
    async with here() as on:

        async def pin(name: str) -> int:
            return (await on.client.ask("PUT", f"/v1/pins/{name}", json={"tokens": TOKENS})).status

        assert [await pin(name) for name in ("a", "b", "c", "a")] == [200, 200, 429, 200]
        await on.client.ask("DELETE", "/v1/pins/a")
        assert await pin("c") == 200


async def test_pins_keep_blocks_until_they_are_ended(on: Here) -> None:
    await compute(on.node, TOKENS)
    answer = await on.client.ask("PUT", "/v1/pins/a", json={"tokens": TOKENS, "ttl_s": 60})
    assert (answer.status, answer.body["num_tokens"], answer.body["soft"]) == (200, 32, False)
    await on.client.ask("PUT", "/v1/pins/b", json={"tokens": TOKENS, "soft": True})
    told = (await on.client.get("/v1/pins")).body["pins"]
    assert [pin["pin_id"] for pin in told] == ["a", "b"]
    assert (await on.client.ask("POST", "/v1/reset")).body["held_copies"] > 0
    assert 0 < (await on.client.get("/v1/pins/a")).body["expires_in_s"] <= 60
    for name in ("a", "b"):
        assert (await on.client.ask("DELETE", f"/v1/pins/{name}")).status == 200
        gone = await on.client.ask("DELETE", f"/v1/pins/{name}")
        assert (gone.status, gone.code) == (404, "unknown_id")
    await on.client.ask("POST", "/v1/reset")


async def test_a_pin_ends_by_itself(on: Here) -> None:
    await compute(on.node, TOKENS)
    await on.client.ask("PUT", "/v1/pins/a", json={"tokens": TOKENS, "ttl_s": 0.1})
    async with asyncio.timeout(20):
        while (await on.client.get("/v1/pins/a")).status == 200:
            pass
    assert (await on.client.get("/v1/pins")).body == {"pins": []}
    await until(lambda: on.node.service.tiers.pins.num_leases == 0, "a lease that ended")


async def test_a_ticket_is_forgotten(on: Here) -> None:
    await compute(on.node, TOKENS, ticket_id="t")
    assert (await on.client.ask("DELETE", "/v1/tickets/t")).status == 200
    for method in ("GET", "DELETE"):
        missing = await on.client.ask(method, "/v1/tickets/t")
        assert (missing.status, missing.code) == (404, "unknown_id")


async def test_a_ticket_with_a_lost_block_is_incomplete(on: Here) -> None:
    await compute(on.node, TOKENS, ticket_id="t")
    page = await on.store.list("tierkv:", limit=100)
    partial = [one.name for one in page.values if ":partial:" in one.name]
    assert await on.store.delete(partial) == 1
    state = (await on.client.get("/v1/tickets/t")).body
    assert (state["state"], state["present_blocks"]) == ("incomplete", 2)


async def test_a_ticket_whose_producer_died_is_lost_and_not_open(on: Here) -> None:
    handoff = on.node.service.handoff
    assert handoff is not None
    prompt = on.node.prompt(pack(TOKENS), "")
    of_the_dead = replace(handoff.tickets.new_open("t", prompt), incarnation="gone")
    await handoff.tickets.put(of_the_dead)
    state = (await on.client.get("/v1/tickets/t")).body
    assert (state["state"], state["num_tokens"]) == ("lost", len(TOKENS))


async def test_a_ticket_that_is_gone_since_it_was_claimed_is_still_claimed(on: Here) -> None:
    await compute(on.node, TOKENS, ticket_id="t")
    body = {"tokens": TOKENS, "ticket_id": "t", "max_tokens": 2}
    assert (await on.client.post("/v1/decode", body)).status == 200
    async with asyncio.timeout(20):  # the claim is recorded in the background
        while (await on.client.get("/v1/tickets/t")).body["state"] != "claimed":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    page = await on.store.list("tierkv:ticket", limit=100)
    assert await on.store.delete([one.name for one in page.values]) == 1
    state = (await on.client.get("/v1/tickets/t")).body
    assert (state["state"], state["claimer"]) == ("claimed", on.node.name)
