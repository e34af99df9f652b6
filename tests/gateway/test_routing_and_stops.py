"""The parts that need no network: stop texts, memory of prefixes, choice of nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.api.settings import Role
from tierkv.cache.keys import pack
from tierkv.client import AsyncClient
from tierkv.errors import ConfigError
from tierkv.gateway.calls import NodeCalls, _Probe
from tierkv.gateway.failures import AttemptError
from tierkv.gateway.nodes import BackendNode, Nodes, NodeState, usable
from tierkv.gateway.routing import PrefixMemory, choose_decode
from tierkv.gateway.settings import GatewaySection, HealthSection, urls_of
from tierkv.tokenizers import StopFinder

HEALTH = HealthSection(eject_s=1.0, max_eject_s=8.0)
FEW_LETTERS = st.text("ab\n", max_size=30)


def node(url: str = "http://n", role: Role = Role.BOTH) -> BackendNode:
    """One that is ready."""
    one = BackendNode(url, role, HEALTH)
    one.mark_ready()
    return one


# Stop texts


def first_stop(text: str, stops: list[str]) -> str:
    """What is left of `text` before the stop text that is complete first."""
    ends = [(text.index(s) + len(s), -len(s)) for s in stops if s in text]
    if not ends:
        return text
    end, length = min(ends)
    return text[: end + length]


@given(FEW_LETTERS, st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4), st.data())
def test_a_stop_text_is_found_however_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    finder, shown, rest = StopFinder(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += finder.feed(rest[:size])
        assert first_stop(text, stops).startswith(shown)  # nothing has to be taken back
        rest = rest[size:]
    assert shown + finder.rest() == first_stop(text, stops)
    assert finder.has_stopped == any(stop in text for stop in stops)


def test_text_that_cannot_become_a_stop_is_shown_at_once() -> None:
    finder = StopFinder(["xyz"])
    assert finder.feed("abx") == "ab"
    assert finder.feed("y") == ""
    assert finder.feed("a") == "xya"


# Memory of prefixes


@given(st.integers(0, 400), st.integers(0, 400))
def test_what_is_remembered_is_the_common_prefix_in_whole_chunks(one: int, two: int) -> None:
    memory = PrefixMemory()
    memory.remember(pack(range(one)), "a", 0)
    asked = pack([*range(min(one, two)), *([7] * 100)])
    found = memory.matched(asked, {"a": 0, "b": 0})
    assert found["b"] == 0
    assert min(one, two) // 64 * 64 <= found["a"] <= one // 64 * 64


def test_what_a_node_held_before_it_died_is_forgotten() -> None:
    memory = PrefixMemory()
    tokens = pack(range(200))
    memory.remember(tokens, "a", 0)
    assert memory.matched(tokens, {"a": 0}) == {"a": 192}
    assert memory.matched(tokens, {"a": 1}) == {"a": 0}


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = PrefixMemory(max_chunks=4)
    for start in (0, 1000):
        memory.remember(pack(range(start, start + 256)), "a", 0)
    assert memory.matched(pack(range(256)), {"a": 0}) == {"a": 0}
    assert memory.matched(pack(range(1000, 1256)), {"a": 0}) == {"a": 256}


# Choice


def test_the_less_busy_node_decodes_and_of_equal_ones_that_with_the_prefix() -> None:
    first, second = node("a"), node("b")
    assert choose_decode([first, second], {"b": 64}) is second
    with second.working(10):
        assert choose_decode([first, second], {"b": 64}) is first
    first.outstanding_tokens = 1
    assert choose_decode([first, second], {"a": 64}) is second


# Standing


def test_a_node_that_fails_is_left_alone_longer_each_time() -> None:
    one, now, waits = node(), 0.0, []
    for _ in range(6):
        one.note_failure(now)
        start = now
        while one.state(now) is NodeState.EJECTED:
            now += 0.5
        waits.append(now - start)
    assert waits == [1, 2, 4, 8, 8, 8]
    one.note_success()
    one.note_failure(now)
    assert one.state(now + 1) is NodeState.READY


def test_failures_at_the_same_time_are_one_death() -> None:
    one = node()
    for _ in range(10):
        one.note_failure(0.0)
    assert one.state(1.0) is NodeState.READY


def test_a_good_probe_ends_the_ejection_and_begins_a_new_life() -> None:
    one = node()
    one.note_failure(0.0)
    assert (one.state(0.5), one.num_recoveries) == (NodeState.EJECTED, 0)
    one.mark_ready()
    assert (one.state(0.5), one.num_recoveries) == (NodeState.READY, 1)


def test_those_that_failed_are_tried_when_nobody_else_is_left_and_draining_ones_never() -> None:
    ready, failed, draining = node("a"), node("b"), node("c")
    failed.note_failure(0.0)
    draining.mark_unready()
    everybody = [ready, failed, draining]
    assert usable(everybody, 0.1) == [ready]
    assert usable(everybody, 0.1, avoid=[ready]) == [failed]
    assert usable(everybody, 0.1, avoid=[ready, failed]) == []


# Settings


def test_nodes_are_named_by_urls_in_a_list_or_one_text() -> None:
    expected = ("http://a:1", "https://b")
    assert urls_of("http://a:1/, https://b") == urls_of(("http://a:1", "https://b/")) == expected
    assert urls_of("unix:/run/a.sock") == ("unix:/run/a.sock",)
    for wrong in ("a:1", "ftp://a", "unix:relative"):
        with pytest.raises(ConfigError, match="not the URL"):
            urls_of(wrong)


@pytest.mark.parametrize("url", ["http://user:s3cret@a", "user:s3cret@a", "redis://:s3cret@a:1"])
def test_a_password_in_a_nodes_url_is_refused_and_not_repeated(url: str) -> None:
    for ask in (urls_of, AsyncClient):
        with pytest.raises(ConfigError, match="must not contain a user or password") as refused:
            ask(url)
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "section",
    [
        GatewaySection(),
        GatewaySection(prefill="http://a", decode="http://a"),
        GatewaySection(both=("http://a", "http://a/")),
    ],
)
def test_no_nodes_or_one_twice_is_a_wrong_setting(section: GatewaySection) -> None:
    with pytest.raises(ConfigError):
        Nodes(section, HEALTH)


async def test_waits_end_after_unanswered_probes_in_a_row_and_not_before() -> None:
    health = HealthSection(probe_timeout_s=0.001, gone_after_probes=2)
    nodes = Nodes(GatewaySection(both="http://n"), health)
    [one] = nodes.all
    identity, trouble = AsyncMock(return_value=(None, "")), AsyncMock(return_value="")
    no_answer = AttemptError("no answer")
    calls = SimpleNamespace(identity=identity, trouble=trouble)
    probe = _Probe(one, nodes, cast("NodeCalls", calls), health)

    async def wait() -> None:
        async with one.within(60.0):
            for identity.side_effect in (no_answer, None, no_answer, no_answer):
                await asyncio.sleep(0.002)  # a wait that was ended raises here
                await probe.once()
            await asyncio.sleep(10.0)

    with pytest.raises(TimeoutError):
        await wait()
    assert one.num_failures == 2
