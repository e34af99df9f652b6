"""Each thing that `verify` recounts is broken on purpose, and named in words."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.world import World, world
from tierkv.cache.node import CopyState, Tier, TreeNode
from tierkv.sched.request import Request, RequestState, TenantUse

Undo = Callable[[], None]


# ruff: noqa: SLF001 - to break something is to reach where nobody may


def some_node(here: World) -> TreeNode:
    return next(node for node in here.service.index.spaces.nodes() if not node.holders)


def put(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def lost_slot(here: World, _: Request) -> Undo:
    pool = here.service.tiers.slots.pools[Tier.DEVICE]
    slots = pool.allocate(1)
    return lambda: pool.release(slots)


def lost_lease(here: World, _: Request) -> Undo:
    index = here.service.index
    return put(index, "num_held_leases", index.num_held_leases + 1)


def wrong_holders(here: World, request: Request) -> Undo:
    return put(request.lease.node, "holders", 7)


def wrong_unheld(here: World, _: Request) -> Undo:
    order = here.service.index.spaces.order[Tier.DEVICE]
    return put(order, "num_unheld", order.num_unheld + 1)


def forgotten_candidate(here: World, _: Request) -> Undo:
    order = here.service.index.spaces.order[Tier.DEVICE]
    return put(order, "_newest", {})


def no_heap(here: World, _: Request) -> Undo:
    order = here.service.index.spaces.order[Tier.DEVICE]
    entries = [*order._line, *order._heap]
    undo_line = put(order, "_line", deque())
    undo_heap = put(order, "_heap", sorted(entries, reverse=True))

    def undo() -> None:
        undo_heap()
        undo_line()

    return undo


def no_line(here: World, _: Request) -> Undo:
    order = here.service.index.spaces.order[Tier.DEVICE]
    return put(order, "_line", deque(reversed(order._line)))


def wrong_use(here: World, _: Request) -> Undo:
    space = here.service.index.spaces.root.space
    return put(space, "used", [space.used[0] + 1, space.used[1]])


def wrong_present(here: World, _: Request) -> Undo:
    copies = some_node(here).copies[Tier.DEVICE]
    return put(copies, "num_present", copies.num_present + 1)


def orphan(here: World, _: Request) -> Undo:
    copies = some_node(here).copies[Tier.DEVICE]
    return put(copies, "uniform", CopyState.ABSENT)


def incoming_for_nobody(here: World, _: Request) -> Undo:
    copies = some_node(here).copies[Tier.DEVICE]
    return put(copies, "uniform", CopyState.INCOMING)


def pin_without_lease(here: World, _: Request) -> Undo:
    pin = here.service.tiers.pins._pins["kept"]
    assert pin.lease is not None
    return put(pin.lease, "is_released", True)


def soft_pin_without_mark(here: World, _: Request) -> Undo:
    pin = here.service.tiers.pins._pins["soft"]
    assert pin.node is not None
    return put(pin.node, "soft_pins", 0)


def soft_pin_counted_twice(here: World, _: Request) -> Undo:
    pin = here.service.tiers.pins._pins["soft"]
    assert pin.node is not None
    return put(pin.node, "soft_pins", 2)


def soft_pin_of_nobody(here: World, _: Request) -> Undo:
    return put(here.service.index.match(here.prompt(range(200, 208))).node, "soft_pins", 1)


def preempted_lost(here: World, _: Request) -> Undo:
    return put(here.service.scheduler, "_preempted", set())


def preempted_in_another_state(here: World, _: Request) -> Undo:
    [preempted] = here.service.scheduler._preempted
    return put(preempted, "state", RequestState.ENDED)


def running_that_ended(here: World, request: Request) -> Undo:
    return put(request, "refused", (request.lease.num_blocks,))


def uncounted_tenant(here: World, _: Request) -> Undo:
    running = here.service.scheduler._running
    return put(running, "_of_tenant", {"": TenantUse(9)})


def uncounted_private_blocks(here: World, _: Request) -> Undo:
    running = here.service.scheduler._running
    return put(running.of_tenant(""), "num_private", 99)


def claim_over(here: World, request: Request) -> Undo:
    assert request.promise is not None
    return put(request.promise, "is_over", True)


def claim_lost(here: World, _: Request) -> Undo:
    return put(here.service.scheduler.computing, "num_promises", 5)


def wait_without_end(here: World, _: Request) -> Undo:
    [waiting] = here.service.scheduler._waiting
    return put(waiting, "timer", None)


def wait_not_counted(here: World, _: Request) -> Undo:
    [waiting] = here.service.scheduler._waiting
    assert waiting.wait is not None
    return put(waiting.wait.promise, "num_waiting", 0)


def wait_counted_twice(here: World, _: Request) -> Undo:
    [waiting] = here.service.scheduler._waiting
    assert waiting.wait is not None
    return put(waiting.wait.promise, "num_waiting", 2)


def lease_of_less(here: World, request: Request) -> Undo:
    return put(request.lease, "num_blocks", request.lease.num_blocks + 1)


def table_too_short(here: World, _: Request) -> Undo:
    lease = here.service.index.hold(some_node(here), some_node(here).end)
    running = here.service.scheduler.running_requests[0]
    undo_lease, undo_table = put(running, "lease", lease), put(running, "block_table", _NO_SLOTS)

    def undo() -> None:
        undo_table()
        undo_lease()
        here.service.index.release(lease)

    return undo


def unserved_fingerprint(here: World, _: Request) -> Undo:
    return put(here.service.tenants, "_fingerprints", {})


def tenant_lost(here: World, _: Request) -> Undo:
    return put(here.service.tenants, "_by_tenant", {})


def tenant_of_nothing(here: World, _: Request) -> Undo:
    return put(here.service.tenants, "_by_tenant", {"acme": "gone"})


_NO_SLOTS = np.zeros(0, np.int32)
BROKEN: dict[Callable[[World, Request], Undo], str] = {
    lost_slot: "is taken but has no owner",
    lost_lease: "leases are out, but nodes count",
    wrong_holders: "leases are out, but nodes count",
    wrong_unheld: "unheld copies, but",
    forgotten_candidate: "could be evicted, is not queued",
    wrong_use: "copies, but",
    wrong_present: "counts",
    orphan: "slots that do not agree with its states",
    incoming_for_nobody: "bytes incoming, but no holder",
    pin_without_lease: "has lost its lease",
    soft_pin_without_mark: "is soft, but its blocks are not marked",
    soft_pin_counted_twice: "differs from the number of pins",
    soft_pin_of_nobody: "differs from the number of pins",
    preempted_lost: "differs from the number of pins",
    preempted_in_another_state: "is listed as preempted, but ended",
    running_that_ended: "lists refused blocks beyond its lease",
    uncounted_tenant: "num_with_blocks=9",
    uncounted_private_blocks: "num_private=99",
    claim_over: "is over but still listed",
    claim_lost: "are counted",
    wait_without_end: "waits for blocks without a deadline",
    wait_not_counted: "wait for a promise that counts 0",
    wait_counted_twice: "wait for a promise that counts 2",
    lease_of_less: "holds more or fewer blocks than its lease says",
    table_too_short: "holds blocks that its block table does not list",
    unserved_fingerprint: "differ from the fingerprints of the index",
    tenant_lost: "is listed that was never opened",
    tenant_of_nothing: "a tenant is listed without a fingerprint",
    no_heap: "the queue is not a heap",
    no_line: "the line is not in order",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.__name__)
async def test_what_is_broken_is_named(broken: Callable[[World, Request], Undo]) -> None:
    async with world(device_blocks=32) as here:
        for base in (0, 100, 200):
            await here.run(list(range(base, base + 8)))
        here.service.pin("kept", here.prompt(list(range(8))), 1000.0)
        here.service.pin("soft", here.prompt(list(range(100, 108))), 1000.0, is_soft=True)
        here.service.space_of_tenant("opened by name")
        preempted = await here.admit(list(range(400, 408)), name="preempted")
        await here.prefill(preempted, list(range(400, 408)))
        here.service.scheduler.preempt(preempted)
        await here.settle()
        here.service.note_prefill(1000, 1000.0)
        running = await here.admit(list(range(300, 316)), name="runs")
        waits = asyncio.ensure_future(here.admit([*range(300, 316), 1], name="waits"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert here.service.scheduler.num_waiting == 1
        assert here.service.verify() == []
        undo = broken(here, running)
        found = here.service.verify()
        undo()
        assert any(BROKEN[broken] in one for one in found), found
        assert here.service.verify() == []
        here.service.scheduler.end(running)
        here.service.scheduler.end(await waits)
        here.service.scheduler.abandon(preempted)
        await here.settle()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("num_loads", "loads are counted"),
        ("num_offloads", "offloads are counted"),
        ("budget", "bytes of copies to lower tiers are counted"),
        ("stored", "bytes of copies to lower tiers are counted"),
        ("being_stored", "host slots are listed as being stored"),
        ("in_flight", "blocks are marked as in flight"),
        ("queued", "bytes are counted as queued"),
        ("at_work", "copies that make room are counted"),
        ("loading", "loads are listed"),
    ],
)
async def test_what_must_be_over_when_nothing_runs_is_named(what: str, words: str) -> None:
    async with world(with_store=True) as here:
        await here.run(list(range(8)))
        service = here.service
        if what in ("num_loads", "num_offloads"):
            undo = put(service.tiers.copies, what, 1)
        elif what == "budget":
            undo = put(service.tiers.copies.background, "bytes_in_flight", 10)
        elif what == "stored":
            undo = put(service.tiers.copies.storing, "bytes_in_flight", 10)
        elif what == "being_stored":
            slots = np.array([0], np.int32)
            service.tiers.slots.begin_reading(slots)
            undo = partial(service.tiers.slots.end_reading, slots)
        elif what == "queued":
            queued = service.estimator.tier.begin(1000.0, 0.0)
            undo = partial(service.estimator.tier.end, queued, 1.0, is_late=False)
        elif what == "at_work":
            undo = service.tiers.work.begin_storing("")
        elif what == "loading":
            undo = put(service.scheduler.loads, "_active", {7: None})
        else:
            shared = service.fetcher._shared
            undo = partial(shared.finish, shared.reserve(here.keys(range(16)), 0))
        found = service.verify()
        undo()
        assert any(words in one for one in found), found
        assert service.verify() == []


async def test_a_table_that_names_other_blocks_than_the_index_is_named() -> None:
    async with world() as here:
        request = await here.admit(list(range(16)), name="swapped")
        await here.prefill(request, list(range(16)))
        undo = put(request, "block_table", request.block_table[[1, 0, 2, 3]])
        found = here.service.verify()
        undo()
        [finding] = found
        assert finding == (
            "request 'swapped' has other blocks in its block table than the index has for its "
            "tokens"
        )
        await here.ended(request)
