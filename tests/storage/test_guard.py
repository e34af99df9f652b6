"""A failing store is not used, is probed until it answers, and never delays its callers."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

import pytest

from tests.faulty import FaultyStore
from tests.latch import until
from tests.storage.values import (
    TurnedClock,
    get_one,
    guarded,
    landing,
    memory,
    put_one,
    refused,
)
from tierkv.clock import SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.base import StoreWrapper
from tierkv.storage.guard import NegativeCache, SlotGate
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import (
    BreakerState,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutStatus,
    Store,
)

NAMES = [f"t:f:{index:03}:0" for index in range(50)]
BLOCK = bytes(1_000)
Make = Callable[..., Awaitable["Pair"]]
T = TypeVar("T")
NAME = "t:f:a:0"


class Pair:
    """A guarded store around a store that fails when a test asks for it."""

    def __init__(self, capacity_bytes: int | None = None, **settings: float) -> None:
        self.faulty = FaultyStore(MemoryStore(MemorySettings(capacity_bytes), SystemClock()))
        chosen = {"probe_interval_s": 0.02, "retries_per_operation": 0} | settings
        self.store = guarded(self.faulty, SystemClock(), **chosen)

    @property
    def state(self) -> BreakerState | None:
        return self.store.health.circuit


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        async def open_pair(capacity_bytes: int | None = None, **settings: float) -> Pair:
            pair = Pair(capacity_bytes, **settings)
            await stack.enter_async_context(pair.store.running())
            return pair

        yield open_pair


async def failed(pair: Pair) -> str:
    return await refused(pair.store.exists(NAMES))


@pytest.mark.promise("The breaker opens after repeated failures and closes when the store is back.")
async def test_the_breaker_opens_after_the_failures_it_was_set_to(make: Make) -> None:
    pair = await make(failures_to_open=3, probe_interval_s=100.0)
    pair.faulty.fail_next(1_000)
    for _ in range(3):
        assert pair.state is BreakerState.CLOSED
        assert "does not answer" in await failed(pair)
    assert pair.state is BreakerState.OPEN
    asked = pair.faulty.num_operations
    assert "is not used" in await failed(pair)
    assert (await get_one(pair.store, NAMES[0], 1))[0] is GetStatus.FAILED
    assert await put_one(pair.store, NAMES[0], BLOCK) is PutStatus.FAILED
    with pytest.raises(StoreUnavailableError, match="is not used"):
        await pair.store.get(NAMES[0], max_bytes=1)
    assert pair.faulty.num_operations == asked
    assert pair.store.health.num_refused == 4


async def test_a_success_in_between_keeps_the_breaker_closed(make: Make) -> None:
    pair = await make(failures_to_open=2, negative_ttl_s=0.0)
    for _ in range(5):
        pair.faulty.fail_next(1)
        await failed(pair)
        assert await pair.store.exists(NAMES[10:]) == 0
    for name in NAMES[:5]:
        pair.faulty.fail_next(1)
        assert await put_one(pair.store, name, BLOCK) is PutStatus.FAILED
        assert await put_one(pair.store, name, BLOCK) is PutStatus.STORED
    assert pair.state is BreakerState.CLOSED


async def test_writes_that_succeed_do_not_hide_that_all_reads_fail(make: Make) -> None:
    """A disk that hangs may still accept writes into memory."""
    pair = await make(failures_to_open=3, probe_interval_s=100.0)
    for name in NAMES[:3]:
        assert pair.state is BreakerState.CLOSED
        pair.faulty.fail_next(1)
        await failed(pair)
        if name != NAMES[2]:
            assert await put_one(pair.store, name, BLOCK) is PutStatus.STORED
    assert pair.state is BreakerState.OPEN


async def test_a_ping_without_an_answer_beside_a_long_operation_opens_the_breaker(
    make: Make,
) -> None:
    pair = await make(failures_to_open=1_000, timeout_s=0.4)
    pair.faulty.hold()
    assert "did not answer" in await failed(pair)
    await until(lambda: pair.store.health.num_opened == 1)
    pair.faulty.release()


async def test_a_ping_without_an_answer_opens_no_breaker_of_a_store_that_answers_reads(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make(failures_to_open=1_000, timeout_s=0.4)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(pair.faulty, "ping", hang)
    pair.faulty.hold()
    reading = asyncio.create_task(pair.store.exists(NAMES))
    await begun.wait()
    pair.faulty.release()
    assert await reading == 0
    await ended.wait()
    await asyncio.sleep(0.05)  # the watcher has seen it
    assert pair.store.health.num_opened == 0


@pytest.mark.promise("The breaker opens after repeated failures and closes when the store is back.")
async def test_probes_close_the_breaker_when_the_store_is_back(make: Make) -> None:
    pair = await make(failures_to_open=1)
    pair.faulty.fail_next(5)
    await failed(pair)
    asked = pair.faulty.num_operations
    await until(lambda: pair.state is BreakerState.CLOSED, "a closed breaker")
    assert pair.faulty.num_operations - asked == 5  # four probes that failed and one that did not
    assert await put_one(pair.store, NAMES[0], BLOCK) is PutStatus.STORED
    assert pair.store.health.num_opened == 1


async def test_a_batch_that_fails_in_part_is_no_failure_of_the_store(make: Make) -> None:
    pair = await make(failures_to_open=1)
    await put_one(pair.store, NAMES[1], BLOCK)
    landings = [landing(name, len(BLOCK)) for name in NAMES[:2]]
    pair.faulty.fail_items(NAMES[0])
    outcomes = await pair.store.get_into([item for item, _ in landings])
    assert [o.status for o in outcomes] == [GetStatus.FAILED, GetStatus.HIT]
    assert pair.store.health.num_opened == 0
    outcomes = await pair.store.get_into([landings[0][0]])
    assert outcomes[0].status is GetStatus.FAILED
    assert pair.store.health.num_opened == 1


async def test_a_silent_store_costs_one_deadline(make: Make) -> None:
    pair = await make(
        timeout_s=0.05, write_timeout_s=0.05, failures_to_open=100, probe_interval_s=100.0
    )
    pair.faulty.hold()
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert "did not answer within 50 ms" in await failed(pair)
    assert (await get_one(pair.store, NAMES[0], 1))[0] is GetStatus.FAILED
    assert await put_one(pair.store, NAMES[0], b"x") is PutStatus.FAILED
    assert 0.14 <= loop.time() - started <= 3.0


class TakesItsTime(MemoryStore):
    """A store whose reads take 0.8 ms for each value, however small."""

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        await asyncio.sleep(0.0008 * len(items))
        return await super().get_into(items)


async def test_a_read_of_many_small_values_has_time_for_each() -> None:
    slow = TakesItsTime(MemorySettings(), SystemClock())
    store = guarded(slow, timeout_s=0.5, slowest_bytes_per_s=5e6)
    async with store.running():
        names = [f"t:f:{index:04}:0" for index in range(1_000)]
        await store.put([PutItem(name, (b"x",)) for name in names])
        outcomes = await store.get_into([landing(name, 1)[0] for name in names])
        assert {outcome.status for outcome in outcomes} == {GetStatus.HIT}


async def test_questions_to_a_store_that_is_stuck_are_given_up_and_reads_open_the_breaker(
    make: Make,
) -> None:
    """The store ignores a cancel, as a thread does whose disk hangs."""
    pair = await make(timeout_s=0.05, failures_to_open=2, probe_interval_s=0.05)
    await put_one(pair.store, NAMES[0], BLOCK)
    pair.faulty.hold_firmly()
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert "within 50 ms" in await failed(pair)
    assert loop.time() - started <= 3.0
    item, _ = landing(NAMES[0], len(BLOCK))
    reading = asyncio.ensure_future(pair.store.get_into([item]))
    await until(lambda: pair.state is not BreakerState.CLOSED, "an open breaker")
    assert not reading.done()  # the store may still write into the buffers
    assert "is not used" in await failed(pair)
    pair.faulty.release()
    assert (await reading)[0].status is GetStatus.FAILED
    await until(lambda: pair.state is BreakerState.CLOSED, "a closed breaker")


async def test_reads_behind_stuck_ones_are_given_up_though_they_were_never_begun(
    make: Make,
) -> None:
    pair = await make(max_reads=1, timeout_s=0.1, failures_to_open=1, probe_interval_s=100.0)
    pair.faulty.hold_firmly()
    async with asyncio.TaskGroup() as group:
        stuck = group.create_task(get_one(pair.store, NAMES[0], 10))
        await pair.faulty.until_held(1)
        async with asyncio.timeout(5), asyncio.TaskGroup() as waiting:
            read = waiting.create_task(get_one(pair.store, NAMES[1], 10))
            question = waiting.create_task(failed(pair))
        assert read.result()[0] is GetStatus.FAILED
        assert "is not used" in question.result()
        assert pair.store.health.num_refused == 2
        pair.faulty.release()
    assert stuck.result()[0] is GetStatus.FAILED


async def test_a_turn_that_comes_with_a_cancel_goes_to_the_next() -> None:
    turns = SlotGate(1)
    await turns.acquire()
    first, second = (asyncio.ensure_future(turns.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    assert turns.num_waiting == 2
    turns.release()
    first.cancel()
    await second
    assert first.cancelled()
    turns.release()
    await turns.acquire()


async def test_writes_behind_stuck_ones_are_given_up_when_the_store_is_left_alone(
    make: Make,
) -> None:
    pair = await make(
        write_batches=1, write_timeout_s=0.05, failures_to_open=1, probe_interval_s=100.0
    )
    pair.faulty.hold_firmly()
    async with asyncio.TaskGroup() as group:
        stuck = group.create_task(put_one(pair.store, NAMES[0], BLOCK))
        await pair.faulty.until_held(1)
        waiting = group.create_task(put_one(pair.store, NAMES[1], BLOCK))
        await until(waiting.done, "an answer")
        assert pair.state is BreakerState.OPEN
        assert waiting.result() is PutStatus.FAILED
        assert await put_one(pair.store, NAMES[2], BLOCK) is PutStatus.FAILED
        assert not stuck.done()
        assert pair.store.health.waiting_write_bytes == 0
        pair.faulty.release()
    assert stuck.result() is PutStatus.FAILED


async def test_writes_behind_writes_that_hang_are_given_up_though_reads_are_answered(
    make: Make,
) -> None:
    """A write may hang behind the lock of a frozen process.

    Waiting writes keep host slots in use.
    """
    pair = await make(write_batches=2, write_timeout_s=1.0, probe_interval_s=100.0)
    pair.faulty.hold_writes(firmly=True)
    async with asyncio.TaskGroup() as group:
        stuck = []
        for count, name in enumerate(NAMES[:2], 1):
            stuck.append(group.create_task(put_one(pair.store, name, BLOCK)))
            await pair.faulty.until_held(count)
        waiting = group.create_task(put_one(pair.store, NAMES[2], BLOCK))
        await until(waiting.done, "an answer")
        assert waiting.result() is PutStatus.FAILED
        assert await put_one(pair.store, NAMES[3], BLOCK) is PutStatus.FULL
        assert pair.store.health.num_refused == 1
        assert pair.store.health.waiting_write_bytes == 0
        assert await pair.store.exists(NAMES) == 0
        assert pair.state is BreakerState.CLOSED
        assert not any(task.done() for task in stuck)
        pair.faulty.release()
    assert await put_one(pair.store, NAMES[3], BLOCK) is PutStatus.STORED


class LateAnswers(StoreWrapper):
    """A store that sends each question at once, but delays the next `num_late` answers.

    Delayed answers are returned when `may_answer` is set.
    """

    inner: FaultyStore

    def __init__(self) -> None:
        super().__init__(memory())
        self.may_answer = asyncio.Event()
        self.num_late = self.num_asked = 0

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        is_late = self.num_late > 0
        self.num_late -= is_late
        try:
            return await super()._ask(ask)
        finally:
            self.num_asked += is_late
            if is_late:
                await self.may_answer.wait()


async def test_a_read_that_gets_its_turn_as_the_breaker_opens_is_refused() -> None:
    inner = LateAnswers()
    store = guarded(inner, max_reads=2, failures_to_open=1, probe_interval_s=100.0)
    async with store.running(), asyncio.TaskGroup() as group:
        inner.num_late = 3
        answered = group.create_task(store.exists(NAMES[:1]))
        await until(lambda: inner.num_asked == 1)
        inner.inner.fail_next(1)
        failing = group.create_task(refused(store.exists(NAMES[-1:])))
        await until(lambda: inner.num_asked == 2)
        waiting = group.create_task(refused(store.exists(NAMES[1:2])))
        await asyncio.sleep(0)
        inner.may_answer.set()
    assert answered.result() == 0
    assert "does not answer" in failing.result()
    assert "is not used" in waiting.result()
    assert inner.num_asked == 2


async def test_what_is_being_written_is_not_believed_to_be_missing() -> None:
    inner = LateAnswers()
    store = guarded(inner, negative_ttl_s=100.0)
    async with store.running(), asyncio.TaskGroup() as group:
        assert await store.present([NAME]) == [False]
        inner.num_late = 1
        writing = group.create_task(put_one(store, NAME, b"x"))
        await until(lambda: inner.num_asked == 1)
        assert await store.present([NAME]) == [True]
        inner.may_answer.set()
    assert writing.result() is PutStatus.STORED


async def test_a_read_is_tried_again_within_the_budget_and_a_write_never(make: Make) -> None:
    pair = await make(retries_per_operation=0.1, failures_to_open=1_000)
    await put_one(pair.store, NAMES[0], BLOCK)
    pair.faulty.fail_next(1)
    assert (await get_one(pair.store, NAMES[0], 1_000))[0] is GetStatus.HIT
    pair.faulty.fail_next(1)
    assert await pair.store.exists(NAMES[:1]) == 1
    pair.faulty.fail_next(1)
    assert await put_one(pair.store, NAMES[1], BLOCK) is PutStatus.FAILED
    before = pair.faulty.num_operations
    pair.faulty.fail_next(10_000)
    for _ in range(200):
        await failed(pair)
    assert pair.faulty.num_operations - before <= 200 * 1.1 + 11


@pytest.mark.parametrize("late_s", [0.05, 0.2])
async def test_a_read_that_fails_late_is_not_tried_again(late_s: float) -> None:
    """Otherwise one caller would wait for both attempts."""
    clock, faulty = TurnedClock(), memory()
    store = guarded(faulty, clock)
    async with store.running():
        await put_one(store, NAME, BLOCK)
        for read in (get_one(store, NAME, 1_000), store.exists([NAME])):
            before = faulty.num_operations
            faulty.hold()
            faulty.fail_next(1)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(outcome(read))
                await faulty.until_held(1)
                clock.now += late_s
                faulty.release()
            is_tried_again = late_s < 0.1
            assert reading.result() is is_tried_again
            assert faulty.num_operations - before == 1 + is_tried_again


async def outcome(read: Awaitable[object]) -> bool:
    """Return True if the read found the stored value."""
    try:
        return await read in (1, (GetStatus.HIT, BLOCK))
    except StoreUnavailableError:
        return False


async def test_under_pressure_the_writes_worth_least_are_dropped(make: Make) -> None:
    pair = await make(max_waiting_write_bytes=10_000, write_batches=1, timeout_s=30.0)
    pair.faulty.hold()
    async with asyncio.TaskGroup() as group:
        group.create_task(put_one(pair.store, "t:f:first:0", BLOCK))
        await pair.faulty.until_held(1)
        items = [PutItem(name, (BLOCK,), worth=float(i % 5)) for i, name in enumerate(NAMES)]
        blocks = group.create_task(pair.store.put(items))
        ticket = group.create_task(put_one(pair.store, "t:ticket", BLOCK, keep_existing=False))
        await until(lambda: pair.store.health.num_dropped_writes == 41, "drops")
        assert pair.store.health.waiting_write_bytes <= 10_000
        pair.faulty.release()
    assert ticket.result() is PutStatus.STORED
    kept = [
        item.worth
        for item, outcome in zip(items, blocks.result(), strict=True)
        if outcome.status is PutStatus.STORED
    ]
    assert kept == [4.0] * 9
    assert {outcome.status for outcome in blocks.result()} == {PutStatus.STORED, PutStatus.FULL}


async def test_a_cancelled_write_is_withdrawn_or_ends_with_its_buffers_free(make: Make) -> None:
    pair = await make(write_batches=1, timeout_s=30.0)
    pair.faulty.hold_firmly()
    under_way: asyncio.Task[PutStatus] = asyncio.create_task(put_one(pair.store, NAMES[0], BLOCK))
    await pair.faulty.until_held(1)
    waiting: asyncio.Task[PutStatus] = asyncio.create_task(put_one(pair.store, NAMES[1], BLOCK))
    await asyncio.sleep(0)
    waiting.cancel()
    under_way.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not under_way.done()
    pair.faulty.release()
    await asyncio.wait([under_way])
    assert await pair.store.exists(NAMES[:2]) == 1


async def test_a_full_store_is_not_written_to_for_a_while_and_read_all_the_same(make: Make) -> None:
    pair = await make(capacity_bytes=5_000, full_pause_s=100.0)
    statuses = [await put_one(pair.store, name, BLOCK) for name in NAMES]
    assert statuses == [PutStatus.STORED] * 5 + [PutStatus.FULL] * 45
    assert pair.faulty.num_operations == 6
    for name in NAMES[:5]:
        assert (await get_one(pair.store, name, 1_000))[0] is GetStatus.HIT


async def test_a_value_that_a_store_never_takes_keeps_no_other_out(make: Make) -> None:
    """A value that is larger than the store must not stop the writes of smaller values."""
    pair = await make(capacity_bytes=5_000, full_pause_s=100.0)
    assert await put_one(pair.store, NAMES[0], bytes(5_001)) is PutStatus.FULL
    assert await put_one(pair.store, NAMES[1], BLOCK) is PutStatus.STORED
    assert await put_one(pair.store, NAMES[2], bytes(4_500)) is PutStatus.FULL
    assert await put_one(pair.store, NAMES[3], BLOCK) is PutStatus.FULL


async def test_what_is_not_there_is_not_asked_for_again_until_somebody_writes(make: Make) -> None:
    pair = await make(negative_ttl_s=100.0)
    assert await pair.store.exists(NAMES) == 0
    asked = pair.faulty.num_operations
    assert await pair.store.exists(NAMES) == 0
    assert pair.faulty.num_operations == asked
    assert pair.store.health.negative_hits == 1
    await pair.store.put([PutItem(name, (BLOCK,)) for name in NAMES[:10]])
    assert await pair.store.exists(NAMES) == 10
    # Another node stores the missing blocks, and a ticket that names them.
    await pair.faulty.put([PutItem(name, (BLOCK,)) for name in NAMES[10:]])
    await pair.faulty.put([PutItem("t:ticket:a", (b"x",))])
    assert await pair.store.exists(NAMES[10:]) == 0
    assert await pair.store.get("t:ticket:a", max_bytes=1) == b"x"
    assert await pair.store.exists(NAMES) == 50


async def test_a_list_of_tails_that_is_not_there_is_not_read_again_until_somebody_writes_it(
    make: Make,
) -> None:
    pair, name = await make(negative_ttl_s=100.0), "t:0123:root:tails"
    assert await pair.store.get(name, max_bytes=9) is None
    asked = pair.faulty.num_operations
    assert await pair.store.get(name, max_bytes=9) is None
    assert pair.faulty.num_operations == asked
    assert await put_one(pair.store, name, b"x") is PutStatus.STORED
    assert await pair.store.get(name, max_bytes=9) == b"x"


@pytest.mark.parametrize(
    ("asks", "argument"),
    [
        ("exists", NAMES[:1]),
        ("present", NAMES[:1]),
        ("get_into", [landing(NAMES[0], 1)[0]]),
    ],
    ids=["exists", "present", "get_into"],
)
@pytest.mark.parametrize("writer", ["we", "another node"])
async def test_an_answer_older_than_a_write_makes_nobody_believe_that_there_is_nothing(
    asks: str, argument: Sequence[object], writer: str
) -> None:
    inner = LateAnswers()
    store = guarded(inner, negative_ttl_s=100.0)
    async with store.running(), asyncio.TaskGroup() as group:
        inner.num_late = 1
        asked = group.create_task(getattr(store, asks)(argument))
        await until(lambda: inner.num_asked == 1)
        if writer == "we":
            assert await put_one(store, NAMES[0], b"x") is PutStatus.STORED
        else:
            await put_one(inner, NAMES[0], b"x")
            await put_one(inner, "t:ticket:a", b"x")
            assert await store.get("t:ticket:a", max_bytes=1) == b"x"
        inner.may_answer.set()
        await asked
        assert await store.exists(NAMES[:1]) == 1


@pytest.mark.parametrize("small", ["t:f:00ff:tails", "t:ack:a", "t:producer:a"])
async def test_a_small_value_that_tells_of_no_blocks_leaves_what_is_known_to_be_missing(
    make: Make, small: str
) -> None:
    pair = await make(negative_ttl_s=100.0)
    await pair.store.put([PutItem(small, (b"x",))])
    assert await pair.store.exists(NAMES) == 0
    assert await pair.store.get(small, max_bytes=1) == b"x"
    asked = pair.faulty.num_operations
    assert await pair.store.exists(NAMES) == 0
    assert pair.faulty.num_operations == asked


def test_names_that_are_believed_no_more_take_no_memory() -> None:
    clock = TurnedClock()
    missing, name = NegativeCache(0.5, clock), ""
    tracemalloc.start()
    try:
        for number in range(20_000):
            name = f"t:{number:0100}"
            with missing.asking() as note:
                note(name)
            clock.now += 0.01
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000  # some 50 names; all of them would be 9 MB
    assert missing.has(name)
    clock.now += 1.0
    assert not missing.has(name)


async def test_a_store_left_in_the_middle_of_a_probe_works_when_it_is_opened_again() -> None:
    pair = Pair(failures_to_open=1)
    async with pair.store.running():
        pair.faulty.fail_next(1)
        await failed(pair)
        pair.faulty.hold()
        await until(lambda: pair.state is BreakerState.HALF_OPEN, "a probe")
    pair.faulty.release()
    async with pair.store.running():
        assert await put_one(pair.store, NAME, b"x") is PutStatus.STORED
        pair.faulty.fail_next(1)
        await failed(pair)
        await until(lambda: pair.state is BreakerState.CLOSED, "a probe that is answered")
        assert await get_one(pair.store, NAME, 1) == (GetStatus.HIT, b"x")


async def test_who_attaches_a_store_again_and_again_hears_once_that_it_is_back() -> None:
    pair, heard = Pair(failures_to_open=1), []

    class Node:
        def is_back(self) -> None:
            heard.append(self)

    one, other = Node(), Node()
    for node in (one, other, one, one):
        pair.store.on_recovery(node.is_back)
    async with pair.store.running():
        pair.faulty.fail_next(1)
        await failed(pair)
        await until(lambda: pair.state is BreakerState.CLOSED, "a probe that is answered")
        assert heard == [one, other]


def test_a_store_can_be_opened_again_on_another_loop() -> None:
    pair = Pair()

    async def write(content: bytes) -> tuple[PutStatus, bytes | None]:
        async with pair.store.running():
            status = await put_one(pair.store, NAME, content, keep_existing=False)
            return status, await pair.store.get(NAME, max_bytes=10)

    for content in (b"first", b"again"):
        assert asyncio.run(write(content)) == (PutStatus.STORED, content)


async def test_what_a_cancelled_put_has_written_is_not_believed_to_be_missing() -> None:
    pair = Pair(negative_ttl_s=60.0)
    async with pair.store.running():
        pair.faulty.hold_writes()
        put = asyncio.ensure_future(pair.store.put([PutItem(NAME, (b"x",))]))
        await pair.faulty.until_held(1)
        assert await pair.store.exists([NAME]) == 0
        put.cancel()
        pair.faulty.release()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert await pair.store.exists([NAME]) == 1
