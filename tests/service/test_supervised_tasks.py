"""A failure in a task that a node can do without never ends the node."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.api.nodes import Client, here, process
from tests.latch import PATIENCE_S, ManualEvent, finish, until
from tests.redis_proxy import redis_proxy
from tests.redis_server import PATIENT, redis_server
from tests.world import world
from tierkv import tasks
from tierkv.api.node import Node
from tierkv.clock import SystemClock
from tierkv.errors import ShuttingDownError, StoreUnavailableError, TransferError
from tierkv.gpu.protocol import Direction
from tierkv.service import Service
from tierkv.storage.base import StoreWrapper
from tierkv.storage.factory import open_guarded_store
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetItem, GetOutcome, PutItem, PutOutcome, Store
from tierkv.tasks import background

T = TypeVar("T")

ERRORS = (
    RedisConnectionError("Connection reset by peer"),
    RedisTimeoutError("Timeout writing to socket"),
    ConnectionResetError(104, "Connection reset by peer"),
    TimeoutError("late"),
    OSError(24, "Too many open files"),
    RuntimeError("can't start new thread"),
)
# Supervised tasks of a node that publishes and claims a prompt over Redis with a near store.
EXPECTED = {
    "tierkv-claim-ahead",
    "tierkv-file-sweep",
    "tierkv-live",
    "tierkv-live-refresh",
    "tierkv-load-ahead",
    "tierkv-near-fill",
    "tierkv-producer-lease",
    "tierkv-redis-notify",
    "tierkv-store-probe",
    "tierkv-store-write-probe",
    "tierkv-ticket-ledger",
    "tierkv-touch",
}
PROMPT = "a prompt of several blocks, that one node publishes and another one claims " * 3


async def hands_over(client: Client, ticket_id: str) -> tuple[int, int]:
    """The status of the publish, and that of the claim."""
    body = {"prompt": PROMPT, "ticket_id": ticket_id}
    published = await client.post("/v1/prefill", body)
    return published.status, (await client.post("/v1/decode", body)).status


@pytest.mark.promise("A node outlives failures of its background tasks and stores.")
async def test_every_task_that_a_node_can_do_without_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervise, num_started = tasks._supervise, Counter[str]()  # noqa: SLF001 - fails its tasks

    def failing(
        name: str, start: Callable[[], Coroutine[None, None, None]]
    ) -> Coroutine[None, None, None]:
        errors = list(ERRORS)

        async def fails_first() -> None:
            num_started[name] += 1
            if errors:
                raise errors.pop()
            await start()

        return supervise(name, fails_first)

    monkeypatch.setattr(tasks, "_supervise", failing)
    monkeypatch.setattr(tasks, "_FIRST_PAUSE_S", 0.0001)
    with redis_server() as server:
        url = f"layered:{tmp_path.as_uri()}|{server.url}"
        async with here(store=open_guarded_store(url, PATIENT, SystemClock())) as on:
            for number in range(3):
                assert await hands_over(on.client, f"t{number}") == (200, 200)
            await until(
                lambda: all(num_started[name] > len(ERRORS) for name in EXPECTED - _SHORT),
                f"all of {EXPECTED} started again, not only {num_started}",
            )
            assert on.node.service.failure is None
            assert (await on.client.get("/readyz")).status == 200
            text = (await on.client.get("/metrics")).body.decode()
            [told] = re.findall(r"(?m)^tierkv_task_failures_total (\S+)$", text)
            assert float(told) >= len(ERRORS) * len(EXPECTED - _SHORT)
    assert set(num_started) >= EXPECTED


_SHORT = {"tierkv-claim-ahead", "tierkv-load-ahead"}  # tasks that end with their request


@pytest.mark.promise("A node outlives failures of its background tasks and stores.")
async def test_a_node_outlives_a_redis_that_stops_while_connections_are_cut(tmp_path: Path) -> None:
    """The stop of 2 s is the fault; requests meanwhile end by themselves."""
    with redis_server() as server:
        async with redis_proxy(server.port) as proxy:
            config = tmp_path / "node.toml"
            config.write_text(f'[storage]\nurl = "{proxy.url}"\n')
            async with process(tmp_path, "--config", config) as node:
                assert await hands_over(node.client, "t0") == (200, 200)
                server.pause()
                proxy.cut_after = 0
                until_s = asyncio.get_running_loop().time() + 2
                number = 0
                while asyncio.get_running_loop().time() < until_s:
                    number += 1
                    async with asyncio.timeout(60):
                        body = {"prompt": f"{number} {PROMPT}", "max_tokens": 2}
                        assert (await node.client.post("/v1/generate", body)).status == 200
                proxy.cut_after = None
                server.resume()
                for number in range(20):
                    if await hands_over(node.client, f"u{number}") == (200, 200):
                        break
                else:
                    raise AssertionError("no prompt could be handed over again")
                assert (await node.client.get("/readyz")).status == 200
                assert "has failed" not in await asyncio.to_thread(node.log_text)


class Raising(StoreWrapper):
    """A store that raises what no store may, while `is_broken`; `breaks` ends its lifetime so."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(MemorySettings(), SystemClock()))
        self.is_broken = False
        self.errors = cycle(ERRORS)
        self.num_opened = 0
        self.breaks = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.num_opened += 1
        self.breaks.clear()

        async def work() -> None:
            await self.breaks.wait()
            raise next(self.errors)

        async with self.inner.running(), background({"a-task-of-the-store": work()}):
            yield

    def was_opened(self, number: int) -> bool:
        return self.num_opened == number

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        if self.is_broken:
            raise next(self.errors)
        return await ask(self.inner)

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        return await self._ask(lambda store: store.get_into(items))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        return await self._ask(lambda store: store.put(items))


