"""What is waited for is paid for; what is forgotten, fetched or loaded meanwhile stays right."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish, turns, until
from tests.sched.test_events import everything
from tests.sched.test_fetch import filled
from tests.sched.test_loads import with_host_copies
from tests.simulated import simulate, simulated, simulated_world
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.gpu.protocol import Direction
from tierkv.sched import lifecycle
from tierkv.sched.events import CacheEventKind

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH
COMPUTE_S = 1.0


async def second_waits(here: World, *, owner_takes_s: float) -> bool:
    """Whether a request waits for one that computes the same and ends without having done so."""
    before = here.service.stats().requests.shared_waits
    owner = await here.admit(tokens(40))
    second = asyncio.ensure_future(here.admit(tokens(40)))
    await asyncio.sleep(owner_takes_s)
    here.service.scheduler.end(owner)
    here.service.scheduler.end(await second)
    return here.service.stats().requests.shared_waits > before


@pytest.mark.parametrize("owner_takes_s", [0.01, 2.0])
def test_of_a_wait_in_vain_its_own_length_counts(owner_takes_s: float) -> None:
    """Short ones cost little, so that after each only twice as many chances pass by."""

    async def scene() -> list[bool]:
        async with simulated_world(device_blocks=64, host_write=NONE) as here:
            here.service.note_prefill(40, COMPUTE_S)
            await asyncio.sleep(1000.0)
            return [await second_waits(here, owner_takes_s=owner_takes_s) for _ in range(7)]

    is_short = owner_takes_s < COMPUTE_S
    assert simulate(scene()) == [True, False, True, False, False, False, is_short]


@simulated
async def test_what_came_whole_is_not_late_for_another_prompts_tail_that_was_looked_for() -> None:
    rules = {"host_write": THROUGH, "storage_write": THROUGH}
    async with simulated_world(device_blocks=64, **rules) as here:
        await here.run(tokens(16))
        here.service.reset()
        here.service.note_prefill(40, COMPUTE_S)
        found: list[str] = []

        async def never(name: str, *, max_bytes: int) -> bytes | None:
            found.append(name)
            await asyncio.sleep(1000.0 + max_bytes)
            raise AssertionError("nobody waits for so long")

        here.the_store.get = never  # type: ignore[method-assign]
        request = await here.admit([*tokens(16), 77])
        assert request.matched.storage_tokens == 16
        assert [name.endswith(":tails") for name in found] == [True]
        assert here.service.stats().decisions.recompute_late == 0
        await here.ended(request)


async def test_runs_that_go_while_others_are_forgotten_in_slices_are_let_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_SLICE", 1)
    async with world(device_blocks=64, host_blocks=64, host_write=THROUGH) as here:
        for number in range(6):
            await here.run(tokens(16, 100 * number))
            await here.run([*tokens(8, 100 * number), *tokens(8, 1000)])  # cuts it in two
        forgetting = asyncio.ensure_future(here.service.forget())
        await turns(3)
        assert not forgetting.done()
        here.service.reset()
        for number in range(6):
            await here.run([*tokens(4, 100 * number), *tokens(8, 2000)])
        await forgetting
        assert here.service.verify() == []
        here.service.reset()
        stats = here.service.stats()
        assert stats.device.used == stats.host.used == 0


async def test_the_block_that_is_matched_in_part_stays_until_it_has_been_copied() -> None:
    async with with_host_copies(tokens(18)) as here:
        here.latch.hold(Direction.LOAD)
        request = await here.admit([*tokens(14), 900])
        await here.latch.until_held()
        here.service.reset()
        assert here.service.stats().host.used == 4, "three blocks, and the one shared in part"
        here.latch.release()
        await finish(request.gate.all_layers(100.0))
        here.check_kv(request, tokens(14), 14)
        await here.ended(request)
        here.service.reset()
        assert here.service.stats().host.used == 0


async def test_a_tail_that_a_fetch_finds_on_its_way_from_the_device_is_not_told_to_be_there() -> (
    None
):
    prompt = tokens(18)
    async with world(store=await filled(prompt), host_write=THROUGH) as here:
        with here.service.events.subscribe() as events:
            here.the_store.hold()
            fetching = asyncio.ensure_future(here.admit(prompt))
            await here.the_store.until_held(1)
            here.latch.hold(Direction.OFFLOAD)
            computes = await here.admit(prompt, uses_cache=False)
            await here.prefill(computes, prompt)
            here.service.scheduler.end(computes)
            await until(lambda: here.service.stats().host.used == 5, "copies on their way")
            here.latch.fail_next(Direction.OFFLOAD, 2)
            here.the_store.release()
            fetched = await finish(fetching)
            here.latch.release()
            await here.ended(fetched)
            told = [
                one.tier for one in await everything(events) if one.kind is CacheEventKind.STORED
            ]
        assert here.service.stats().host.used == 0, "the copies that were begun have failed"
        assert set(told) == {"device", "storage"}  # where the fetch found it
