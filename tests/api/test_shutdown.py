"""How a node ends: what runs may finish, what does not is told, nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest

from tests.api.nodes import Here, here, settings
from tests.latch import finish, turns, until
from tierkv.api.node import Node
from tierkv.clock import SystemClock
from tierkv.errors import ShuttingDownError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Direction
from tierkv.http import process
from tierkv.storage.memory import MemorySettings, MemoryStore

LONG = {"prompt": "hello", "max_tokens": 1000}


async def test_a_publish_under_way_ends_well_although_its_request_is_cut_off(
    store: MemoryStore,
) -> None:
    body = {"prompt": "hello", "ticket_id": "t"}
    async with here(store=store) as on, asyncio.TaskGroup() as group:
        on.latch.hold(Direction.OFFLOAD)
        task = group.create_task(on.client.post("/v1/prefill", body))
        await on.latch.until_held()
        on.node.drain()
        await finish(on.node.idle(grace_s=0))
        assert (await task).status == 503
        on.settles = False  # leaving opens the latch, and the node waits for the publish
    async with here(store=store) as on:
        assert (await on.client.post("/v1/decode", body)).status == 200


async def test_a_hurry_gives_up_a_publish(on: Here) -> None:
    async with asyncio.TaskGroup() as group:
        on.store.hold()
        body = {"prompt": "hello", "ticket_id": "t"}
        before = on.store.num_operations
        task = group.create_task(on.client.post("/v1/prefill", body | {"request_id": "r"}))
        await until(lambda: on.store.num_operations > before)
        on.store.release()
        on.latch.hold(Direction.OFFLOAD)
        await on.latch.until_held()
        on.node.drain()
        on.node.end_grace()
        await finish(on.node.idle(grace_s=3600))
        assert (await task).status == 503
        on.latch.release()


async def test_an_ended_node_leaves_no_task_behind() -> None:
    async with here() as on, asyncio.TaskGroup() as group:
        group.create_task(on.client.post("/v1/generate", LONG))
        await until(lambda: on.node.engine.stats.generated_tokens > 0)
        on.node.drain()
        await finish(on.node.idle(grace_s=0))
    await turns(5)
    left = {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]
    assert left == set()


async def test_a_node_that_ends_takes_no_new_work_while_it_waits_for_the_old() -> None:
    refusals: list[ShuttingDownError] = []
    node = Node(settings(), device=CpuDevice(), store=MemoryStore(MemorySettings(), SystemClock()))

    async def works() -> None:
        async with node.work():
            try:
                await asyncio.Event().wait()
            finally:  # it is cut off
                with pytest.raises(ShuttingDownError) as refused:
                    node.work()
                refusals.append(refused.value)

    async with node.running():
        task = asyncio.create_task(works())
        await until(lambda: node.num_working == 1)
    assert isinstance(task.exception(), ShuttingDownError)
    assert len(refusals) == 1


class Stubborn:
    """What serves, and has work that does not end when it is cut off."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def drain(self) -> None: ...
    def end_grace(self) -> None: ...

    async def idle(self, *, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        await asyncio.Event().wait()


async def test_work_that_does_not_end_when_it_is_cut_off_does_not_keep_a_process() -> None:
    closing, stop = asyncio.Event(), asyncio.Event()
    stop.set()
    listening, url = nullcontext("http://node"), list[str]()
    serving = process.serve(
        Stubborn(), "it", listening, url.append, grace_s=0.01, on_closing=closing.set, stop=stop
    )
    task = asyncio.create_task(serving)
    await finish(closing.wait())
    assert not task.done()
    assert url == ["http://node"]
    task.cancel()
    await asyncio.wait([task])
