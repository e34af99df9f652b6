"""Two faults at a time, drawn at random, under nodes, a gateway, a store and an `EngineCache`.

A round draws two faults, runs hand-offs and completions while both last, ends both faults and then
checks every promise that a fault must not break: no wrong token or byte, no request beyond its
deadline, no service that ended itself, all blocks and leases back.

`TIERKV_FAULTS_S` sets the seconds that a trial lasts, `TIERKV_FAULTS_SEED` its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
import redis.asyncio

from tests.clocks import ProcessClocks
from tests.e2e.exact import fresh_connections, text, truth
from tests.e2e.test_gateway import NAMES, Nodes
from tests.embed.driver import Driver
from tests.embed.test_groups import MODELS, hybrid
from tests.redis_proxy import Proxy, proxy_on_a_thread
from tests.redis_server import RedisServer, redis_server
from tierkv.embed import EngineCacheSettings
from tierkv.engine import Sampling
from tierkv.refmodel.model import decode as decode_text

log = logging.getLogger(__name__)

NUM_TOKENS = 12
NUM_PROMPTS = 24
DEADLINE_S = 10.0  # of a claim
WRONG_CLOCK_S = 660.0  # more than a ticket lives
SLACK_S = 20.0  # processes that share two cores compute, are frozen for 2 s and start again
CONFIG = """
[cache]
block_size = 16
device_blocks = 512
host_blocks = 768
storage_write = "write_through"
"""
REASONS = {
    "not_yet", "expired", "incomplete", "producer_lost", "producer_failed", "storage_unavailable",
    "already_claimed", "load_failed", "no_nodes", "node_failed", "paused", "cancelled",
}  # fmt: skip
Change = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong until `end` is awaited.

    Attributes:
        victim: the node that has no duties while the fault lasts.
        turn: when the fault ends: a frozen node (0) thaws before others ask it for something (1),
            and a killed node (2), which needs its store, is started last.
    """

    name: str
    begin: Change
    end: Change
    victim: str | None = None
    turn: int = 1


def sets(change: Callable[[Any], object], faulty: object, well: object) -> tuple[Change, Change]:
    """A fault that sets something to `faulty`, and its end, which sets it to `well`."""

    async def begin() -> None:
        change(faulty)

    async def end() -> None:
        change(well)

    return begin, end


FREEZE = (signal.SIGSTOP, signal.SIGCONT)


@functools.cache
def expected(seed: int, temperature: float) -> str:
    sampling = Sampling(temperature=temperature, seed=seed)
    return decode_text(truth(prompt_tokens(seed), NUM_TOKENS, sampling).tokens)


def prompt_tokens(seed: int) -> Any:
    """Prompts of 40 to 900 tokens; every third one continues another one."""
    length = 40 + 37 * seed % 860
    return text(length, seed - seed % 3 if seed % 3 == 1 else seed)


