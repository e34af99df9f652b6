"""A gateway before real nodes as real processes: exact answers, also when nodes are killed."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.exact import fresh_connections, text, truth
from tests.processes import NodeProcess, gateway, node
from tests.redis_server import free_port
from tierkv.engine import Sampling
from tierkv.refmodel.model import decode as decode_text

# All tests share one fleet, since starting it takes longer than most of them; each leaves it whole.
pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

CONFIG = """
[cache]
block_size = 16
device_blocks = 1024
host_blocks = 2048
"""
NAMES = ("prefill1", "prefill2", "decode1", "decode2")
NUM_TOKENS = 40
_PAUSE_S = 0.05


@functools.cache
def expected(length: int, seed: int, temperature: float) -> str:
    sampling = Sampling(temperature=temperature, seed=seed)
    return decode_text(truth(text(length, seed), NUM_TOKENS, sampling).tokens)


class Answer:
    """What the gateway said to one caller."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.text = ""
        self.code: str | None = None
        self.is_whole = False

    def take(self, line: str) -> None:
        data = line.removeprefix("data: ").strip()
        if data == "[DONE]":
            self.is_whole = True
        elif data:
            event = json.loads(data)
            self.code = event.get("code", self.code)
            self.text += "".join(choice["text"] for choice in event.get("choices", []))


class Nodes:
    """Two prefill and two decode nodes over one store, and a gateway."""

    def __init__(
        self, folder: Path, http: aiohttp.ClientSession, storage: str, config: str
    ) -> None:
        self.folder = folder
        self.http = http
        self.storage = storage
        self._config = folder / "node.toml"
        self._config.write_text(config)
        self.nodes: dict[str, NodeProcess] = {}
        self._lives: dict[str, AsyncExitStack] = {}
        self.gateway: NodeProcess

    async def start(self, name: str, port: int) -> None:
        self._lives[name] = AsyncExitStack()
        self.nodes[name] = await self._lives[name].enter_async_context(
            node(
                name,
                role=name.rstrip("12"),
                config=self._config,
                storage=self.storage,
                folder=self.folder,
                port=port,
                direct="off",  # what is said here of a store goes through it
            )
        )

    async def start_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in NAMES:
                # One that no connection gets while the node is down.
                tasks.create_task(self.start(name, free_port()))

    async def kill(self, name: str) -> None:
        self.nodes[name].process.kill()
        await self.nodes[name].process.wait()

    async def restart(self, name: str) -> None:
        """At the same address, as an orchestrator would."""
        await self._lives[name].aclose()
        await self.start(name, port=int(self.nodes[name].url.rpartition(":")[2]))

    async def end(self) -> None:
        for life in self._lives.values():
            await life.aclose()

    def another_gateway(self, *options: str) -> AbstractAsyncContextManager[NodeProcess]:
        prefill, decode = (
            [self.nodes[name].url for name in names] for names in (NAMES[:2], NAMES[2:])
        )
        return gateway(self.folder, prefill=prefill, decode=decode, options=options)

    async def completion(self, body: dict[str, Any]) -> Answer:
        url = self.gateway.url + "/v1/completions"
        async with self.http.post(url, json=body) as response:
            answer = Answer(response.status)
            if response.content_type == "text/event-stream":
                async for line in response.content:
                    answer.take(line.decode())
            else:
                answer.take((await response.read()).decode())
                answer.is_whole = response.status == 200
        return answer