@pytest.mark.promise("A node outlives failures of its background tasks and stores.")
async def test_whatever_a_store_raises_is_the_stores_failure_and_the_node_goes_on() -> None:
    raising = Raising()
    settings = ResilienceSettings(probe_interval_s=0.02)
    async with here(store=GuardedStore(raising, settings, SystemClock())) as on:
        assert await hands_over(on.client, "t0") == (200, 200)
        raising.is_broken = True
        for number in range(2 * len(ERRORS)):
            body = {"prompt": f"{number} {PROMPT}", "max_tokens": 2}
            assert (await on.client.post("/v1/generate", body)).status == 200
        published, _ = await hands_over(on.client, "t1")
        assert published == 502
        raising.is_broken = False
        await until(lambda: not on.node.service.storage_state()[0].has_open_circuit, "a probe")
        assert await hands_over(on.client, "t2") == (200, 200)
        assert on.node.service.failure is None


@pytest.mark.promise("A node outlives failures of its background tasks and stores.")
async def test_a_store_whose_own_tasks_fail_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_FIRST_PAUSE_S", 0.001)
    raising = Raising()
    async with here(store=raising) as on:
        for number in range(1, 4):
            await until(partial(raising.was_opened, number), f"opened {number} times")
            assert await hands_over(on.client, f"t{number}") == (200, 200)
            raising.breaks.set()
        await until(partial(raising.was_opened, 4), "opened again")
        assert on.node.service.failure is None


async def test_a_store_that_cannot_be_opened_for_any_reason_is_refused_to_who_attaches_it() -> None:
    class Unopenable(StoreWrapper):
        @asynccontextmanager
        async def running(self) -> AsyncIterator[None]:
            raise RuntimeError("can't start new thread")
            yield

    async with here() as on:
        store = Unopenable(MemoryStore(MemorySettings(), SystemClock()))
        with pytest.raises(StoreUnavailableError, match="can't start new thread"):
            await on.node.service.attach_storage(store)
        assert await hands_over(on.client, "t") == (200, 200)


# A task that a service lives by fails: it is told at once, and closing does not wait for it.


BUG = RuntimeError("nobody thought of this")


async def test_closing_does_not_wait_for_copies_that_only_the_dead_task_could_have_settled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lives: list[tuple[Service, Awaitable[None]]] = []

    async def live() -> None:
        async with world() as on:
            on.latch.hold(Direction.OFFLOAD)
            on.service.mover.offload(np.array([0], np.int32), np.array([0], np.int32))
            await on.latch.until_held()
            event = ManualEvent()
            lives.append((on.service, on.service.mover.poller.done(event)))
            event.finish(BUG)
            await asyncio.sleep(PATIENCE_S)  # it is cancelled

    with pytest.raises((RuntimeError, ExceptionGroup)) as failed:
        await finish(live())
    assert "nobody thought of this" in repr(failed.value)
    [(service, waiting)] = lives
    assert "nobody thought of this" in str(service.failure)
    told = [one for one in caplog.records if one.levelno == logging.CRITICAL]
    assert told[0].exc_info is not None, "the exception itself, before anything is closed"
    with pytest.raises(TransferError, match="nobody thought of this"):
        await waiting


async def test_a_node_that_has_failed_says_why_it_refuses() -> None:
    refused: list[str] = []

    async def live() -> None:
        async with here() as on:
            event = ManualEvent()
            waiting = on.node.service.mover.poller.done(event)
            event.finish(BUG)
            try:
                await asyncio.sleep(PATIENCE_S)  # it is cancelled
            finally:
                with pytest.raises(ShuttingDownError) as error:
                    await enter(on.node)
                refused.append(str(error.value))
                with pytest.raises(TransferError):
                    await waiting

    with pytest.raises((RuntimeError, ExceptionGroup)):
        await finish(live())
    assert ["nobody thought of this" in one for one in refused] == [True]


async def enter(node: Node) -> None:
    async with node.work():
        pass
