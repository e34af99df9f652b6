"""Each thing that `verify` recounts is broken on purpose, and named in words."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.world import World, world
from tierkv.cache.node import CopyState, Tier, TreeNode
from tierkv.sched.request import RequestState, SpaceUse

Undo = Callable[[], None]


# ruff: noqa: SLF001 - to break something is to reach where nobody may


def some_node(here: World) -> TreeNode:
    return next(node for node in here.service.index.spaces.nodes() if not node.holders)


def more(count: int) -> int:
    return count + 1


def put(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def lost_slot(here: World) -> Undo:
    pool = here.service.tiers.slots.pools[Tier.DEVICE]
    slots = pool.allocate(1)
    return lambda: pool.release(slots)


def no_heap(here: World) -> Undo:
    order = device_order(here)
    entries = [*order._line, *order._heap]
    undo_line = put(order, "_line", deque())
    undo_heap = put(order, "_heap", sorted(entries, reverse=True))

    def undo() -> None:
        undo_heap()
        undo_line()

    return undo


def table_too_short(here: World) -> Undo:
    lease = here.service.index.hold(some_node(here), some_node(here).end)
    running = running_of(here)
    undo_lease = put(running, "lease", lease)
    undo_table = put(running, "block_table", np.zeros(0, np.int32))

    def undo() -> None:
        undo_table()
        undo_lease()
        here.service.index.release(lease)

    return undo


def device_order(here: World) -> Any:
    return here.service.index.spaces.order[Tier.DEVICE]


def running_of(here: World) -> Any:
    return here.service.scheduler.running_requests[0]


def waiting_of(here: World) -> Any:
    [waiting] = here.service.scheduler._waiting
    return waiting


def pin_of(here: World, name: str) -> Any:
    return here.service.tiers.pins._pins[name]


def copies_of(here: World) -> Any:
    return some_node(here).copies[Tier.DEVICE]


# What owns a field, its name, the wrong value (or what makes it of the right one), the words.
FIELDS: list[tuple[Callable[[World], Any], str, Any, str]] = [
    (lambda on: on.service.index, "num_held_leases", more, "leases are out, but nodes count"),
    (lambda on: running_of(on).lease.node, "holders", 7, "leases are out, but nodes count"),
    (device_order, "num_unheld", more, "unheld copies, but"),
    (device_order, "_newest", {}, "could be evicted, but is not queued"),
    (device_order, "_line", lambda line: deque(reversed(line)), "the line is not in order"),
    (lambda on: on.service.index.spaces.root.space, "used", [99, 0], "copies, but"),
    (copies_of, "num_present", more, "counts"),
    (copies_of, "uniform", CopyState.ABSENT, "slots that do not agree with its states"),
    (copies_of, "uniform", CopyState.INCOMING, "bytes incoming, but no holder"),
    (lambda on: pin_of(on, "kept").lease, "is_released", True, "has lost its lease"),
    (lambda on: pin_of(on, "soft").node, "soft_pins", 0, "is soft, but its blocks are not marked"),
    (lambda on: pin_of(on, "soft").node, "soft_pins", 2, "differs from the number of pins"),
    (
        lambda on: on.service.index.match(on.prompt(range(200, 208))).node,
        *("soft_pins", 1, "differs from the number of pins"),
    ),
    (lambda on: on.service.scheduler, "_preempted", set(), "differs from the number of pins"),
    (
        lambda on: next(iter(on.service.scheduler._preempted)),
        *("state", RequestState.ENDED, "is listed as preempted, but ended"),
    ),
    (running_of, "refused", (0,), "lists refused blocks beyond its lease"),
    (
        lambda on: on.service.scheduler._running,
        *("_of_space", {"": SpaceUse(9)}, "num_with_blocks=9"),
    ),
    (
        lambda on: on.service.scheduler._running.use_of(""),
        *("num_private", 99, "num_private=99"),
    ),
    (lambda on: running_of(on).promise, "is_over", True, "is over but still listed"),
    (lambda on: on.service.scheduler.computing, "num_promises", 5, "are counted"),
    (waiting_of, "timer", None, "waits for blocks without a deadline"),
    (
        lambda on: waiting_of(on).wait.promise,
        *("num_waiting", 0, "wait for blocks of another request, which counts 0"),
    ),
    (
        lambda on: waiting_of(on).wait.promise,
        *("num_waiting", 2, "wait for blocks of another request, which counts 2"),
    ),
    (
        lambda on: running_of(on).lease,
        *("num_blocks", more, "holds more or fewer blocks than its lease says"),
    ),
    (
        lambda on: on.service.tenants,
        *("_fingerprints", {}, "differ from the fingerprints of the index"),
    ),
    (lambda on: on.service.tenants, "_by_tenant", {}, "is listed that was never opened"),
    (
        lambda on: on.service.tenants,
        *("_by_tenant", {"acme": "gone"}, "a tenant is listed without a fingerprint"),
    ),
]
MORE_THAN_A_FIELD: list[tuple[Callable[[World], Undo], str]] = [
    (lost_slot, "is taken but has no owner"),
    (no_heap, "the queue is not a heap"),
    (table_too_short, "holds blocks that its block table does not list"),
]


def broken(here: World) -> Iterator[tuple[Undo, str]]:
    """Break one account after another; the caller mends each before it takes the next."""
    for owner_of, name, value, words in FIELDS:
        owner = owner_of(here)
        wrong = value(getattr(owner, name)) if callable(value) else value
        yield put(owner, name, wrong), words
    for breaks, words in MORE_THAN_A_FIELD:
        yield breaks(here), words


async def test_what_is_broken_is_named() -> None:
    async with world(device_blocks=32) as here:
        for base in (0, 100, 200):
            await here.run(list(range(base, base + 8)))
        here.service.pin("kept", here.prompt(list(range(8))), 1000.0)
        here.service.pin("soft", here.prompt(list(range(100, 108))), 1000.0, is_soft=True)
        here.service.space_of_tenant("opened by name")
        preempted = await here.computed(list(range(400, 408)), name="preempted")
        here.service.scheduler.preempt(preempted)
        await here.settle()
        here.service.note_prefill(1000, 1000.0)
        running = await here.admit(list(range(300, 316)), name="runs")
        waits = asyncio.ensure_future(here.admit([*range(300, 316), 1], name="waits"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert here.service.scheduler.num_waiting == 1
        assert here.service.verify() == []
        for undo, words in broken(here):
            found = here.service.verify()
            undo()
            assert any(words in one for one in found), (words, found)
            assert here.service.verify() == []
        here.service.scheduler.end(running)
        here.service.scheduler.end(await waits)
        here.service.scheduler.abandon(preempted)
        await here.settle()


def being_stored(here: World) -> Undo:
    slots = np.array([0], np.int32)
    here.service.tiers.slots.begin_reading(slots)
    return partial(here.service.tiers.slots.end_reading, slots)


def queued(here: World) -> Undo:
    tier = here.service.estimator.tier
    return partial(tier.end, tier.begin(1000.0, 0.0), 1.0, is_late=False)


def in_flight(here: World) -> Undo:
    fetcher = here.service.fetcher
    return partial(fetcher.finish, fetcher.reserve(here.keys(range(16)), 0))


LOWER = "bytes of copies to lower tiers are counted"
AT_REST: dict[str, Callable[[World], Undo]] = {
    "loads are counted": lambda on: put(on.service.tiers.copies, "num_loads", 1),
    "offloads are counted": lambda on: put(on.service.tiers.copies, "num_offloads", 1),
    f"10 {LOWER}": lambda on: put(on.service.tiers.copies.background, "bytes_in_flight", 10),
    f"11 {LOWER}": lambda on: put(on.service.tiers.copies.storing, "bytes_in_flight", 11),
    "host slots are listed as being stored": being_stored,
    "blocks are marked as in flight": in_flight,
    "bytes are counted as queued": queued,
    "copies that make room are counted": lambda on: on.service.tiers.work.begin_storing(""),
    "loads are listed": lambda on: put(on.service.scheduler.loads, "_active", {7: None}),
}


async def test_what_must_be_over_when_nothing_runs_is_named() -> None:
    async with world(with_store=True) as here:
        await here.run(list(range(8)))
        for words, breaks in AT_REST.items():
            undo = breaks(here)
            found = here.service.verify()
            undo()
            assert any(words in one for one in found), (words, found)
            assert here.service.verify() == []


async def test_a_table_that_names_other_blocks_than_the_index_is_named() -> None:
    async with world() as here:
        request = await here.computed(list(range(16)), name="swapped")
        undo = put(request, "block_table", request.block_table[[1, 0, 2, 3]])
        found = here.service.verify()
        undo()
        [finding] = found
        assert finding == (
            "request 'swapped' has other blocks in its block table than the index has for its "
            "tokens"
        )
        await here.ended(request)
