"""The tokens of one prompt, as they come from nodes: what counts, what is dropped, who goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tierkv.cache.keys import pack
from tierkv.gateway.gateway import Backend
from tierkv.gateway.nodes import BackendNode
from tierkv.gateway.prompts import Job
from tierkv.gateway.relay import Delivery
from tierkv.gateway.settings import GatewaySection, GatewaySettings

MAX_TOKENS = 4


def delivery() -> tuple[Delivery, BackendNode, BackendNode]:
    backend = Backend(GatewaySettings(gateway=GatewaySection(both=("http://a", "http://b"))))
    for node in backend.nodes.all:
        node.mark_ready()
    job = Job(
        request_id="r",
        prompt=pack([1, 2]),
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        top_k=0,
        seed=1,
    )
    first, second = backend.nodes.all
    return Delivery(job, backend), first, second


def event(*tokens: int, text: str = "") -> Any:
    """The tokens of an event, each with its number as text."""
    return SimpleNamespace(tokens=list(tokens), pieces=[str(token) for token in tokens], text=text)


async def test_more_tokens_than_were_asked_for_are_dropped() -> None:
    of, node, _ = delivery()
    assert of.accept(node, 0, event(5, 6, 7)) == 3
    of.accept(node, 3, event(8, 9, 10))
    assert of.tokens == [5, 6, 7, 8]
    assert list(await of.news(0)) == ["5", "6", "7", "8"]
    assert of.is_done


async def test_text_that_was_held_back_counts_only_behind_the_last_token() -> None:
    of, node, other = delivery()
    of.accept(node, 0, event(5, 6))
    of.accept(node, 2, event(text="?"))
    assert of.rest() == "?"
    of.accept(other, 2, event(7))
    assert of.rest() == ""
