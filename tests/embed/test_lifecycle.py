"""An embedded service opens, fails, closes, forks and exits without anybody hanging on it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.embed.engine import (
    ALL,
    PROMPT,
    done,
    engine,
    engine_that_loads,
    until,
)
from tests.latch import PATIENCE_S
from tests.world import fingerprint
from tierkv.cache.eviction import WritePolicy
from tierkv.embed import (
    Answer,
    CloseTimeoutError,
    Embedded,
    EmbedSettings,
    ServiceFailedError,
)
from tierkv.errors import ConfigError, DeviceFailedError, ShuttingDownError, StoreUnavailableError
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service

ROOT = Path(__file__).parents[2]


async def _explode(_: Service) -> None:
    raise RuntimeError("nobody expected this")


async def _explode_in_a_task(service: Service) -> None:
    service.tiers.work.start(_explode(service), "broken")


@pytest.mark.promise("An error in an embedded loop reaches every call.")
@pytest.mark.parametrize("work", [_explode, _explode_in_a_task])
def test_an_error_in_the_loop_reaches_every_pending_and_every_later_call(
    work: Callable[[Service], Awaitable[None]],
) -> None:
    with engine(device_blocks=8) as here:
        here.cache.admit("one", ALL, max_new_tokens=0).wait(PATIENCE_S)
        waiting = [here.cache.admit(f"w{i}", PROMPT, max_new_tokens=0) for i in range(5)]
        here.cache.run("explode", work)
        for call in waiting:
            assert isinstance(done(call).error, ServiceFailedError)
        until(lambda: here.cache.lookup(PROMPT).answer is Answer.REFUSED)
        assert isinstance(here.cache.lookup(PROMPT).error, ServiceFailedError)
        assert not here.cache.is_open
        with pytest.raises(ServiceFailedError, match="nobody expected this") as failed:
            here.cache.close()
        assert isinstance(failed.value.__cause__, RuntimeError)
        here.cache.close()  # who closes again has been told


def test_a_service_that_fails_while_it_copies_keeps_no_caller_until_the_copy_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierkv.embed.thread._UNWIND_S", 0.05)
    with engine_that_loads() as here:
        here.cache.admit("one", PROMPT, max_new_tokens=4)
        until(lambda: here.latch.num_held > 0)
        waiting = here.cache.run("wait", lambda _: asyncio.Event().wait())
        here.cache.run("explode", _explode_in_a_task)
        assert isinstance(done(waiting).error, ServiceFailedError)
        assert here.latch.num_held == 1
        here.latch.release()
        with pytest.raises(ServiceFailedError, match="nobody expected this"):
            here.cache.close()


def test_what_keeps_a_service_from_opening_is_raised_by_open() -> None:
    def no_room() -> Service:
        settings = CacheSettings(block_size=4, device_blocks=1 << 50, host_blocks=1)
        return Service(CpuDevice(), fingerprint(), settings, HandoffSettings(), None)

    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match="do not fit into memory"):
        Embedded(no_room).open()
    with pytest.raises(StoreUnavailableError), engine(store="redis://127.0.0.1:1/0"):
        pass
    until(lambda: set(threading.enumerate()) <= threads)


def test_closing_ends_in_order_whatever_is_under_way() -> None:
    with engine_that_loads(EmbedSettings(grace_s=0.05)) as here:
        loading = here.cache.admit("one", PROMPT, max_new_tokens=4)
        until(lambda: here.latch.num_held > 0)
        waiting = here.cache.admit("two", ALL, max_new_tokens=0)
        closer = threading.Thread(target=here.cache.close)
        closer.start()
        assert isinstance(done(waiting).error, ShuttingDownError)
        assert isinstance(done(loading).error, ShuttingDownError)
        assert isinstance(here.cache.lookup(PROMPT).error, ShuttingDownError)
        closer.join(0.1)
        assert closer.is_alive(), "a copy is under way"
        here.latch.release()
        closer.join(PATIENCE_S)
        assert not closer.is_alive()


def test_closing_has_a_deadline_and_goes_on_behind_it() -> None:
    with engine_that_loads() as here:
        here.cache.admit("one", PROMPT, max_new_tokens=4)
        until(lambda: here.latch.num_held > 0)
        started = time.monotonic()
        with pytest.raises(CloseTimeoutError):
            here.cache.close(0.1)
        assert time.monotonic() - started < 5
        here.latch.release()
        here.cache.close(PATIENCE_S)


def test_any_number_of_threads_may_close_and_requests_left_open_are_ended() -> None:
    with engine() as here:
        here.cache.admit("left", PROMPT, max_new_tokens=4).wait(PATIENCE_S)
        with ThreadPoolExecutor(4) as threads:
            for closing in [threads.submit(here.cache.close) for _ in range(4)]:
                closing.result(PATIENCE_S)
        assert here.cache.run("late", _explode).answer is Answer.REFUSED


def test_a_service_closed_from_its_own_thread_does_not_wait_for_itself() -> None:
    with engine() as here:

        async def close(_: Service) -> str:
            here.cache.close()
            return "asked"

        assert here.cache.run("close", close).wait(PATIENCE_S) == "asked"


def test_a_lost_device_fails_what_waits_and_lets_requests_end() -> None:
    device = CpuDevice()
    settings = CacheSettings(block_size=4, device_blocks=8, host_blocks=8)

    def build() -> Service:
        return Service(device, fingerprint(), settings, HandoffSettings(), None)

    with Embedded(build) as cache:
        cache.admit("one", ALL, max_new_tokens=0).wait(PATIENCE_S)
        waiting = cache.admit("two", PROMPT, max_new_tokens=0)
        device.failure = "rank 1 has left"
        for call in (waiting, cache.lookup(PROMPT), cache.commit("one", ALL)):
            error = done(call).error
            assert isinstance(error, DeviceFailedError)
            assert str(error) == "rank 1 has left"
        cache.end("one").wait(PATIENCE_S)
        assert cache.verify().wait(PATIENCE_S) == []


def test_nothing_is_left_after_a_close() -> None:
    def once() -> None:
        with engine(host_write=WritePolicy.WRITE_THROUGH) as here:
            here.run("one", PROMPT)

    once()  # what is opened once for the whole process
    threads, files = _threads(), _files()
    for _ in range(5):
        once()
    until(lambda: _threads() <= threads, "the threads' end")
    assert _files() <= files


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _script(body: str) -> subprocess.CompletedProcess[str]:
    start = """
