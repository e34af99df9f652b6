"""A service that ends recounts, and says in words what somebody has kept."""

from __future__ import annotations

import pytest

from tests.latch import finish
from tests.sched.test_fetch import filled
from tests.world import world
from tierkv.errors import InvariantError
from tierkv.sched.budget import Budget


def tokens(count: int) -> list[int]:
    return list(range(count))


@pytest.mark.promise("A service that ends reports each leaked lease and slot.")
async def test_a_lease_that_nobody_released_is_told_of_at_the_end() -> None:
    async def leak() -> None:
        async with world() as here:
            await here.run(tokens(16))
            match = here.service.index.match(here.prompt(tokens(16)))
            here.service.index.hold(match.node, match.num_blocks)

    with pytest.raises(InvariantError, match="1 leases are held"):
        await leak()


@pytest.mark.promise("A service that ends reports each leaked lease and slot.")
async def test_slots_that_nobody_gave_back_are_told_of_at_the_end() -> None:
    with pytest.raises(InvariantError, match="taken but has no owner"):
        async with world() as here:
            here.service.scheduler.acquire_device(here.prompt(tokens(16)), 2)


async def test_what_was_fetched_and_never_released_is_told_of_at_the_end() -> None:
    with pytest.raises(InvariantError, match="1 fetched prompts were never released"):
        async with world(store=await filled(tokens(18))) as here:
            await finish(here.service.fetcher.fetch(here.prompt(tokens(18)), Budget(100.0)))


async def test_pins_are_no_leak_at_the_end() -> None:
    async with world() as here:
        await here.run(tokens(16))
        here.service.pin("hard", here.prompt(tokens(16)), 1000.0)
        here.service.pin("soft", here.prompt(tokens(16)), 1000.0, is_soft=True)
    assert not here.service.unpin("hard")
    assert not here.service.unpin("soft")
