"""An engine's prompt goes out while it computes: early, complete, or with a reason why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.nodes import Answer, Here, here
from tests.latch import until
from tierkv.clock import SystemClock
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.transfer.storage_io import StorageStats

Json = dict[str, Any]
PROMPT = list(range(8 * 16 + 5))


async def admit(on: Here, **options: Any) -> None:
    body = {"tokens": PROMPT, "request_id": "r"} | options
    assert (await on.client.post("/v1/requests", body)).status == 200


async def stream(on: Here) -> Answer:
    return await on.client.post("/v1/requests/r/stream", {"ticket_id": "t"})


def stored(stats: StorageStats, blocks: int) -> Callable[[], bool]:
    return lambda: stats.flushed_blocks >= blocks


async def claim(on: Here, **options: Any) -> Answer:
    body = {"tokens": PROMPT, "ticket_id": "t", "request_id": "c", "deadline_s": 100.0}
    return await on.client.post("/v1/claims", body | options)


async def test_blocks_go_out_with_each_commit_and_the_claimer_gets_the_whole_prompt() -> None:
    store = MemoryStore(MemorySettings(), SystemClock())
    async with here(store=store) as on, here(store=store) as other:
        await admit(on)
        opened = await stream(on)
        assert opened.body == {"request_id": "r", "ticket_id": "t", "streams": True}
        assert (await stream(on)).body == opened.body
        async with asyncio.TaskGroup() as group:
            claimed = group.create_task(claim(other))
            stats = on.node.service.stats().storage
            assert stats is not None
            for blocks in (3, 7):
                body = {"num_tokens": 16 * blocks}
                assert (await on.client.post("/v1/requests/r/commit", body)).status == 200
                await until(stored(stats, blocks), "blocks in storage")
            early = await on.client.post("/v1/requests/r/publish", {"ticket_id": "t"})
            assert (early.status, early.code) == (409, "wrong_state")
            assert "112 of 133" in early.body["detail"]
            await on.client.post("/v1/requests/r/commit", {})
            last = {"ticket_id": "t", "first_tokens": [9]}
            published = await on.client.post("/v1/requests/r/publish", last)
        assert published.status == 200
        assert published.body["num_blocks"] == 9
        assert published.body["early_blocks"] >= 7
        assert (await on.client.post("/v1/requests/r/publish", last)).body == published.body
        assert claimed.result().status == 200
        assert claimed.result().body["cached_tokens"] == len(PROMPT)
        assert claimed.result().body["first_tokens"] == [9]
        assert (await on.client.post("/v1/requests/r/finish", {})).status == 200
        assert (await other.client.post("/v1/requests/c/finish", {})).status == 200
        await on.settle()
        await other.settle()


@pytest.mark.parametrize("end", ["finish", "abort", "expire"])
async def test_who_waits_is_told_when_the_prompt_will_not_come(end: str) -> None:
    store = MemoryStore(MemorySettings(), SystemClock())
    async with here(store=store) as on, here(store=store) as other:
        await admit(on, ttl_s=2 if end == "expire" else 60)
        await stream(on)
        await on.client.post("/v1/requests/r/commit", {"num_tokens": 32})
        async with asyncio.TaskGroup() as group:
            claimed = group.create_task(claim(other))
            if end == "finish":
                assert (await on.client.post("/v1/requests/r/finish", {})).status == 200
            elif end == "abort":
                assert (await on.client.ask("DELETE", "/v1/requests/r")).status == 200
        refused = claimed.result()
        assert (refused.status, refused.body["reason"]) == (502, "producer_failed")
        await until(lambda: on.node.sessions.num_open == 0, "its end")
        assert on.node.sessions.num_expired == (end == "expire")
        await on.settle()


async def test_a_request_that_is_streamed_is_not_preempted() -> None:
    async with here() as on:
        await admit(on)
        await stream(on)
        refused = await on.client.post("/v1/requests/r/preempt", {})
        assert (refused.status, refused.code) == (409, "wrong_state")
        assert (await on.client.post("/v1/requests/r/commit", {})).status == 200
        assert (await on.client.post("/v1/requests/r/publish", {"ticket_id": "t"})).status == 200
        assert (await on.client.post("/v1/requests/r/preempt", {})).status == 200
        assert (await on.client.ask("DELETE", "/v1/requests/r")).status == 200
        await on.settle()


async def test_a_node_that_stops_gives_up_what_is_streamed(tmp_path: Path) -> None:
    def store() -> FileStore:
        return FileStore(tmp_path / "store", FileSettings(), SystemClock())

    async with here(store=store()) as other:
        async with here(store=store()) as on:
            await admit(on)
            await stream(on)
            await on.client.post("/v1/requests/r/commit", {"num_tokens": 32})
        refused = await claim(other, deadline_s=5)
        assert refused.status == 502
        assert refused.body["reason"] in {"producer_failed", "producer_lost"}, refused.body


OTHER = [*PROMPT[:-1], 250]


async def publish(on: Here, name: str, tokens: list[int], **options: Any) -> Answer:
    """All of a request of its own, ended again."""
    body = {"tokens": tokens, "request_id": name}
    assert (await on.client.post("/v1/requests", body)).status == 200
    assert (await on.client.post(f"/v1/requests/{name}/commit", {})).status == 200
    answer = await on.client.post(
        f"/v1/requests/{name}/publish", {"ticket_id": "t", "first_tokens": [9]} | options
    )
    assert (await on.client.post(f"/v1/requests/{name}/finish", {})).status == 200
    return answer


async def test_a_ticket_that_waits_to_be_claimed_is_not_taken_by_another_prompt() -> None:
    store = MemoryStore(MemorySettings(), SystemClock())
    async with here(store=store) as on, here(store=store) as second, here(store=store) as other:
        assert (await publish(on, "first", PROMPT)).status == 200
        for node in (on, second):
            refused = await publish(node, "second", OTHER)
            assert (refused.status, refused.code) == (409, "duplicate_request")
            body = {"tokens": OTHER, "request_id": "streamed"}
            assert (await node.client.post("/v1/requests", body)).status == 200
            path = "/v1/requests/streamed/stream"
            refused = await node.client.post(path, {"ticket_id": "t"})
            assert (refused.status, refused.code) == (409, "duplicate_request")
            assert (await node.client.ask("DELETE", "/v1/requests/streamed")).status == 200
        assert (await publish(second, "again", PROMPT)).status == 200  # the same prompt may
        assert (await claim(other)).body["first_tokens"] == [9]
        state = "/v1/tickets/t"
        await until_claimed(other, state)
        assert (await publish(on, "third", OTHER)).status == 200  # it was claimed
        assert (await other.client.post("/v1/requests/c/finish", {})).status == 200
        for node in (on, second, other):
            await node.settle()


async def until_claimed(on: Here, path: str) -> None:
    async with asyncio.timeout(20):
        while (await on.client.get(path)).body["state"] != "claimed":  # noqa: ASYNC110 - HTTP
            await asyncio.sleep(0.01)


async def test_while_a_prompt_is_streamed_its_ticket_is_not_anothers() -> None:
    async with here() as on:
        await admit(on)
        await stream(on)
        async with asyncio.timeout(20):
            while (await on.client.get("/v1/tickets/t")).status != 200:  # noqa: ASYNC110 - HTTP
                await asyncio.sleep(0.01)
        refused = await publish(on, "second", OTHER)
        assert (refused.status, refused.code) == (409, "duplicate_request")
        assert (await on.client.ask("DELETE", "/v1/requests/r")).status == 200
        await on.settle()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_ticket_says_how_its_first_tokens_were_sampled(streams: bool) -> None:
    store = MemoryStore(MemorySettings(), SystemClock())
    how = {"temperature": "0.7", "seed": "5"}
    async with here(store=store) as on, here(store=store) as other:
        await admit(on)
        if streams:
            await stream(on)
        await on.client.post("/v1/requests/r/commit", {})
        last = {"ticket_id": "t", "first_tokens": [9], "sampling": how}
        assert (await on.client.post("/v1/requests/r/publish", last)).status == 200
        for policy in ("whole", "recompute"):
            refused = await claim(other, sampling=how | {"seed": "6"}, policy=policy)
            assert (refused.status, refused.body["reason"]) == (409, "incompatible")
            assert "seed" in refused.body["detail"]
            assert "temperature" not in refused.body["detail"]
        assert (await other.client.get("/v1/tickets/t")).body["state"] == "whole"  # not taken
        claimed = await claim(other, sampling=how)
        assert (claimed.status, claimed.body["sampling"]) == (200, how)
        assert (await other.client.post("/v1/requests/c/finish", {})).status == 200
        silent = await claim(other, request_id="c2")  # who does not say may decide by itself
        assert (silent.status, silent.body["sampling"]) == (200, how)
        assert (await other.client.post("/v1/requests/c2/finish", {})).status == 200
        assert (await on.client.post("/v1/requests/r/finish", {})).status == 200
        await on.settle()
        await other.settle()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_publish_that_is_repeated_with_other_content_is_refused(streams: bool) -> None:
    body = {"ticket_id": "t", "first_tokens": [9], "sampling": {"seed": "5"}}
    async with here() as on:
        await admit(on)
        if streams:
            await stream(on)
        await on.client.post("/v1/requests/r/commit", {})
        path = "/v1/requests/r/publish"
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(on.client.post(path, body)) for _ in range(4)]
        first = calls[0].result()
        assert first.status == 200
        assert [call.result().body for call in calls] == [first.body] * 4
        others: list[Json] = [{"first_tokens": [8]}, {"first_tokens": []}, {"sampling": {}}]
        for other in others:
            refused = await on.client.post(path, body | other)
            assert (refused.status, refused.code) == (409, "duplicate_request")
            assert "'t'" in refused.body["detail"]
        assert (await on.client.post(path, body)).body == first.body
        assert (await on.client.post("/v1/requests/r/finish", {})).status == 200
        await on.settle()


async def test_a_store_that_hangs_keeps_a_stream_from_beginning_for_its_deadline_only() -> None:
    async with here() as on:
        await admit(on)
        on.store.hold()
        async with asyncio.timeout(15):  # lookup_deadline_s is 2
            assert (await stream(on)).body["streams"] is True
        on.store.release()
        assert (await on.client.ask("DELETE", "/v1/requests/r")).status == 200
        await on.settle()