import os, sys
from tests.world import fingerprint
from tierkv.cache.eviction import WritePolicy
from tierkv.embed import *
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
class Told(CpuDevice):
    def close(self):
        super().close()
        print("device closed", flush=True)
def build():
    settings = CacheSettings(block_size=4, device_blocks=8, host_blocks=8,
                             host_write=WritePolicy.WRITE_THROUGH)
    return Service(Told(), fingerprint(), settings, HandoffSettings(), None)
cache = Embedded(build)
cache.open()
tokens = list(range(18))
"""
    return subprocess.run(
        [sys.executable, "-c", start + body],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_exits_without_closing_closes_in_order(code: int) -> None:
    ended = _script(f"""
cache.admit("one", tokens, max_new_tokens=4).wait(20)
cache.commit("one", tokens).wait(20)
cache.end("one").wait(20)  # copies to the host begin
cache.admit("left", tokens, max_new_tokens=4)
raise SystemExit({code})
""")
    assert (ended.returncode, ended.stdout) == (code, "device closed\n"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on() -> None:
    ended = _script("""
cache.admit("one", list(range(5000, 5032)), max_new_tokens=0).wait(20)
pending = cache.admit("two", tokens, max_new_tokens=0)
child = os.fork()
if child == 0:
    refused = [cache.lookup(tokens), pending]
    good = all(isinstance(call.error, ForkedError) for call in refused)
    good = good and cache.poll() == [] and not cache.is_open and not cache.wait(0.01)
    cache.close()
    own = Embedded(build)  # a child may have a service of its own
    own.open()
    good = good and own.lookup(tokens).wait(20).num_tokens == 18
    own.close()
    sys.exit(0 if good else 1)
_, status = os.waitpid(child, 0)
cache.end("one").wait(20)
pending.wait(20)
cache.end("two").wait(20)
print("child", os.waitstatus_to_exitcode(status), cache.verify().wait(20))
cache.close()
""")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "device closed\nchild 0 []\ndevice closed\n", ended.stderr
