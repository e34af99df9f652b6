"""Every producer hands every claimer its prompt byte for byte, the tail included."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.latch import finish, turns
from tests.pd.nodes import BLOCK, pair, publish
from tests.pd.test_streaming import prefilling
from tests.sessions import claim_request
from tests.world import World, tokens
from tierkv.sched.request import Request

FIRST_TOKENS = (42, 43)
LENGTHS = [1, 4, 5, 21, 40, 200]

Produce = Callable[[World, list[int]], Awaitable[object]]


async def at_once(node: World, prompt: list[int]) -> None:
    """Publish the prompt when it is computed."""
    await publish(node, prompt, "t")


async def while_computing(node: World, prompt: list[int]) -> None:
    """Publish blocks while the prompt is computed, seven tokens at a time."""
    async with prefilling(node, prompt, "t") as here:
        for at in range(0, len(prompt), 7):
            await here.compute(min(at + 7, len(prompt)))
            await turns(3)
        here.stream.finish(FIRST_TOKENS)


async def with_a_stored_prefix(node: World, prompt: list[int]) -> None:
    """Publish a prompt whose first half is in storage."""
    await publish(node, prompt[: -(-len(prompt) // 2)], "the first half")
    await publish(node, prompt, "t")


PRODUCERS: list[Produce] = [at_once, while_computing, with_a_stored_prefix]


async def claimed_first(node: World, prompt: list[int], producing: Awaitable[object]) -> Request:
    """Claim before the producer begins."""
    claiming = asyncio.create_task(claim_of(node, prompt))
    await turns(3)
    await producing
    return await finish(claiming)


async def claimed_after(node: World, prompt: list[int], producing: Awaitable[object]) -> Request:
    """Claim when the producer has ended."""
    await producing
    return await finish(claim_of(node, prompt))


async def claimed_beside_a_prefix(
    node: World, prompt: list[int], producing: Awaitable[object]
) -> Request:
    """Claim on a node that has the first half on its device."""
    await node.run(prompt[: len(prompt) // 2] or prompt)
    await producing
    return await finish(claim_of(node, prompt))


CLAIMERS = [claimed_first, claimed_after, claimed_beside_a_prefix]


async def claim_of(node: World, prompt: list[int]) -> Request:
    request, ticket = await claim_request(
        node.service, "claim", "t", node.prompt(prompt), max_new_tokens=3
    )
    await request.gate.all_layers(100.0)
    assert ticket is not None
    assert ticket.first_tokens == FIRST_TOKENS
    return request


@pytest.mark.promise("A published prompt is claimed byte for byte, tail included.")
@pytest.mark.promise("A claim that comes first waits for its ticket.")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("claim", CLAIMERS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("produce", PRODUCERS, ids=lambda produce: produce.__name__)
async def test_a_prompt_is_handed_over_byte_for_byte(
    produce: Produce,
    claim: Callable[[World, list[int], Awaitable[object]], Awaitable[Request]],
    length: int,
) -> None:
    prompt = tokens(length)
    async with pair(device_blocks=64, host_blocks=64) as (prefill, decode):
        request = await claim(decode, prompt, produce(prefill, prompt))
        assert request.cached_tokens == length  # not one token is left to compute
        decode.check_kv(request, prompt, length)
        if tail := length % BLOCK:
            for plane, array in zip(
                decode.layout.planes, decode.service.planes.arrays, strict=True
            ):
                block = array[request.block_table[length // BLOCK]]
                assert not block[tail * (plane.token_bytes or 0) :].any(), "others' tokens"
        await decode.ended(request)
