"""Each public coroutine is cancelled at each of its awaits; nothing is held afterwards.

Twice: while it waits, and in the moment in which what it waits for comes. Another request waits for
room behind it, and gets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from tests.latch import cancelled_at, until
from tests.sched.test_wake_ups import play, whole
from tests.sessions import begin_request, claim_request, publish_request, resume_request
from tests.world import GQA, World, tokens
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.cache.node import Tier
from tierkv.errors import HandoffError
from tierkv.sched.budget import Budget
from tierkv.sched.request import Request, RequestState

THROUGH = WritePolicy.WRITE_THROUGH


async def grow(here: World, mine: Request) -> None:
    await here.service.scheduler.growth.extend(mine, 44)


async def come_back(here: World, mine: Request) -> None:
    here.service.scheduler.preempt(mine)
    here.service.scheduler.end(await resume_request(here.service, mine, max_new_tokens=40))


async def share(here: World, mine: Request) -> None:
    """What another one computes, until that one goes."""
    here.service.scheduler.end(mine)
    request = await begin_request(
        here.service, "shares", here.prompt([*SHARED, 1]), max_new_tokens=0
    )
    here.service.scheduler.end(request)


async def shrink(here: World, mine: Request) -> None:
    here.service.scheduler.end(mine)
    await here.service.resize(Tier.DEVICE, 12)


async def shrink_host(here: World, mine: Request) -> None:
    def end() -> None:
        if mine.state is RequestState.RUNNING:
            here.service.scheduler.end(mine)

    asyncio.get_running_loop().call_later(0.002, end)
    await here.service.resize(Tier.HOST, 1)  # of which it holds two


async def sleep_and_wake(here: World, mine: Request) -> None:
    here.service.scheduler.end(mine)
    await here.service.sleep(keeps_blocks=True)
    await here.service.wake(16)


async def fetch(here: World, mine: Request) -> None:
    here.service.reset()
    await here.service.lookup(here.prompt(tokens(24)))
    fetched = await here.service.fetcher.fetch(here.prompt(tokens(24)), Budget(1.0))
    fetched.release()


async def admit(here: World, mine: Request) -> None:
    """From storage, and where the whole device is wanted."""
    here.service.reset()
    here.service.scheduler.end(mine)
    prompt = here.prompt([*tokens(24), *range(600, 640)])
    request = await begin_request(here.service, "r", prompt, max_new_tokens=0)
    await request.gate.all_layers(100.0)
    here.compute(request, [*tokens(24), *range(600, 640)], request.cached_tokens)
    await here.service.scheduler.commit(request, prompt.tokens)
    here.service.scheduler.end(request)


async def hand_over(here: World, mine: Request) -> None:
    """What is cached, and what is not; the claims of both, and one for which nothing comes."""
    alone = await here.computed(tokens(10, 900), name="alone", uses_cache=False)
    for request in (mine, alone):
        await publish_request(here.service, request, request.request_id, [1])
        here.service.scheduler.end(request)
        prompt = request.spec.prompt
        claimed, _ = await claim_request(
            here.service, "claims", request.request_id, prompt, max_new_tokens=2
        )
        here.service.scheduler.end(claimed)
    with suppress(HandoffError):
        prompt = mine.spec.prompt
        await claim_request(
            here.service, "c", "not there", prompt, max_new_tokens=2, deadline_s=0.02
        )


SHARED = tokens(16, 700)
WAYS = (grow, come_back, share, shrink, shrink_host, sleep_and_wake, fetch, admit, hand_over)


async def run_behind(here: World) -> None:
    """One that finds no room while the others run."""
    request = await here.admit(tokens(48, 4000), name="behind")
    await asyncio.sleep(0.001)
    here.service.scheduler.end(request)


async def end_later(here: World, request: Request) -> None:
    await asyncio.sleep(0.005)
    here.service.scheduler.end(request)


async def tidy(here: World) -> None:
    """What the way would have undone itself, if it had not been cancelled; all that run end."""
    if here.service.is_asleep:
        await here.service.wake(16)
    for request in here.service.scheduler.running_requests:
        if request.request_id != "behind":
            here.service.scheduler.end(request)


async def cancel_on_the_way(
    way: Callable[[World, Request], Awaitable[None]], here: World, at: int, *, late: bool
) -> bool:
    """Whether it has so many awaits: on a node with blocks on all tiers, where one runs, and
    another one waits for room behind it."""
    service = here.service
    service.note_prefill(1000, 10.0)
    await whole(here, tokens(24), "a")
    await whole(here, tokens(16, 100), "b")
    owner = await here.admit(SHARED, name="owner")
    mine = await here.admit(tokens(8, 800), name="mine")
    here.compute(mine, tokens(8, 800))
    await service.scheduler.commit(mine, pack(tokens(8, 800)))
    behind = asyncio.ensure_future(run_behind(here))
    await until(lambda: service.stats().waiting_requests == 1)
    goes = asyncio.ensure_future(end_later(here, owner))

    async def work() -> None:
        await way(here, mine)

    was_reached = await cancelled_at(at, work(), late=late)
    await goes
    assert service.verify() == []
    await tidy(here)
    if mine.state is RequestState.PREEMPTED:
        service.scheduler.abandon(mine)
    async with asyncio.timeout(5.0):
        await behind
    assert service.scheduler.computing.num_promises == 0
    await whole(here, tokens(24), "a")  # every byte that is found is compared
    num_blocks = service.stats().device.capacity
    await whole(here, tokens(num_blocks * GQA.block_size, 5000), "all of the device")
    return was_reached


@pytest.mark.promise("A cancel at any await of the scheduler leaves nothing behind.")
@pytest.mark.parametrize("late", [False, True], ids=["while it waits", "as it wakes"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_cancel_at_any_await_leaves_nothing_behind_and_takes_no_wake_up_from_others(
    way: Callable[[World, Request], Awaitable[None]], late: bool
) -> None:
    def once(at: int) -> bool:
        reached: list[bool] = []

        async def scene(here: World) -> None:
            reached.append(await cancel_on_the_way(way, here, at, late=late))

        play(scene, host_write=THROUGH, storage_write=THROUGH)
        return reached[0]

    at = 0
    while once(at):
        at += 1
        assert at < 100, "this coroutine never ends"
    assert at > 0, "it waits somewhere"
