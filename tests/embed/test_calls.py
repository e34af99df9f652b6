"""Asking never blocks; every call gets exactly one answer; what has finished is picked up once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.embed.engine import (
    ALL,
    BLOCK,
    PROMPT,
    Engine,
    done,
    engine,
    engine_that_loads,
    until,
)
from tests.latch import PATIENCE_S, finish
from tierkv.cache.keys import pack
from tierkv.embed import AbortedError, Answer, Call, EmbedSettings, QueueFullError, Until
from tierkv.embed.exchange import Exchange
from tierkv.errors import (
    BadRequestError,
    DuplicateRequestError,
    GateTimeoutError,
    HandoffError,
    OwnershipError,
    RequestTooLargeError,
    TierKVError,
)
from tierkv.gpu.protocol import Direction
from tierkv.service import Service


def test_a_call_is_to_be_asked_again_until_its_blocks_have_arrived() -> None:
    with engine_that_loads() as here:
        call = here.cache.admit("third", PROMPT, max_new_tokens=1)
        until(lambda: here.latch.num_held > 0)
        assert call.answer is Answer.ASK_AGAIN
        assert call not in here.cache.poll()
        with pytest.raises(GateTimeoutError):
            call.result()
        here.latch.release()
        assert here.cache.wait(PATIENCE_S)
        assert here.cache.poll() == [call]
        assert call.is_done
        found = call.result()
        assert found.cached_tokens == 17
        here.check(found, PROMPT, 17)
        here.cache.end("third").wait(PATIENCE_S)


def test_an_engine_may_take_its_blocks_before_they_have_arrived_and_wait_layer_by_layer() -> None:
    with engine_that_loads() as here:
        call = here.cache.admit("third", PROMPT, max_new_tokens=1, until=Until.ADMITTED)
        found = call.wait(PATIENCE_S)
        assert not found.gate.is_open(0)
        here.latch.release()
        stream = here.cache.service.device.compute_stream
        for layer in range(found.gate.num_layers):
            found.gate.wait_on(stream, layer, PATIENCE_S)
        here.check(found, PROMPT, 17)
        here.cache.end("third").wait(PATIENCE_S)


def test_poll_returns_each_finished_call_once_and_none_that_was_taken() -> None:
    with engine() as here:
        calls = [here.cache.lookup(PROMPT) for _ in range(10)]
        calls[3].wait(PATIENCE_S)
        seen: list[Call[object]] = []

        def poll() -> bool:
            seen.extend(here.cache.poll())
            return len(seen) == 9

        until(poll)
        assert [call.number for call in seen] == [c.number for c in calls if c is not calls[3]]
        assert here.cache.poll() == []
        assert here.cache.calls.num_open == 0
        assert not here.cache.wait(0.01)


def test_more_calls_than_may_be_open_are_refused_until_some_are_taken() -> None:
    with engine(settings=EmbedSettings(max_calls=3)) as here:
        for call in [here.cache.lookup(PROMPT) for _ in range(3)]:
            done(call)
        refused = here.cache.lookup(PROMPT)
        assert refused.answer is Answer.REFUSED
        assert isinstance(refused.error, QueueFullError)
        assert len(here.cache.poll()) == 3
        assert here.cache.lookup(PROMPT).wait(PATIENCE_S).num_tokens == len(PROMPT)


def test_calls_that_are_held_wake_nobody_until_they_are_flushed_or_waited_for() -> None:
    woken: list[str] = []
    exchange = Exchange(9, lambda: woken.append("woken"))
    exchange.holds = True
    first = exchange.submit("first", "", lambda: None)
    exchange.cancel(first)
    assert woken == []
    exchange.flush()
    assert woken == ["woken"]
    while exchange.pop_work() or exchange.pop_cancel() is not None:
        pass
    exchange.flush()
    assert woken == ["woken"], "there is nothing to do"
    exchange.cancel(first)
    exchange.flush()
    assert woken == ["woken"] * 2, "a cancellation alone is sent too"
    with pytest.raises(GateTimeoutError):
        exchange.submit("second", "", lambda: None).wait(0.0)
    assert woken == ["woken"] * 3
    with engine() as here:
        here.cache.calls.holds = True
        held = here.cache.stats()
        assert here.cache.verify().wait(PATIENCE_S) == []
        until(lambda: held.is_done)


def test_calls_about_a_request_run_in_the_order_they_were_made(tmp_path: Path) -> None:
    with engine(store=f"file://{tmp_path}/store") as here:
        here.cache.admit("one", PROMPT, max_new_tokens=4).wait(PATIENCE_S)
        found = here.cache.extend("one", 10).wait(PATIENCE_S)
        here.compute(found, PROMPT)
        here.latch.hold(Direction.OFFLOAD)
        calls: list[Call[Any]] = [
            here.cache.commit("one", PROMPT),
            here.cache.publish("one", "ticket", [7]),
            here.cache.end("one"),
            here.cache.commit("one", PROMPT),
        ]
        until(lambda: here.latch.num_held > 0)
        time.sleep(0.02)
        assert not any(call.is_done for call in calls[1:]), "the publish reads the blocks"
        here.latch.release()
        answers = [done(call).answer for call in calls]
        assert answers == [Answer.READY, Answer.READY, Answer.READY, Answer.REFUSED]
        assert isinstance(calls[3].error, OwnershipError)
        claimed = here.cache.claim("two", "ticket", PROMPT, max_new_tokens=2).wait(PATIENCE_S)
        assert claimed.ticket is not None
        assert claimed.ticket.first_tokens == (7,)
        here.check(claimed, PROMPT, len(PROMPT))
        here.cache.end("two").wait(PATIENCE_S)
        assert here.findings() == []


def test_what_is_wrong_with_a_request_is_said_by_its_own_call_alone() -> None:
    with engine() as here:
        here.cache.admit("one", PROMPT, max_new_tokens=4).wait(PATIENCE_S)
        wrong: list[tuple[Call[Any], type[TierKVError]]] = [
            (here.cache.admit("one", PROMPT, max_new_tokens=4), DuplicateRequestError),
            (here.cache.admit("two", PROMPT, max_new_tokens=4000), RequestTooLargeError),
            (here.cache.admit("two", b"123", max_new_tokens=0), BadRequestError),
            (here.cache.commit("one", [*PROMPT[:-1], 99]), BadRequestError),
            (here.cache.end("nobody"), OwnershipError),
        ]
        for refused, kind in wrong:
            assert isinstance(done(refused).error, kind)
        here.cache.end("one").wait(PATIENCE_S)
        assert not here.cache.abort("one").wait(PATIENCE_S)


@pytest.mark.promise("An engine's calls do not wait for a busy event loop.")
def test_asking_and_polling_do_not_wait_for_a_loop_that_is_busy() -> None:
    held, release = threading.Event(), threading.Event()

    async def busy(_: Service) -> None:
        held.set()
        release.wait(PATIENCE_S)

    tokens = pack(PROMPT)
    with engine() as here:
        here.cache.run("busy", busy)
        assert held.wait(PATIENCE_S)
        started, worked = time.perf_counter(), time.thread_time()
        calls = [here.cache.lookup(tokens) for _ in range(200)]
        polled = [here.cache.poll() for _ in range(200)]
        took_s, worked_s = time.perf_counter() - started, time.thread_time() - worked
        assert not any(polled)
        assert not any(call.is_done for call in calls)
        release.set()
        for call in calls:
            call.wait(PATIENCE_S)
    assert took_s < PATIENCE_S / 2, "it waited until the loop was free"
    assert worked_s < 0.2, "400 calls, 0.5 ms each at the very most"


def test_a_call_that_waits_for_blocks_can_be_cancelled_and_leaves_nothing() -> None:
    with engine(device_blocks=8) as here:
        here.cache.admit("one", ALL, max_new_tokens=0).wait(PATIENCE_S)
        waiting = here.cache.admit("two", PROMPT, max_new_tokens=0)
        until(lambda: here.cache.stats().wait(PATIENCE_S).waiting_requests == 1)
        waiting.cancel()
        assert isinstance(done(waiting).error, AbortedError)
        assert isinstance(done(here.cache.end("two")).error, OwnershipError)
        here.cache.end("one").wait(PATIENCE_S)
        here.run("two", PROMPT)
        assert here.findings() == []


def test_of_requests_that_wait_the_one_of_the_highest_priority_is_admitted_first() -> None:
    with engine(device_blocks=8) as here:
        here.cache.admit("all", ALL, max_new_tokens=0).wait(PATIENCE_S)
        low, high = (
            here.cache.admit(name, ALL, max_new_tokens=0, priority=priority)
            for name, priority in (("low", 0), ("high", 1))
        )
        here.cache.end("all")
        high.wait(PATIENCE_S)
        assert not low.is_done
        here.cache.end("high")
        low.wait(PATIENCE_S)
        here.cache.end("low").wait(PATIENCE_S)


def test_an_abort_ends_a_request_whatever_it_is_doing() -> None:
    with engine_that_loads() as here:
        loading = here.cache.admit("third", PROMPT, max_new_tokens=1)
        until(lambda: here.latch.num_held > 0)
        later = here.cache.commit("third", PROMPT)
        aborted = here.cache.abort("third")
        assert isinstance(done(loading).error, AbortedError)
        assert isinstance(done(later).error, AbortedError | OwnershipError)
        assert done(aborted).result() is True
        here.latch.release()
        here.run("fourth", PROMPT)
        assert here.findings() == []


async def test_an_engine_with_a_loop_of_its_own_can_await_a_call() -> None:
    opened = engine()
    here = await asyncio.to_thread(opened.__enter__)
    try:
        calls = [here.cache.lookup(pack(PROMPT)) for _ in range(5)]
        for call in calls:
            assert (await finish(call.finished())).num_tokens == len(PROMPT)
        assert (await finish(calls[0].finished())).num_tokens == len(PROMPT)
        missing = here.cache.end("nobody")
        with pytest.raises(OwnershipError):
            await finish(missing.finished())
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)


def test_block_tables_are_snapshots_that_cannot_be_written() -> None:
    with engine() as here:
        found = here.cache.admit("one", PROMPT, max_new_tokens=0).wait(PATIENCE_S)
        assert len(found.block_table) == -(-len(PROMPT) // BLOCK)
        with pytest.raises(ValueError, match="read-only"):
            found.block_table[0] = 1
        here.cache.end("one").wait(PATIENCE_S)


def test_an_argument_of_the_wrong_kind_is_refused_where_it_is_given_and_stops_nothing() -> None:
    with engine() as here:
        cache: Any = here.cache
        cache.admit("one", PROMPT, max_new_tokens=4).wait(PATIENCE_S)

        def claim(ticket: object = "t", **more: object) -> Call[Any]:
            return cast("Call[Any]", cache.claim("two", ticket, PROMPT, max_new_tokens=1, **more))

        wrong: list[Callable[[], Call[Any]]] = [
            lambda: cache.admit("two", PROMPT, max_new_tokens=None),
            lambda: cache.admit("two", PROMPT, max_new_tokens=1.5),
            lambda: cache.admit("two", PROMPT, max_new_tokens=-1),
            lambda: cache.admit("two", PROMPT, max_new_tokens=1, priority="high"),
            lambda: cache.admit("two", PROMPT, max_new_tokens=1, until="loaded"),
            lambda: cache.admit(["two"], PROMPT, max_new_tokens=1),
            lambda: cache.admit("two", None, max_new_tokens=1),
            lambda: cache.admit("two", "text", max_new_tokens=1),
            lambda: cache.lookup(12),
            lambda: claim(policy="whole"),
            lambda: claim(deadline_s="soon"),
            lambda: claim(deadline_s=float("nan")),
            lambda: cache.commit("one", PROMPT, after=None),
            lambda: cache.commit("one", PROMPT, after=[1]),
            lambda: cache.extend("one", "more"),
            lambda: cache.extend("one", -3),
            lambda: cache.recover(None),
            lambda: cache.preempt("one", after=7),
            lambda: cache.resume("one", max_new_tokens=None),
            lambda: cache.end("one", after=object()),
            lambda: cache.abort({}),
        ]
        firsts = (7, ["seven"], [-1], [2**31], [2**70], [1.5])
        wrong += [partial(cache.publish, "one", "ticket", first) for first in firsts]
        for sampling in (7, {"seed": 5}, {5: "seed"}, {"seed": "\ud800"}):
            wrong.append(partial(cache.publish, "one", "ticket", [7], sampling=sampling))
            wrong.append(partial(claim, sampling=sampling))
        for name in (5, "\ud800", "a\udfff"):
            wrong.append(partial(cache.publish, "one", name, [7]))
            wrong.append(partial(claim, name))
        for ask in wrong:
            with pytest.raises(BadRequestError):
                ask()
        assert here.cache.calls.num_open == 0
        here.cache.end("one").wait(PATIENCE_S)
        here.run("two", PROMPT, cast("int", np.int64(1)))
        assert here.findings() == []


# What an embedding engine's ticket says, and whose it is.


LONG = list(range(30))


HOW = {"temperature": "0.7", "seed": "5"}


def publish(here: Engine, tokens: list[int], first: Any, **options: Any) -> Any:
    """The finished call of a request of its own."""
    found = here.cache.admit("one", tokens, max_new_tokens=0).wait(PATIENCE_S)
    here.compute(found, tokens, found.cached_tokens)
    here.cache.commit("one", tokens)
    call = done(here.cache.publish("one", "ticket", first, **options))
    here.cache.end("one").wait(PATIENCE_S)
    return call


def test_tokens_that_were_sampled_in_another_way_are_refused_by_field(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with engine(store=store) as prefill, engine(store=store) as decode:
        assert publish(prefill, LONG, np.array([7, 8]), sampling=HOW).error is None

        def claim(sampling: dict[str, str] | None) -> Any:
            call = decode.cache.claim("c", "ticket", LONG, max_new_tokens=1, sampling=sampling)
            return done(call)

        refused = claim(HOW | {"seed": "6"})
        assert isinstance(refused.error, HandoffError)
        assert refused.error.reason == "incompatible"
        assert "seed" in str(refused.error)
        assert "temperature" not in str(refused.error)
        for ours in (HOW, None):
            found = claim(ours).result()
            assert (found.ticket.first_tokens, found.ticket.sampling) == ((7, 8), HOW)
            decode.check(found, LONG, len(LONG))
            decode.cache.end("c").wait(PATIENCE_S)
        assert prefill.findings() == decode.findings() == []


def test_another_prompt_cannot_take_a_ticket_that_waits_to_be_claimed(tmp_path: Path) -> None:
    with engine(store=f"file://{tmp_path}/store") as here:
        assert publish(here, LONG, [7]).error is None
        refused = publish(here, [*LONG, 99], [7])
        assert isinstance(refused.error, DuplicateRequestError)
        assert publish(here, LONG, [7]).error is None
        assert here.findings() == []
