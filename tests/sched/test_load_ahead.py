"""Blocks come to the device before the request that wants them; it is nobody's request that moves
them."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish, turns, until
from tests.sched.test_loads import LOAD, with_host_copies
from tests.world import tokens
from tierkv.errors import TransferError


async def test_it_counts_as_no_request_and_takes_no_name() -> None:
    async with with_host_copies(tokens(16)) as here:
        before = here.service.stats().requests
        admitted, prompt_tokens = before.admitted_requests, before.prompt_tokens
        here.latch.hold(LOAD)
        loading = asyncio.ensure_future(here.service.scheduler.load_ahead(here.prompt(tokens(16))))
        await here.latch.until_held()
        assert not here.service.scheduler.running_requests
        here.latch.release()
        await finish(loading)
        match = here.service.index.match(here.prompt(tokens(16)))
        assert match.device_blocks == 4
        stats = here.service.stats().requests
        assert (stats.admitted_requests, stats.prompt_tokens) == (admitted, prompt_tokens)
        await here.run(tokens(16))
        await here.settle()


async def test_a_request_finds_a_load_that_is_on_its_way_and_shares_it() -> None:
    async with with_host_copies(tokens(16)) as here:
        here.latch.hold(LOAD)
        loading = asyncio.ensure_future(here.service.scheduler.load_ahead(here.prompt(tokens(16))))
        await here.latch.until_held()
        request = await here.admit(tokens(17))
        loading.cancel()
        here.latch.release()
        await here.prefill(request, tokens(17))  # checks every byte
        here.service.scheduler.end(request)
        assert here.service.stats().loaded_bytes == 4 * here.layout.block_bytes
        await here.settle()


async def test_nothing_is_loaded_while_somebody_waits_for_room() -> None:
    async with with_host_copies(tokens(16)) as here:
        busy = await here.admit(tokens(12, 900))
        waits = asyncio.ensure_future(here.admit(tokens(32, 700)))
        await until(lambda: here.service.scheduler.num_waiting == 1)
        await finish(here.service.scheduler.load_ahead(here.prompt(tokens(16))))
        await turns(3)
        assert here.latch.count(LOAD) == 0
        here.service.scheduler.end(busy)
        here.service.scheduler.end(await finish(waits))
        await here.settle()


async def test_nothing_is_loaded_where_what_others_hold_leaves_no_room() -> None:
    async with with_host_copies(tokens(16)) as here:
        busy = await here.admit(tokens(20, 900))
        await finish(here.service.scheduler.load_ahead(here.prompt(tokens(16))))
        assert here.latch.count(LOAD) == 0
        await here.ended(busy)


async def test_a_load_that_fails_leaves_the_blocks_on_the_host_and_the_slots_free() -> None:
    async with with_host_copies(tokens(16)) as here:
        here.latch.fail_next(LOAD)
        with pytest.raises(TransferError):
            await finish(here.service.scheduler.load_ahead(here.prompt(tokens(16))))
        await here.settle()
        match = here.service.index.match(here.prompt(tokens(16)))
        assert (match.device_blocks, match.host_blocks) == (0, 4)
        await here.run(tokens(32, 800))  # all of the device
