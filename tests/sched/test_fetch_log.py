"""A fetch that ends early is told where somebody should look at the store, and not where it was
given up because computing is faster."""

from __future__ import annotations

import logging

import pytest

from tests.latch import finish
from tests.sessions import begin_request
from tests.world import world
from tierkv.cache.eviction import WritePolicy
from tierkv.sched.worth import FetchPolicy

TOKENS = list(range(40))


@pytest.mark.parametrize(("seconds_per_token", "is_told"), [(0.007, False), (100.0, True)])
async def test_only_a_store_that_is_late_is_warned_of(
    caplog: pytest.LogCaptureFixture,
    seconds_per_token: float,
    is_told: bool,
) -> None:
    caplog.set_level(logging.DEBUG, "tierkv.sched.fetch")
    async with world(
        with_store=True,
        storage_write=WritePolicy.WRITE_THROUGH,
        fetch_policy=FetchPolicy.BEST_EFFORT,
        fetch_deadline_s=1.0,
    ) as here:
        await here.run(TOKENS)
        here.service.reset()
        here.service.note_prefill(1000, 1000 * seconds_per_token)
        here.the_store.hold()
        request = await finish(
            begin_request(here.service, "late", here.prompt(TOKENS), max_new_tokens=1)
        )
        assert request.cached_tokens == 0
        here.the_store.release()
        await here.ended(request)
    [record] = [r for r in caplog.records if "ended early" in r.message]
    assert (record.levelno == logging.WARNING) == is_told
