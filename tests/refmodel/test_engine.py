"""The engine over a real service: failed loads, cancels at every await, publishes that go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from tests.e2e.exact import BLOCK_SIZE, ExactNode, exact_node, text, truth
from tests.faulty import FaultyStore
from tests.latch import EVERY, CopyLatch, cancelled_at, turns, until
from tierkv.cache.keys import Names, pack
from tierkv.clock import SystemClock
from tierkv.engine import GenerateRequest
from tierkv.errors import (
    BadRequestError,
    HandoffError,
    RequestTooLargeError,
    ShuttingDownError,
    TransferError,
)
from tierkv.gpu.cpu import CallerStream, CpuDevice
from tierkv.gpu.protocol import Direction, Event
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.tickets import MAX_TICKET_BYTES, Ticket
from tierkv.service.session import Session
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import PutItem

PROMPT = text(3 * BLOCK_SIZE + 5)
NEW = 6


class WatchedStream(CallerStream):
    """A compute stream that tells whether the compute thread waits on it."""

    is_waiting = False

    def wait(self, event: Event, timeout_s: float) -> None:
        self.is_waiting = True
        super().wait(event, timeout_s)
        self.is_waiting = False


@dataclass
class Bench:
    """A node with its latches, and what must be true of it when nothing runs."""

    node: ExactNode
    latch: CopyLatch
    store: FaultyStore
    stream: WatchedStream

    async def settle(self) -> None:
        service = self.node.service
        await until(lambda: service.tiers.work.num_tasks == 0, "an idle node")
        assert service.stats().running_requests == 0
        assert service.verify() == []

    async def push_to_host(self, prompt: Sequence[int]) -> None:
        """Other prompts, until nothing of `prompt` is on the device."""
        for seed in range(100, 200):
            await self.node.generate(text(20 * BLOCK_SIZE, seed), 1)
            if (await self.node.where(prompt))[0] == 0:
                return
        pytest.fail("the prompt stayed on the device")

    async def prefilled(self, prompt: Sequence[int], ticket_id: str = "ticket") -> None:
        await self.node.engine.prefill(self.node.job(prompt, 1), ticket_id)


@asynccontextmanager
async def bench(store: MemoryStore | None = None, **settings: int) -> AsyncIterator[Bench]:
    latch = CopyLatch()
    faulty = FaultyStore(store or MemoryStore(MemorySettings(), SystemClock()))
    device = CpuDevice(before_copy=latch)
    device.compute_stream = stream = WatchedStream()
    async with exact_node(faulty, device=device, **{"device_blocks": 24, **settings}) as node:  # type: ignore[arg-type]
        try:
            yield Bench(node, latch, faulty, stream)
        finally:
            latch.release()
            faulty.release()


def memory() -> MemoryStore:
    """A store that outlives a node, for one node after the other."""
    return MemoryStore(MemorySettings(), SystemClock())


async def test_a_result_tells_what_it_took() -> None:
    async with bench() as on:
        result = await on.node.generate(PROMPT, NEW)
        assert result.prompt_tokens == result.computed_tokens == len(PROMPT)
        assert result.load_problem is None
        assert 0 <= result.queue_s <= result.first_token_s <= result.total_s
        assert result.text == bytes(result.tokens).decode()
        stats = on.node.engine.stats
        assert (stats.generated_tokens, stats.computed_tokens) == (NEW, len(PROMPT) + NEW - 1)


async def test_without_the_cache_nothing_is_used_and_nothing_stays() -> None:
    async with bench() as on:
        job = GenerateRequest("alone", pack(PROMPT), NEW, uses_cache=False)
        assert (await on.node.engine.generate(job)).tokens == truth(PROMPT, NEW).tokens
        assert await on.node.where(PROMPT) == (0, 0)
        await on.node.generate(PROMPT, NEW)
        again = await on.node.engine.generate(job)
        assert again.matched.total_tokens == 0
        assert again.tokens == truth(PROMPT, NEW).tokens


@pytest.mark.parametrize("length", [1, BLOCK_SIZE, 3 * BLOCK_SIZE + 5])
async def test_a_failed_load_is_computed_and_told(length: int) -> None:
    prompt = PROMPT[:length]
    async with bench() as on:
        await on.node.generate([*prompt, *text(BLOCK_SIZE, 77)], 1)
        await on.push_to_host([*prompt, *text(BLOCK_SIZE, 77)])
        on.latch.fail_next(Direction.LOAD)
        result = await on.node.generate([*prompt, *text(BLOCK_SIZE, 77)], NEW)
        assert result.load_problem is not None
        assert "load failed" in result.load_problem
        assert result.matched.total_tokens == 0
        assert result.tokens == truth([*prompt, *text(BLOCK_SIZE, 77)], NEW).tokens
        assert on.node.engine.stats.failed_loads == 1
        await on.settle()


async def test_an_answer_that_starts_again_keeps_nothing_of_the_tokens_that_it_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit, num_commits = Session.commit, 0

    async def fail_first(session: Session, tokens: bytes, **more: Any) -> None:
        nonlocal num_commits
        num_commits += 1
        if num_commits == 1:  # of the prompt; the first token has been chosen
            raise TransferError("a load failed")
        await commit(session, tokens, **more)

    async with bench() as on:
        job = replace(on.node.job(PROMPT, NEW), num_logprobs=2)
        expected = await on.node.engine.generate(job)
        monkeypatch.setattr(Session, "commit", fail_first)
        found = await on.node.engine.generate(job)
        assert found.load_problem == "a load failed"
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


async def test_a_claim_whose_load_fails_says_so_or_computes_as_its_policy_says() -> None:
    store = memory()
    async with bench(store) as on:
        await on.prefilled(PROMPT)
    async with bench(store) as on:
        on.latch.fail_next(Direction.LOAD, EVERY)  # those ahead of the claim's own, too
        with pytest.raises(HandoffError) as refused:
            await on.node.engine.decode(on.node.job(PROMPT, NEW), "ticket")
        assert refused.value.reason == "load_failed"
        await on.settle()
        on.latch.fail_next(Direction.LOAD, EVERY)
        result, _ = await on.node.engine.decode(
            on.node.job(PROMPT, NEW), "ticket", policy=ClaimPolicy.RECOMPUTE
        )
        assert result.load_problem is not None
        assert result.tokens == truth(PROMPT, NEW).tokens
        await on.settle()


@pytest.mark.parametrize(("passed", "wanted"), [(1, 5), (4, 1), (4, 5)])
async def test_a_ticket_may_pass_any_number_of_tokens(passed: int, wanted: int) -> None:
    expected = truth(PROMPT, 6).tokens
    async with with_ticket(expected[:passed]) as on:
        result, ticket = await on.node.engine.decode(on.node.job(PROMPT, wanted), "ticket")
        assert ticket is not None
        assert ticket.first_tokens == expected[:passed]
        assert result.tokens == expected[:wanted]
        await on.settle()


async def test_a_ticket_without_a_token_is_refused() -> None:
    async with with_ticket(()) as on:
        with pytest.raises(HandoffError, match="has no first token"):
            await on.node.engine.decode(on.node.job(PROMPT, NEW), "ticket")
        await on.settle()


@asynccontextmanager
async def with_ticket(first_tokens: tuple[int, ...]) -> AsyncIterator[Bench]:
    """Another node has published PROMPT with these first tokens."""
    store = memory()
    async with bench(store) as on:
        await on.prefilled(PROMPT)
        name = Names("tierkv", on.node.service.fingerprint.short).ticket("ticket")
        value = await on.store.get(name, max_bytes=MAX_TICKET_BYTES)
        assert value is not None
        ticket = msgspec.structs.replace(Ticket.decode(value), first_tokens=first_tokens)
        await on.store.put([PutItem(name, (ticket.encode(),), keep_existing=False)])
    async with bench(store) as on:
        yield on


# What cannot be done


async def test_what_the_model_cannot_take_is_refused_before_anything_is_held() -> None:
    async with bench() as on:
        engine = on.node.engine
        for tokens, max_tokens in (([0, 256], 1), ([], 1), (text(10), 16_384)):
            with pytest.raises(BadRequestError):
                await engine.generate(GenerateRequest("request", pack(tokens), max_tokens))
        with pytest.raises(BadRequestError):
            GenerateRequest("request", pack([1]), 0)
        for packed in (b"123", b"\xff\xff\xff\xff"):  # no whole token, a negative one
            with pytest.raises(BadRequestError):
                GenerateRequest("request", packed, 1)
        with pytest.raises(RequestTooLargeError):
            await on.node.generate(text(25 * BLOCK_SIZE), 1)
        await on.node.generate(text(24 * BLOCK_SIZE), 1)  # the last token needs no room
        await on.settle()


# Cancels


async def test_a_cancelled_caller_is_held_until_the_thread_has_left_the_blocks() -> None:
    async with bench() as on:
        await on.node.generate(PROMPT, 1)
        await on.push_to_host(PROMPT)
        on.latch.hold(Direction.LOAD)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(on.node.generate(PROMPT, NEW))
            await until(lambda: on.stream.is_waiting, "the compute thread at the gate")
            task.cancel()
            await turns(20)
            task.cancel()  # impatience changes nothing
            await turns(20)
            assert not task.done()
            assert on.node.service.stats().running_requests == 1
            on.latch.release()
        assert task.cancelled()
        await on.settle()
        assert (await on.node.generate(PROMPT, NEW)).tokens == truth(PROMPT, NEW).tokens


Start = Callable[[Bench], Coroutine[object, None, object]]


async def _cold(on: Bench) -> None:
    await on.node.generate(PROMPT, NEW)


async def _prefill(on: Bench) -> None:
    await on.prefilled(PROMPT)


async def _decode(on: Bench) -> None:
    await on.node.engine.decode(on.node.job(PROMPT, NEW), "published")


async def _decode_what_is_lost(on: Bench) -> None:
    on.latch.fail_next(Direction.LOAD)
    try:
        await on.node.engine.decode(
            on.node.job(PROMPT, NEW), "published", policy=ClaimPolicy.RECOMPUTE
        )
    finally:
        on.latch.fail_next(Direction.LOAD, 0)


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "as-it-comes"])
@pytest.mark.parametrize("start", [_cold, _prefill, _decode, _decode_what_is_lost])
async def test_a_cancel_at_any_await_leaves_nothing_behind(start: Start, *, late: bool) -> None:
    store = memory()
    async with bench(store) as on:
        await on.prefilled(PROMPT, "published")
    for at in range(200):
        async with bench(store) as on:  # leaving checks leases, slots and requests
            was_reached = await cancelled_at(at, start(on), late=late)
            await until(lambda on=on: on.node.service.stats().running_requests == 0)  # type: ignore[misc]
            await on.settle()
            assert (await on.node.generate(PROMPT, NEW)).tokens == truth(PROMPT, NEW).tokens
        if not was_reached:
            assert at >= 3
            return
    pytest.fail("there was no end to the awaits")


# Publishing


@pytest.mark.parametrize("is_held", [True, False])
async def test_a_stopped_publish_tells_who_waits_and_leaves_no_ticket(*, is_held: bool) -> None:
    async with bench() as on:
        engine = on.node.engine

        async def stopped() -> None:
            with pytest.raises(ShuttingDownError):
                await on.prefilled(PROMPT)

        async with asyncio.TaskGroup() as group:
            if is_held:
                on.latch.hold(Direction.OFFLOAD)
            task = group.create_task(stopped())
            if is_held:
                await on.latch.until_held()
            while not task.done():  # the first time it may hit a task that has not begun
                on.node.service.publishings.give_up()
                await asyncio.sleep(0)
        on.latch.release()
        await on.settle()
        with pytest.raises(HandoffError) as refused:
            await engine.decode(on.node.job(PROMPT, NEW), "ticket", deadline_s=1.0)
        assert refused.value.reason == "not_yet"