class Fleet(Nodes):
    def patient_gateway(self) -> AbstractAsyncContextManager[NodeProcess]:
        """It knows who has a prefix, however busy the machine is."""
        patient = self.folder / "gateway.toml"
        patient.write_text("[deadlines]\nlookup_s = 5.0\n")
        return self.another_gateway("--config", str(patient))

    async def complete(
        self, length: int, seed: int, *, temperature: float = 0.0, stream: bool = False
    ) -> Answer:
        body = {
            "prompt": decode_text(text(length, seed)),
            "max_tokens": NUM_TOKENS,
            "temperature": temperature,
            "seed": seed,
            "stream": stream,
        }
        return await self.completion(body)

    async def get(self, where: NodeProcess, path: str) -> dict[str, Any]:
        async with self.http.get(where.url + path) as response:
            answer: dict[str, Any] = await response.json(content_type=None)
        return answer

    async def counted(self, name: str, label: str) -> float:
        """The sum of a metric's values that have the label."""
        async with self.http.get(self.gateway.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"tierkv_gateway_{name}_total{{") and label in line
        )

    async def routed(self, how: str) -> float:
        return await self.counted("routed", f'how="{how}"')

    async def broken_attempts(self) -> float:
        """How often a node broke off in the middle of something."""
        return await self.counted("failed_attempts", 'why="node_failed"')

    async def settle(self, names: Sequence[str]) -> None:
        """These nodes run nothing any more, and their books are in order."""
        for name in names:
            async with asyncio.timeout(20):
                where = self.nodes[name]  # another process: there is no event to wait for
                while (await self.get(where, "/v1/stats"))["running_requests"]:  # noqa: ASYNC110
                    await asyncio.sleep(_PAUSE_S)
                assert (await self.get(self.nodes[name], "/v1/verify"))["findings"] == []

    async def all_ready(self, where: NodeProcess | None = None) -> None:
        """All nodes, as a gateway sees it."""
        where = where or self.gateway
        async with asyncio.timeout(30):
            while (await self.get(where, "/readyz")).get("status") != "ok":  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_S)  # another process: there is no event to wait for


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=fresh_connections(), timeout=timeout)
        )
        one = Fleet(folder, http, f"file://{folder / 'store'}", CONFIG)
        stack.push_async_callback(one.end)
        await one.start_all()
        one.gateway = await stack.enter_async_context(one.patient_gateway())
        await one.all_ready()
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path_factory.mktemp("fleet")) as one:
        yield one


async def test_answers_are_those_of_a_single_node(on: Fleet) -> None:
    handed, resumed = await on.routed("handoff"), await on.routed("resumed")
    for length in (1, 16, 333):
        for temperature in (0.0, 0.8):
            for stream in (False, True):
                answer = await on.complete(length, length, temperature=temperature, stream=stream)
                assert answer.text == expected(length, length, temperature), length
                assert answer.is_whole
    assert await on.routed("handoff") > handed
    assert await on.routed("resumed") == resumed
    await on.settle(NAMES)


@pytest.mark.promise("A gateway sends the next turn to the node with its prefix.")
async def test_the_next_turn_goes_where_its_prefix_is(on: Fleet) -> None:
    first, prompt = await on.complete(600, 5), decode_text(text(600, 5))
    turn = prompt + first.text + " And then?"
    usage = []
    for asked in (prompt, turn):
        body = {"prompt": asked, "max_tokens": 2}
        async with on.http.post(on.gateway.url + "/v1/completions", json=body) as response:
            usage.append((await response.json())["usage"])
    for one, tokens in zip(usage, (600, 600 + NUM_TOKENS - 1), strict=True):
        assert one["prompt_tokens_details"]["cached_tokens"] >= tokens - 1
    await on.settle(NAMES)


async def trials(on: Fleet, count: int, seed: int) -> dict[str, int]:
    """Kill one node at a random moment under load, `count` times; how the answers were."""
    rng = random.Random(seed)
    seen = {"right": 0, "error": 0}
    for trial in range(count):
        victim = rng.choice(NAMES)
        jobs = [(rng.choice((40, 130, 300)), trial * 10 + i, bool(i % 2)) for i in range(4)]
        async with asyncio.TaskGroup() as tasks:
            work = {
                job: tasks.create_task(on.complete(job[0], job[1], temperature=0.5, stream=job[2]))
                for job in jobs
            }
            await asyncio.wait(work.values(), timeout=rng.uniform(0.0, 0.3))
            await on.kill(victim)
        for (length, prompt_seed, _), task in work.items():
            answer, right = task.result(), expected(length, prompt_seed, 0.5)
            if answer.is_whole:
                assert answer.text == right, (seed, trial, victim)
                seen["right"] += 1
            else:
                assert answer.code is not None, (seed, trial, victim)
                assert right.startswith(answer.text)
                seen["error"] += 1
        await on.settle([name for name in NAMES if name != victim])
        await on.restart(victim)
        await on.all_ready()
    return seen


