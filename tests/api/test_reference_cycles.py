"""Requests leave no reference cycles: what they held is free when they have ended."""

from __future__ import annotations

import gc

import aiohttp

from tests.api.nodes import here


async def test_requests_and_connections_leave_no_cycles_for_the_collector() -> None:
    """Of prompts that begin the same, so that blocks are copied within the device; storage is asked
    for each, and each comes over a connection of its own."""
    words = "a prompt that others share the beginning of, "
    async with here() as on:

        async def ask(number: int) -> None:
            body = {"prompt": f"{words * 4}{number}{words}", "max_tokens": 2}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{on.client.url}/v1/generate", json=body) as response,
            ):
                assert response.status == 200

        await ask(0)  # makes what stays
        await on.settle()
        gc.collect()
        gc.disable()
        try:
            for number in range(1, 9):
                await ask(number)
            await on.settle()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(one) for one in gc.garbage if type(one).__module__.startswith("tierkv")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == set()
