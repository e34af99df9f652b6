"""A stored value of any kind under another one's name is damaged: never used, no wrong answer."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from tests.api.nodes import here
from tests.e2e.exact import truth
from tierkv.api.settings import Role
from tierkv.cache.keys import pack
from tierkv.clock import SystemClock
from tierkv.refmodel.model import encode
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import PutItem

PROMPTS = {"t": "a prompt of some words, and more " * 2, "u": "another one, of other words " * 2}
OTHER = "and a third one, which shares nothing "
NUM_TOKENS = 4
MOST_BYTES = 1 << 24
KINDS = (":0of1", ":partial:", ":tails", ":ticket:", ":open:", ":ack:", ":producer:")
REFUSED = {"damaged", "incomplete", "not_yet", "already_claimed", "other_prompt", "producer_lost"}
REFUSED |= {"storage_unavailable"}  # by a machine that does not answer within the claim's deadline


async def stored() -> dict[str, bytes]:
    """All that hand-offs of two prompts leave: blocks, tails, lists of tails, tickets, open ones,
    acknowledgements, a lease."""
    store = MemoryStore(MemorySettings(), SystemClock())
    async with here(store=store) as on:
        for ticket, prompt in PROMPTS.items():
            for name in (ticket, f"claimed-{ticket}"):
                await on.client.post("/v1/prefill", {"prompt": prompt, "ticket_id": name})
            body = {"prompt": prompt, "ticket_id": f"claimed-{ticket}"}
            assert (await on.client.post("/v1/decode", body)).status == 200
        handoff = on.node.service.handoff
        assert handoff is not None
        with handoff.tickets.lease.held():
            await handoff.tickets.lease.written()
            for ticket, prompt in PROMPTS.items():
                whole = on.node.prompt(pack(encode(prompt)), "")
                await handoff.tickets.begin(handoff.tickets.new_open(f"open-{ticket}", whole, None))
            names = [one.name for one in (await store.list("tierkv:", limit=1000)).values]
            return {name: await value_of(store, name) for name in names}


async def value_of(store: MemoryStore, name: str) -> bytes:
    value = await store.get(name, max_bytes=MOST_BYTES)
    assert value is not None
    return value


async def check(values: Mapping[str, bytes], *, deadline_s: float = 0.05) -> int:
    """How many of the two hand-offs a node over these values serves; all of its answers are
    right."""
    store = MemoryStore(MemorySettings(), SystemClock())
    async with here(Role.DECODE, store=store) as on:
        items = [PutItem(name, (value,), keep_existing=False) for name, value in values.items()]
        await store.put(items)
        num_served = 0
        for ticket in ("t", "claimed-t", "open-t"):
            body = {"prompt": PROMPTS["t"], "ticket_id": ticket, "max_tokens": NUM_TOKENS}
            answer = await on.client.post("/v1/decode", body | {"deadline_s": deadline_s})
            if answer.status == 200:
                num_served += 1
                assert tuple(answer.body["tokens"]) == TRUTH["t"]
            else:
                assert answer.body["reason"] in REFUSED
        for name, prompt in PROMPTS.items():
            answer = await on.client.post("/v1/generate", {"prompt": prompt, "max_tokens": 4})
            assert tuple(answer.body["tokens"]) == TRUTH[name]
    return num_served


TRUTH = {name: truth(list(prompt.encode()), NUM_TOKENS).tokens for name, prompt in PROMPTS.items()}


@pytest.mark.promise("A stored value under another name never makes a wrong answer.")
@pytest.mark.parametrize(
    "most", [pytest.param(12, id="some"), pytest.param(1000, id="all", marks=pytest.mark.slow)]
)
async def test_a_value_under_another_ones_name_never_makes_a_wrong_answer(most: int) -> None:
    values = await stored()
    kinds = {kind for kind in KINDS for name in values if kind in name}
    assert kinds == set(KINDS), sorted(values)
    assert await check(values, deadline_s=2.0) >= 1
    pairs = [(source, name) for source in values for name in values if source != name]
    for source, name in random.Random(1).sample(pairs, min(most, len(pairs))):
        await check({**values, name: values[source]})
