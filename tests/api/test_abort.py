"""DELETE ends a request wherever it is: in the waiting line, or being generated."""

from __future__ import annotations

import asyncio

from tests.api.nodes import Here, holding
from tests.latch import turns, until

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
        assert (ended.status, ended.body) == (
            200,
            {"request_id": "second", "state": "aborted"},
        )
        for task in asked:
            assert (task.result().status, task.result().code) == (409, "aborted")
        again = await on.client.ask("DELETE", "/v1/requests/second")
        assert (again.status, again.code) == (404, "unknown_id")
    assert (await on.client.post("/v1/generate", body)).status == 200
    over = await on.client.ask("DELETE", "/v1/requests/second")
    assert (over.status, over.code) == (404, "unknown_id")


async def test_a_generation_is_stopped_and_its_caller_told(on: Here) -> None:
    async with asyncio.TaskGroup() as group:
        body = {"prompt": "hello", "max_tokens": 900, "request_id": "g"}
        asked = group.create_task(on.client.post("/v1/generate", body))
        await until(lambda: on.node.engine.stats.generated_tokens > 0, "a first token")
        ended = await on.client.ask("DELETE", "/v1/requests/g")
        assert (ended.status, ended.body["state"]) == (200, "aborted")
        answer = await asked
        assert (answer.status, answer.code) == (409, "aborted")
        assert on.node.engine.stats.generated_tokens < 900


async def test_hand_offs_are_counted(on: Here) -> None:

    async def count(name: str) -> float:
        lines = (await on.client.get("/metrics")).body.decode().splitlines()
        return float(next(line for line in lines if line.startswith(name)).split()[-1])

    publish = {"prompt": "hello" * 9, "ticket_id": "t"}
    await on.client.post("/v1/prefill", publish)
    await on.client.post("/v1/decode", publish | {"max_tokens": 2})
    assert await count('tierkv_handoffs_total{outcome="published",side="publish"}') == 1
    assert await count('tierkv_handoffs_total{outcome="claimed",side="claim"}') == 1
    async with asyncio.timeout(10):  # the node measures its loop every 50 ms
        while not await count("tierkv_event_loop_lag_seconds_count"):
            pass  # each question takes some ms
    assert await count('tierkv_estimated_seconds{way="compute"}') > 0