async def test_a_node_killed_under_load_costs_nobody_an_answer(on: Fleet) -> None:
    assert await trials(on, 2, seed=1) == {"right": 8, "error": 0}


@pytest.mark.promise("Killed nodes cost no caller of a gateway an answer.")
@pytest.mark.slow
async def test_nodes_killed_at_random_moments_cost_nobody_an_answer(on: Fleet) -> None:
    before = await on.broken_attempts()
    rounds = 0
    # Until some kills have hit something; how many do depends on the machine.
    while rounds < 5 and (rounds < 2 or await on.broken_attempts() - before < 3):
        rounds += 1
        seen = await trials(on, 6, seed=rounds)
        assert seen == {"right": 24, "error": 0}  # one of two of each kind dies at a time
    assert await on.broken_attempts() - before >= 3


async def test_with_all_nodes_gone_callers_are_told_and_with_them_back_served(on: Fleet) -> None:
    for name in NAMES:
        await on.kill(name)
    answer = await on.complete(100, 1)
    assert (answer.status, answer.code) == (503, "no_nodes")
    async with asyncio.TaskGroup() as tasks:
        for name in NAMES:
            tasks.create_task(on.restart(name))
    await on.all_ready()
    assert (await on.complete(100, 1)).text == expected(100, 1, 0.0)


async def test_a_store_that_is_emptied_before_the_claim_costs_seconds_and_no_answer(
    on: Fleet,
) -> None:
    decoding = [on.nodes[name].process for name in ("decode1", "decode2")]
    started = time.monotonic()

    def tickets() -> set[Path]:
        return {
            path for path in (on.folder / "store" / "tierkv,ticket").rglob("*") if path.is_file()
        }

    before = tickets()
    for process in decoding:
        process.send_signal(signal.SIGSTOP)
    try:
        asked = asyncio.create_task(on.complete(300, 4242))
        async with asyncio.timeout(20):
            while not tickets() - before:  # noqa: ASYNC110 - other processes write them
                await asyncio.sleep(_PAUSE_S)
        for name in ("prefill1", "prefill2"):
            url = f"{on.nodes[name].url}/v1/blocks?storage=true"
            async with on.http.delete(url) as response:
                assert response.status == 200
    finally:
        for process in decoding:
            process.send_signal(signal.SIGCONT)
    answer = await asked
    assert answer.is_whole, answer.code
    assert answer.text == expected(300, 4242, 0.0)
    assert time.monotonic() - started < 40  # a claim may wait 108 s for a ticket
    await on.all_ready()
    await on.settle(NAMES)


@pytest.mark.promise("SIGTERM lets a gateway's streams end.")
async def test_sigterm_lets_streams_end_and_the_gateway_exits_with_0(on: Fleet) -> None:
    body = {
        "prompt": decode_text(text(300, 9)),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    answer = Answer(200)
    async with on.patient_gateway() as one:
        await on.all_ready(one)
        async with on.http.post(one.url + "/v1/completions", json=body) as response:
            answer.take((await response.content.readline()).decode())  # it has begun
            one.process.send_signal(signal.SIGTERM)
            async for line in response.content:
                answer.take(line.decode())
        assert answer.is_whole
        assert answer.text == expected(300, 9, 0.0)
        async with asyncio.timeout(20):
            assert await one.process.wait() == 0
    await on.settle(NAMES)