class RedisThatFails:
    """A redis-server behind a proxy, and what can go wrong with either."""

    def __init__(self, server: RedisServer, proxy: Proxy) -> None:
        self._server = server
        self._proxy = proxy
        self._popen = server.popen

    @property
    def url(self) -> str:
        return self._proxy.url

    def faults(self) -> list[Fault]:
        command, proxied, configured = self._command, self._proxied, self._configured
        signalled = sets(self._popen.send_signal, *FREEZE)
        return [
            Fault("redis is frozen", *signalled),
            Fault("redis is killed and empty", self._kill, partial(asyncio.to_thread, self._start)),
            Fault("redis is flushed", command("FLUSHALL"), _nothing),
            Fault("subscribers are cut off", command("CLIENT", "KILL", "TYPE", "pubsub"), _nothing),
            Fault("callers are cut off", command("CLIENT", "KILL", "TYPE", "normal"), _nothing),
            Fault("answers 250 ms late", *proxied("delay_s", 0.25)),
            Fault("answers 500 ms late", *proxied("delay_s", 0.5)),
            Fault("answers at 200 KB/s", *proxied("bytes_per_s", 200_000.0)),
            Fault("answers are cut", *proxied("cut_after", 3_000)),
            Fault("redis is full", *configured("maxmemory", "1mb", "0")),
            Fault("no large values", *configured("client-query-buffer-limit", "1mb", "1gb")),
            Fault("values are damaged", self._damage, _nothing),
        ]

    async def _kill(self) -> None:
        self._popen.kill()
        await asyncio.to_thread(self._popen.wait)

    def _start(self) -> None:
        if self._popen.poll() is not None:
            self._popen = subprocess.Popen(self._server.popen.args, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                self._server.execute("PING")
            except redis.RedisError:
                assert time.monotonic() < deadline, "redis-server does not start again"
                time.sleep(0.05)
            else:
                return

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def _proxied(self, name: str, faulty: float) -> tuple[Change, Change]:
        return sets(partial(setattr, self._proxy, name), faulty, getattr(self._proxy, name))

    def _configured(self, name: str, faulty: str, well: str) -> tuple[Change, Change]:
        return (
            self._command("CONFIG", "SET", name, faulty),
            self._command("CONFIG", "SET", name, well),
        )

    def _command(self, *words: str) -> Change:
        async def run() -> None:
            # The other fault may have stopped the server.
            with contextlib.suppress(redis.RedisError, OSError, TimeoutError):
                async with asyncio.timeout(2), redis.asyncio.Redis(port=self._server.port) as one:
                    await one.execute_command(*words)  # type: ignore[no-untyped-call]

        return run

    async def _damage(self) -> None:
        """Flip a byte near the end of some values."""
        script = (
            "for i = 1, 20 do local k = redis.call('RANDOMKEY') if k and "
            "redis.call('TYPE', k).ok == 'string' then local n = redis.call('STRLEN', k) "
            "if n > 400 then redis.call('SETRANGE', k, n - 100, '\\1\\2\\3') end end end"
        )
        await self._command("EVAL", script, "0")()


class DirectoryThatFails:
    """A directory as a store: values vanish, are cut, are damaged; on a small disk room ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rng = random.Random(0)

    @property
    def url(self) -> str:
        return f"file://{self._folder / 'store'}"

    def faults(self) -> list[Fault]:
        def on_some(change: Callable[[Path], None], share: float = 0.2) -> Change:
            async def begin() -> None:
                await asyncio.to_thread(self._on_some, change, share)

            return begin

        faults = [
            Fault("some files are deleted", on_some(Path.unlink), _nothing),
            Fault("files are cut", on_some(_halve), _nothing),
            Fault("files are damaged", on_some(_damage), _nothing),
            Fault("all files are deleted", on_some(Path.unlink, 1.0), _nothing),
        ]
        if os.path.ismount(self._folder):
            faults.append(Fault("the disk is full", self._fill, self._drain))
        return faults

    async def _fill(self) -> None:
        def fill() -> None:
            free = shutil.disk_usage(self._folder).free
            with contextlib.suppress(OSError), (self._folder / "filler").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free)

        await asyncio.to_thread(fill)

    async def _drain(self) -> None:
        (self._folder / "filler").unlink(missing_ok=True)

    def _on_some(self, change: Callable[[Path], None], share: float) -> None:
        for file in sorted(self._folder.glob("store/**/*")):
            if self._rng.random() < share and file.is_file() and file.stat().st_size > 400:
                with contextlib.suppress(OSError):
                    change(file)


def _halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _damage(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 100)
        opened.write(b"\1\2\3")


async def _nothing() -> None:
    """A fault of one moment needs no end."""


class Site(Nodes):
    """Two prefill and two decode nodes over one store, a gateway, and what can go wrong."""

    def __init__(
        self, store: RedisThatFails | DirectoryThatFails, folder: Path, http: aiohttp.ClientSession
    ) -> None:
        super().__init__(folder, http, store.url, CONFIG)
        self.store = store
        self.clocks = ProcessClocks(folder / "clocks")
        self._dead: set[str] = set()
        self.seen: Counter[str] = Counter()

    def faults(self) -> list[Fault]:
        found = self.store.faults()
        for name in NAMES:
            found += [
                Fault(f"{name} is killed", *self._killed(name), victim=name, turn=2),
                Fault(f"{name} is frozen", *self._frozen(name), victim=name, turn=0),
                Fault(f"{name} forgets all blocks", self._deletes(name, storage=False), _nothing),
                Fault(f"{name} deletes storage too", self._deletes(name, storage=True), _nothing),
                Fault(f"{name} loses its storage", *self._detached(name)),
                Fault(f"{name}'s clock is ahead", *self._shifted(name, WRONG_CLOCK_S)),
                Fault(f"{name}'s clock is behind", *self._shifted(name, -WRONG_CLOCK_S)),
            ]
        return found

    def _killed(self, name: str) -> tuple[Change, Change]:
        async def kill() -> None:
            self._dead.add(name)
            await self.kill(name)

        async def restart() -> None:
            for attempt in range(5):  # a supervisor starts a node again whose store was late
                try:
                    await self.restart(name)
                    break
                except AssertionError:
                    if attempt == 4:
                        raise
            self._dead.discard(name)

        return kill, restart

    def _frozen(self, name: str) -> tuple[Change, Change]:
        return sets(self.nodes[name].process.send_signal, *FREEZE)

    def _shifted(self, name: str, ahead_s: float) -> tuple[Change, Change]:
        return sets(partial(self.clocks.shift, name), ahead_s, 0.0)

    def _deletes(self, name: str, *, storage: bool) -> Change:
        async def delete() -> None:
            query = "?storage=true" if storage else ""
            await self._ask("DELETE", name, f"/v1/blocks{query}")

        return delete

    def _detached(self, name: str) -> tuple[Change, Change]:
        async def detach() -> None:
            await self._ask("DELETE", name, "/v1/tiers/storage")

        async def attach() -> None:
            await self._ask("PUT", name, "/v1/tiers/storage", {"url": self.store.url})

        return detach, attach

    async def _ask(
        self, method: str, name: str, path: str, body: dict[str, Any] | None = None
    ) -> None:
        """Ask as an operator does, who gives up where the other fault is in the way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(8):
                await self._call(method, name, path, body)

    # What is asked of the site while faults last

    async def complete(self, rng: random.Random) -> None:
        """A completion through the gateway: whole and right, or an error, and in time."""
        seed, temperature = rng.randrange(NUM_PROMPTS), rng.choice((0.0, 0.8))
        body = {
            "prompt": decode_text(prompt_tokens(seed)), "max_tokens": NUM_TOKENS, "seed": seed,
            "temperature": temperature, "stream": rng.random() < 0.5,
        }  # fmt: skip
        right = expected(seed, temperature)
        if rng.random() < 0.15:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(rng.uniform(0.01, 0.5)):
                    await self.completion(body)
            self.seen["given up by the caller"] += 1
            return
        answer = await self.completion(body)
        if answer.is_whole:
            assert answer.text == right, (seed, temperature, answer.text, right)
            self.seen["completed"] += 1
        else:
            assert answer.code is not None, (seed, temperature, answer.status)
            assert right.startswith(answer.text)
            self.seen[f"completion refused: {answer.code}"] += 1

    async def hand_over(self, rng: random.Random, ticket: str) -> None:
        """Prefill on one node and decode on another at once: right tokens, or a reason, in time."""
        seed = rng.randrange(NUM_PROMPTS)
        prefill, decode = rng.choice(NAMES[:2]), rng.choice(NAMES[2:])
        body: dict[str, Any] = {
            "prompt": decode_text(prompt_tokens(seed)), "ticket_id": ticket, "seed": seed,
            "temperature": 0.0,
        }  # fmt: skip
        asked = body | {
            "max_tokens": NUM_TOKENS, "deadline_s": DEADLINE_S,
            "policy": rng.choice(("recompute", "whole")),
        }  # fmt: skip
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            claim = group.create_task(self._call("POST", decode, "/v1/decode", asked))
            group.create_task(self._call("POST", prefill, "/v1/prefill", body))
        took_s = time.monotonic() - started
        assert took_s < DEADLINE_S + SLACK_S, f"a hand-off took {took_s:.1f} s: {asked}"
        if (answered := claim.result()) is None:
            self.seen["hand-off: the node died"] += 1
            return
        status, answer = answered
        if status == 200:
            assert decode_text(answer["tokens"]) == expected(seed, 0.0), (seed, answer)
            self.seen["handed over"] += 1
        else:
            assert status in (409, 410, 502, 503), answer
            assert answer.get("code") != "shutting_down" or decode in self._dead, answer
            self.seen[f"hand-off refused: {answer.get('reason') or answer.get('code')}"] += 1

    async def _call(
        self, method: str, name: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]] | None:
        """Status and answer of the node; None where a fault keeps it from one."""
        try:
            async with self.http.request(
                method, self.nodes[name].url + path, json=body
            ) as response:
                return response.status, await response.json(content_type=None)
        except (aiohttp.ClientError, ValueError):
            return None

    # What holds when the faults are over

    async def settle(self) -> None:
        """All nodes live and are ready, have no request left, and find nothing wrong."""
        for name in NAMES:
            process = self.nodes[name].process
            assert process.returncode is None, f"{name} ended itself: {process.returncode}"
        async with asyncio.timeout(60):
            for name in NAMES:
                while True:
                    stats = await self._get(name, "/v1/stats")
                    if stats is not None and not stats["running_requests"]:
                        break
                    await asyncio.sleep(0.1)
        for name in NAMES:
            verified = await self._get(name, "/v1/verify")
            assert verified is not None, f"{name} does not answer"
            assert verified["findings"] == [], (name, verified)
            assert await self._get(name, "/readyz") is not None, f"{name} is not ready"

    async def _get(self, name: str, path: str) -> dict[str, Any] | None:
        status, answer = await self._call("GET", name, path) or (None, None)
        return answer if status == 200 else None


