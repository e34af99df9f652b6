"""Each public coroutine is cancelled at each of its awaits; nothing is held afterwards.

Twice: while it waits, and in the moment in which what it waits for comes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.latch import cancelled_at, finish, until
from tests.sessions import begin_request, claim_request, publish_request
from tests.world import World, background_tasks, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.clock import SystemClock
from tierkv.sched.request import Request
from tierkv.storage.memory import MemorySettings, MemoryStore

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]  # three blocks and a tail of two


@dataclass
class Stage:
    """A node on which one coroutine is about to be cancelled."""

    here: World
    running: list[Request] = field(default_factory=list)


@asynccontextmanager
async def stage(*, published: bool) -> AsyncIterator[Stage]:
    """A node beside another one that has computed PROMPT, and published it if asked for."""
    store = MemoryStore(MemorySettings(), SystemClock())
    settings: dict[str, Any] = {
        "host_write": WritePolicy.WRITE_THROUGH,
        "storage_write": WritePolicy.WRITE_THROUGH,
    }
    async with world(store=store, **settings) as other:
        if published:
            request = await other.admit(PROMPT)
            await other.prefill(request, PROMPT)
            await finish(publish_request(other.service, request, "ticket", [42]))
            await other.ended(request)
    async with world(store=store, device_blocks=6, host_blocks=8, **settings) as here:
        yield Stage(here)


Work = Callable[[Stage], Awaitable[object]]


async def admit(on: Stage) -> None:
    here = on.here
    request = await begin_request(here.service, "r", here.prompt(PROMPT), max_new_tokens=2)
    here.service.scheduler.end(request)


async def admit_after_another(on: Stage) -> None:
    """The device is full of cached blocks of others, the host nearly: room must be made."""
    here = on.here
    request = await begin_request(
        here.service, "r", here.prompt([*PROMPT, *PROMPT[:8]]), max_new_tokens=0
    )
    here.service.scheduler.end(request)


async def gate(on: Stage) -> None:
    await on.running[0].gate.all_layers(100.0)


async def commit(on: Stage) -> None:
    on.here.compute(on.running[0], PROMPT, on.running[0].cached_tokens)
    await on.here.service.scheduler.commit(on.running[0], pack(PROMPT))


async def publish(on: Stage) -> None:
    await publish_request(on.here.service, on.running[0], "mine", [1])


async def claim(on: Stage) -> None:
    here = on.here
    request, _ = await claim_request(
        here.service, "c", "ticket", here.prompt(PROMPT), max_new_tokens=2
    )
    here.service.scheduler.end(request)


async def claim_later(on: Stage) -> None:
    here = on.here
    with suppress(Exception):
        await claim_request(
            here.service, "c", "not there", here.prompt(PROMPT), max_new_tokens=2, deadline_s=0.02
        )


async def lookup(on: Stage) -> None:
    await on.here.service.lookup(on.here.prompt(PROMPT))


async def sleep(on: Stage) -> None:
    await on.here.service.sleep()


async def nothing(on: Stage) -> None:
    pass


async def fill(on: Stage) -> None:
    await on.here.run([7] * 24)


async def admitted(on: Stage) -> None:
    on.running.append(await on.here.admit(PROMPT))


async def prefilled(on: Stage) -> None:
    await admitted(on)
    await on.here.prefill(on.running[0], PROMPT)


async def prefilled_without_cache(on: Stage) -> None:
    on.running.append(await on.here.admit(PROMPT, uses_cache=False))
    await on.here.prefill(on.running[0], PROMPT)


CASES: dict[str, tuple[bool, Work, Work]] = {
    "admit, cold": (False, nothing, admit),
    "admit, from storage": (True, nothing, admit),
    "admit, full node": (True, fill, admit_after_another),
    "gate": (True, admitted, gate),
    "commit": (True, admitted, commit),
    "publish": (False, prefilled, publish),
    "publish, without cache": (False, prefilled_without_cache, publish),
    "claim": (True, nothing, claim),
    "claim, full node": (True, fill, claim),
    "claim, no ticket": (True, nothing, claim_later),
    "lookup": (True, nothing, lookup),
    "sleep": (False, fill, sleep),
}


@pytest.mark.promise("A cancel at any await of the scheduler leaves nothing behind.")
@pytest.mark.parametrize("late", [False, True], ids=["while it waits", "as it wakes"])
@pytest.mark.parametrize("case", CASES)
async def test_a_cancel_at_any_await_leaves_nothing_behind(case: str, late: bool) -> None:
    published, prepare, work = CASES[case]
    before = background_tasks()
    at, was_reached = 0, True
    while was_reached:
        async with stage(published=published) as on:
            await finish(prepare(on))
            was_reached = await cancelled_at(at, finish_cancelled(work, on), late=late)
            assert on.here.service.verify() == [], f"right after the cancel at await {at}"
            for request in on.here.service.scheduler.running_requests:
                on.here.service.scheduler.end(request)
            await on.here.settle()
            assert on.here.service.stats().waiting_requests == 0
            if on.here.service.is_asleep:
                await finish(on.here.service.wake())
            # All of the device can be had again: nothing is held by anybody.
            all_of_it = await on.here.admit([9] * 24, uses_cache=False)
            on.here.service.scheduler.end(all_of_it)
            await on.here.settle()
            if published:
                again, _ = await finish(
                    claim_request(
                        on.here.service, "again", "ticket", on.here.prompt(PROMPT), max_new_tokens=0
                    )
                )
                await finish(again.gate.all_layers(100.0))
                on.here.check_kv(again, PROMPT, len(PROMPT))
                on.here.service.scheduler.end(again)
        at += 1
        assert at < 200, "this coroutine never ends"
    await until(lambda: background_tasks() == before, "no task left over")
    assert at > 1 or case in {"gate", "commit"}


async def finish_cancelled(work: Work, on: Stage) -> None:
    await work(on)
