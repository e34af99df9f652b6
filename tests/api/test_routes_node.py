"""What those who run a node can do with it: tiers, blocks, quotas, life cycle, settings."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.api.nodes import Here, Json, compute, holding, settings
from tests.latch import until
from tierkv.api.routes_node import MAX_LISTINGS
from tierkv.api.settings import masked, masked_url
from tierkv.storage.factory import StorageSettings


async def cache(on: Here, num_tokens: int, first: int = 0) -> None:
    """Leave a prompt of so many tokens in the cache."""
    await compute(on.node, range(first, first + num_tokens))


# Life cycle


async def test_paused_requests_wait_and_drained_nodes_refuse(on: Here) -> None:
    assert (await on.client.ask("POST", "/v1/pause")).body["is_paused"] is True
    body = {"tokens": [1], "request_id": "w", "max_tokens": 900}
    waiting = asyncio.ensure_future(on.client.post("/v1/generate", body))
    await until(lambda: on.node.service.scheduler.num_waiting == 1, "a request that waits")
    life = (await on.client.ask("POST", "/v1/resume")).body
    assert (life["is_paused"], life["is_draining"]) == (False, False)
    await until(lambda: on.node.engine.stats.generated_tokens > 0, "its first token")
    life = (await on.client.ask("POST", "/v1/drain")).body
    assert (life["is_draining"], life["running_requests"]) == (True, 1)
    assert (await on.client.get("/readyz")).status == 503
    assert (await on.client.ask("DELETE", "/v1/requests/w")).status == 200
    assert (await waiting).code == "aborted"


async def test_a_tier_shrinks_and_grows_while_it_runs(on: Here) -> None:
    await cache(on, 160)
    for blocks in (4, 64):
        answer = await on.client.post("/v1/resize", {"tier": "device", "blocks": blocks})
        assert answer.body["device"]["capacity_blocks"] == blocks
    small = {"tier": "device", "blocks": 2, "deadline_s": 0.05}
    async with holding(on.node, range(160)):
        late = await on.client.post("/v1/resize", small)
    assert (late.status, late.code) == (503, "out_of_blocks")
    assert (await on.client.get("/v1/tiers")).body["device"]["capacity_blocks"] == 64
    for body, status in (
        ({"tier": "device", "blocks": 65}, 400),
        ({"tier": "device", "blocks": 0}, 422),
        ({"tier": "storage", "blocks": 1}, 422),
    ):
        assert (await on.client.post("/v1/resize", body)).status == status


async def test_a_node_sleeps_and_wakes_with_its_blocks(on: Here) -> None:
    await cache(on, 64)
    awake = await on.client.ask("POST", "/v1/wake")
    assert (awake.status, awake.code) == (409, "wrong_state")
    assert (await on.client.ask("POST", "/v1/sleep")).body["is_asleep"] is True
    for path in ("/v1/sleep", "/v1/resume"):
        refused = await on.client.ask("POST", path)
        assert (refused.status, refused.code) == (409, "wrong_state")
    woken = (await on.client.ask("POST", "/v1/wake")).body
    assert (woken["is_asleep"], woken["is_paused"]) == (False, False)
    found = await on.client.post("/v1/lookup", {"tokens": list(range(64))})
    assert found.body["host_tokens"] == 64
    await cache(on, 64)


async def test_a_node_that_is_busy_does_not_fall_asleep(on: Here) -> None:
    async with holding(on.node, [1]):
        refused = await on.client.post("/v1/sleep", {"deadline_s": 0.05})
    assert (refused.status, refused.code) == (409, "wrong_state")
    await cache(on, 64)


async def test_storage_is_cleared_only_when_that_is_asked_for(on: Here) -> None:
    prompt = {"tokens": list(range(64))}
    await compute(on.node, range(64), ticket_id="t")
    await on.settle()
    kept = await on.client.ask("DELETE", "/v1/blocks")
    assert kept.body == {"held_copies": 0, "removed_values": 0}
    assert (await on.client.post("/v1/lookup", prompt)).body["storage_tokens"] == 64
    gone = await on.client.ask("DELETE", "/v1/blocks", params={"storage": "true"})
    assert gone.body["removed_values"] >= 4
    assert (await on.client.post("/v1/lookup", prompt)).body["storage_tokens"] == 0


# Tiers and quotas


async def test_storage_is_detached_and_attached_while_the_node_runs(
    on: Here, tmp_path: Path
) -> None:
    assert len((await on.client.get("/v1/tiers")).body["storage"]) == 1
    assert (await on.client.ask("DELETE", "/v1/tiers/storage")).body["storage"] == []
    refused = await on.client.post("/v1/prefetches", {"tokens": [1]})
    assert (refused.status, refused.code) == (503, "store_unavailable")
    refused = await on.client.get("/v1/tickets/t")
    assert (refused.status, refused.code) == (503, "store_unavailable")
    url = (tmp_path / "store").as_uri()
    answer = await on.client.ask("PUT", "/v1/tiers/storage", json={"url": url})
    assert answer.status == 200
    assert [one["url"] for one in answer.body["storage"]] == [url]
    for wrong in ("nowhere://x", "", "http://", "redis://a\r\nb", "memory://\x00", "file:///\x7f"):
        answer = await on.client.ask("PUT", "/v1/tiers/storage", json={"url": wrong})
        assert answer.status in (400, 422)
    assert len((await on.client.get("/v1/tiers")).body["storage"]) == 1


async def test_quotas_are_set_told_and_taken_away(on: Here) -> None:
    path = "/v1/quotas/someone"
    answer = await on.client.ask("PUT", path, json={"device_blocks": 3})
    under = answer.body["stored_under"]
    none = {"tenant": "someone", "stored_under": under}
    none |= {"device_blocks": None, "host_blocks": None}
    assert answer.body == none | {"device_blocks": 3}
    assert (await on.client.get(path)).body == none | {"device_blocks": 3}
    assert (await on.client.ask("DELETE", path)).body == none
    refused = await on.client.ask("PUT", path, json={"device_blocks": -1})
    assert (refused.status, refused.code) == (422, "invalid_body")


async def test_a_node_tells_where_in_a_store_its_blocks_and_a_tenants_are(on: Here) -> None:
    own = (await on.client.get("/version")).body["stored_under"]
    quota = await on.client.ask("PUT", "/v1/quotas/someone", json={})
    under = quota.body["stored_under"]
    assert under != own
    for tenant, prefix in (("", own), ("someone", under)):
        await compute(on.node, [1] * 100, tenant=tenant, ticket_id="t")
        assert (await on.store.list(f"{prefix}:", limit=10)).values


async def test_the_quota_of_a_tenant_that_was_closed_for_others_is_told_and_changed_still(
    on: Here,
) -> None:
    service, path = on.node.service, "/v1/quotas/someone"
    await on.client.ask("PUT", path, json={"device_blocks": 3})
    for number in range(service.settings.max_tenants):
        service.space_of_tenant(f"tenant {number}")
    before = service.roots()
    answer = await on.client.get(path)
    assert (answer.status, answer.body["device_blocks"]) == (200, 3)
    answer = await on.client.ask("DELETE", path)
    assert (answer.status, answer.body["device_blocks"]) == (200, None)
    assert service.roots() == before, "which opens nothing"


# Blocks


async def test_every_block_is_listed_once_whatever_the_page(on: Here) -> None:
    await cache(on, 100)
    await cache(on, 50, first=1000)
    for limit in (1, 4, 1000):
        found: list[Json] = []
        cursor = None
        while True:
            query = {"limit": str(limit)} | ({"cursor": cursor} if cursor else {})
            page = (await on.client.get("/v1/blocks", params=query)).body
            again = await on.client.get("/v1/blocks", params=query)
            if cursor:
                assert again.body == page  # an answer that was lost can be asked for again
            assert len(page["blocks"]) <= limit
            found += page["blocks"]
            cursor = page["cursor"]
            if cursor is None:
                break
        assert len(found) == 6 + 1 + 3 + 1
        assert sum(block["is_tail"] for block in found) == 2
        full = [block for block in found if not block["is_tail"]]
        assert len({block["digest"] for block in full}) == len(full)
        assert {block["device"] for block in found} == {"ready"}


async def test_of_too_many_listings_the_one_asked_longest_ago_is_given_up(on: Here) -> None:
    await cache(on, 100)
    begun = [
        (await on.client.get("/v1/blocks", params={"limit": "1"})).body["cursor"]
        for _ in range(MAX_LISTINGS + 1)
    ]
    for cursor, status in ((begun[0], 404), (begun[1], 200)):
        answer = await on.client.get("/v1/blocks", params={"cursor": cursor})
        assert answer.status == status


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "c=1", "limit=1&limit=2"])
async def test_bad_pages_are_refused(on: Here, query: str) -> None:
    answer = await on.client.get(f"/v1/blocks?{query}")
    assert (answer.status, answer.code) == (422, "invalid_body")
    unknown = await on.client.get("/v1/blocks", params={"cursor": "made-up.3"})
    assert (unknown.status, unknown.code) == (404, "unknown_id")


# Settings


async def test_settings_are_told_as_they_are_masked(on: Here) -> None:
    told = (await on.client.get("/v1/config")).body["settings"]
    assert told == json.loads(json.dumps(masked(on.node.settings)))


@pytest.mark.promise("`/v1/config` hides secrets.")
def test_no_secret_is_left_in_masked_settings() -> None:
    url = "redis://user:pa55@host:6379/0?password=pa55"
    chosen = replace(settings(), storage=StorageSettings(url=url))
    chosen = replace(chosen, cache=replace(chosen.cache, tenant="pa55"))
    text = json.dumps(masked(chosen))
    assert "pa55" not in text
    assert "host:6379" in text
    assert masked_url("file:///a/b") == "file:///a/b"


async def test_digests_of_blocks_follow_from_the_roots_of_their_spaces(on: Here) -> None:
    on.node.space("acme")
    roots = (await on.client.get("/v1/config")).body["roots"]
    assert set(roots) == {"", on.node.space("acme")}
    assert len(set(roots.values())) == 2
    await cache(on, 32)
    digest, expected = bytes.fromhex(roots[""]), []
    for block in (range(16), range(16, 32)):
        digest = hashlib.sha256(digest + struct.pack("<16i", *block)).digest()
        expected.append(digest.hex())
    listed = (await on.client.get("/v1/blocks")).body["blocks"]
    assert [block["digest"] for block in listed][:2] == expected