@asynccontextmanager
async def site(store: RedisThatFails | DirectoryThatFails, folder: Path) -> AsyncIterator[Site]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S * 2 + SLACK_S)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=fresh_connections(), timeout=timeout)
        )
        one = Site(store, folder, http)
        stack.enter_context(one.clocks.used())
        stack.push_async_callback(one.end)
        await one.start_all()
        one.gateway = await stack.enter_async_context(one.another_gateway())
        await one.settle()
        yield one


@dataclass
class EngineAside:
    """An `EngineCache` in a thread of its own, driven at random over the same store."""

    url: str
    seed: int
    failure: BaseException | None = None
    num_steps: int = 0
    loaded_tokens: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error

    def _run(self) -> None:
        groups = MODELS[sorted(MODELS)[self.seed % len(MODELS)]]
        settings = EngineCacheSettings(save_blocks=4)
        with hybrid(groups, self.url, host_bytes=8 << 10, options=settings) as on:
            driver = Driver(on, random.Random(self.seed))
            while not self.is_over.is_set():
                driver.step(comes=True)
            driver.finish()
            found = on.findings()
            assert found == [], found
        self.num_steps, self.loaded_tokens = driver.num_steps, driver.loaded_tokens


@contextmanager
def engine_aside(url: str, seed: int) -> Iterator[EngineAside]:
    engine = EngineAside(url, seed)
    thread = threading.Thread(target=engine.run, name="engine")
    thread.start()
    try:
        yield engine
    finally:
        engine.is_over.set()
        thread.join()
    if engine.failure is not None:
        raise engine.failure


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A folder with room of its own, where this user may mount one."""
    folder.mkdir()
    mount = shutil.which("mount")
    mounted = mount is not None and os.geteuid() == 0 and not subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(folder)],
        check=False, capture_output=True,
    ).returncode  # fmt: skip
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


async def rounds(on: Site, seconds: float, seed: int) -> Counter[str]:
    """Run rounds of two faults until the time is over; return how often each was drawn."""
    rng, drawn = random.Random(seed), Counter[str]()
    give_up_at, count = time.monotonic() + seconds, 0
    while time.monotonic() < give_up_at or count < 2:
        count += 1
        faults = rng.sample(on.faults(), 2)
        while faults[0].victim is not None and faults[0].victim == faults[1].victim:
            faults = rng.sample(on.faults(), 2)
        names = [fault.name for fault in faults]
        drawn.update(names)
        log.info("round %d: %s", count, " + ".join(names))
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(3):
                    tasks.create_task(on.complete(random.Random(rng.random())))
                    ticket = f"{seed}-{count}-{index}"
                    tasks.create_task(on.hand_over(random.Random(rng.random()), ticket))
                await asyncio.sleep(rng.uniform(0, 0.3))
                await faults[0].begin()
                await asyncio.sleep(rng.uniform(0, 0.5))
                await faults[1].begin()
                tasks.create_task(on.complete(random.Random(rng.random())))
                await asyncio.sleep(rng.uniform(0.2, 2.5))
                for fault in sorted(rng.sample(faults, 2), key=lambda one: one.turn):
                    await fault.end()
            await on.settle()
        except BaseException as error:
            error.add_note(f"seed {seed}, round {count}: {' + '.join(names)}")
            raise
    return drawn


def trial_seconds(default_s: float) -> float:
    return float(os.environ.get("TIERKV_FAULTS_S", default_s))


LONG = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("seconds", [pytest.param(180.0, id="short", marks=LONG)])
@pytest.mark.parametrize("kind", ["redis", "file"])
async def test_two_faults_at_a_time_break_no_promise(
    kind: str, seconds: float, tmp_path: Path
) -> None:
    seed = int(os.environ.get("TIERKV_FAULTS_SEED", "1"))
    log.warning("seed %d", seed)  # shown with whatever fails, the start and the engine included
    with ExitStack() as stack:
        store: RedisThatFails | DirectoryThatFails
        if kind == "redis":
            server = stack.enter_context(redis_server())
            proxy = stack.enter_context(proxy_on_a_thread(server.port))
            store = RedisThatFails(server, proxy)
            stack.callback(store.end)
        else:
            store = DirectoryThatFails(stack.enter_context(small_disk(tmp_path / "disk")))
        async with site(store, tmp_path) as on:
            engine = await asyncio.to_thread(
                lambda: stack.enter_context(engine_aside(store.url, seed))
            )
            drawn = await rounds(on, trial_seconds(seconds), seed)
            await asyncio.to_thread(stack.close)
    log.warning(
        "%d rounds, faults %s; answers %s; the engine took %d steps and loaded %d tokens",
        sum(drawn.values()) // 2, dict(drawn), dict(on.seen), engine.num_steps,
        engine.loaded_tokens,
    )  # fmt: skip
    assert on.seen["completed"] > 0
    assert on.seen["handed over"] > 0
    assert engine.num_steps > 0
