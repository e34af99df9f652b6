"""Blocks from one node's device to another's: never half, never stale, in nobody's way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.latch import PATIENCE_S, finish, turns, until
from tests.pd import nodes
from tests.pd.nodes import TOKENS, claim, claimed, leases, publish, settings, ticket_of
from tests.sessions import claim_request
from tests.world import GQA, World
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt
from tierkv.gpu import process_memory
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.process_memory import CpuSharing
from tierkv.gpu.protocol import Direction, Ids, Planes, SharedPlanes
from tierkv.pd.direct import landing
from tierkv.pd.direct.address import (
    Channel,
    DirectAddress,
    DirectAsk,
    connect_near,
    name_of,
    near_listener,
)
from tierkv.pd.direct.landing import Landing, OpenPlanes, ShownPlanes
from tierkv.pd.settings import DirectPath
from tierkv.pd.tickets import HandoffStats

BLOCKS = 10


@asynccontextmanager
async def pair(
    there: dict[str, Any] | None = None, **here: Any
) -> AsyncIterator[tuple[World, World]]:
    """The prefill node has published. there: of its HandoffSettings. here: of the other's
    CacheSettings."""
    way = {"direct": DirectPath.DEVICE}
    async with nodes.pair(settings(**way, **(there or {})), settings(**way), **here) as both:
        await publish(both[0])
        yield both


def counts(node: World) -> tuple[int, int, int]:
    """Blocks from the producer's device, reads of it that failed, blocks from storage."""
    handoff = node.service.stats().handoff
    return handoff.device_blocks, handoff.failed_direct_reads, node.storage_stats.fetched_blocks


@pytest.fixture
def held_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    reads = Reads(process_memory.read)
    monkeypatch.setattr(process_memory, "read", reads)
    yield reads
    reads.go.set()


class Reads:
    """Stands for `process_memory.read`: each waits, before it begins, until a test lets it go."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self.go = threading.Event()
        self.num_begun = 0

    def __call__(self, pid: int, pieces: Sequence[process_memory.RemotePiece]) -> None:
        self.num_begun += 1
        assert self.go.wait(PATIENCE_S), "a test left a read waiting"
        self._read(pid, pieces)


async def test_a_claimed_prompt_lands_where_it_is_used() -> None:
    async with pair() as (prefill, decode):
        await claim(decode)
        assert counts(decode) == (BLOCKS, 0, 1)
        assert decode.latch.count(Direction.LOAD) == 1  # the tail's
        assert prefill.service.stats().host.free == 64
        await until(lambda: leases(prefill) == 0, "an end of what was held")


async def test_what_the_device_has_already_is_not_read_again() -> None:
    async with pair() as (_, decode):
        await decode.run(TOKENS[:20])
        stored = decode.storage_stats.fetched_blocks
        await claim(decode)
        assert counts(decode) == (BLOCKS - 5, 0, stored + 1)


async def test_bytes_that_the_producer_let_go_of_while_they_were_read_are_not_used(
    held_reads: Reads,
) -> None:
    """It thinks the claimer dead, evicts, and writes other bytes into the same blocks."""
    async with pair({"direct_lease_s": 1.0}) as (prefill, decode):
        claiming = asyncio.create_task(claim(decode))
        await until(lambda: held_reads.num_begun == 1, "a read")
        assert leases(prefill) == 1
        await until(lambda: leases(prefill) == 0, "the end of the producer's patience")
        prefill.service.reset()
        for array in prefill.service.planes.arrays:
            array[...] = 0xEE
        held_reads.go.set()
        await finish(claiming)
        assert counts(decode) == (0, 1, BLOCKS + 1)


async def test_an_id_that_another_prompt_uses_by_now_never_shows_its_blocks() -> None:
    """A claimer has read the ticket when its producer begins with another prompt under that id:
    what it is shown is checked by nobody, so it must not be the other's."""
    async with pair() as (prefill, decode):
        other = [1000 + token for token in TOKENS]
        await prefill.run(other)
        handoff = prefill.service.require_handoff()
        assert handoff.source.offer("ticket", prefill.prompt(other), handoff.ledger) is not None
        await claim(decode)  # every byte is looked at


async def test_what_is_being_read_cannot_be_evicted(held_reads: Reads) -> None:
    async with pair() as (prefill, decode):
        claiming = asyncio.create_task(claim(decode))
        await until(lambda: held_reads.num_begun == 1, "a read")
        assert prefill.service.reset() == BLOCKS
        for base in (1000, 2000, 3000):  # as much as there is room for, besides
            await prefill.run([base + i for i in range(4 * (64 - BLOCKS - 1))])
        sleeping = asyncio.create_task(prefill.service.sleep(keeps_blocks=False))
        await turns(50)
        assert not sleeping.done()
        held_reads.go.set()
        await finish(claiming)
        await finish(sleeping)
        assert counts(decode) == (BLOCKS, 0, 1)
        await prefill.service.wake()


async def test_blocks_whose_beginning_was_evicted_meanwhile_do_not_land() -> None:
    """A block is on the device only with its whole path."""
    async with pair() as (prefill, decode):
        shown = ShownPlanes(CpuSharing(), lambda: prefill.service.planes).describe()
        prompt, ids = decode.prompt(TOKENS), np.arange(5, dtype=np.int32)
        own = Landing(decode.service.tiers, CpuSharing(), HandoffStats(), allocate=never)
        async with own.running():
            assert not await finish(own.land(prompt, 5, shown, ids, asked))
        assert decode.service.index.match(prompt).num_blocks == 0
        await decode.settle()


def never(_: Prompt, __: int) -> Ids:
    raise AssertionError("nothing is to land")


async def asked() -> bool:
    return True


async def test_blocks_land_after_the_copies_that_make_room_for_them() -> None:
    other = list(range(500, 544))
    async with pair(device_blocks=12, host_write=WritePolicy.WRITE_BACK) as (_, decode):
        await decode.run(other)
        decode.latch.hold(Direction.OFFLOAD)
        claiming = asyncio.create_task(claim(decode))
        await decode.latch.until_held()
        await turns(20)
        assert counts(decode)[0] == 0
        decode.latch.release()
        await finish(claiming)
        assert counts(decode) == (BLOCKS, 0, 1)
        assert decode.service.index.match(decode.prompt(other)).num_blocks == 11  # none forgotten


async def test_a_device_without_room_is_left_alone() -> None:
    async with pair(device_blocks=12) as (_, decode):
        other = list(range(500, 516))
        running = await decode.admit(other)
        claiming = asyncio.create_task(claimed(decode))
        await until(lambda: decode.service.scheduler.num_waiting == 1, "a claim that waits")
        await decode.prefill(running, other)
        decode.service.scheduler.end(running)
        decode.service.scheduler.end(await finish(claiming))
        assert counts(decode) == (0, 0, BLOCKS + 1)
        await decode.settle()


async def test_a_claim_that_is_cancelled_anywhere_leaves_nothing(held_reads: Reads) -> None:
    async with pair() as (prefill, decode):
        claiming = asyncio.create_task(claimed(decode))
        await until(lambda: held_reads.num_begun == 1, "a read")
        claiming.cancel()
        await asyncio.wait([claiming])
        taken = 64 - decode.service.stats().device.free
        assert taken == BLOCKS  # the copy goes on: its slots are nobody else's yet
        assert decode.service.verify() == []
        held_reads.go.set()
        await decode.settle()
        assert decode.service.stats().device.free == 64
        for num_turns in range(0, 120, 3):
            name, prompt = f"claim {num_turns}", decode.prompt(TOKENS)
            waiting = asyncio.create_task(
                claim_request(decode.service, name, "ticket", prompt, max_new_tokens=1)
            )
            await turns(num_turns)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                decode.service.scheduler.end(waiting.result()[0])
            await decode.settle()
            decode.service.reset()
        await until(lambda: leases(prefill) == 0, "an end of what was held")
        await claim(decode)


@pytest.mark.parametrize("who", [0, 1], ids=["producer", "claimer"])
async def test_after_a_sleep_a_node_shows_and_fills_its_new_planes(who: int) -> None:
    async with pair() as both:
        prefill, decode = both
        await claim(decode)
        decode.service.reset()
        await both[who].service.sleep(keeps_blocks=False)
        await both[who].service.wake()
        await publish(prefill, ticket="again")
        await claim(decode, ticket="again")
        assert counts(decode)[:2] == (2 * BLOCKS, 0)


async def test_blocks_that_the_producer_has_on_its_host_only_come_from_storage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair() as (prefill, decode):
        await prefill.service.sleep()
        await prefill.service.wake()
        match = prefill.service.index.match(prefill.prompt(TOKENS))
        assert (match.device_blocks, match.host_blocks) == (0, BLOCKS)
        await claim(decode)
        assert counts(decode) == (0, 0, BLOCKS + 1)
    assert "could not be answered" not in caplog.text


async def test_a_device_that_failed_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (prefill, decode):
        monkeypatch.setattr(prefill.service.device, "failure", "fell off the bus")
        await claim(decode)
        assert counts(decode) == (0, 0, BLOCKS + 1)
        monkeypatch.undo()


async def test_a_device_that_fails_while_it_is_read_is_not_believed(held_reads: Reads) -> None:
    async with pair() as (prefill, decode):
        claiming = asyncio.create_task(claim(decode))
        await until(lambda: held_reads.num_begun == 1, "a read")
        prefill.service.device.failure = "fell off the bus"  # type: ignore[misc]
        held_reads.go.set()
        await finish(claiming)
        prefill.service.device.failure = None  # type: ignore[misc]
        assert counts(decode) == (0, 1, BLOCKS + 1)


async def shown(address: DirectAddress, machine: str, *, is_near: bool) -> int:
    """How many blocks of the device are shown to who asks so."""
    if is_near:
        streams = await finish(connect_near(address.name))
    else:
        streams = await finish(asyncio.open_connection(address.host, address.port))
    channel = Channel(*streams)
    await finish(channel.receive_nonce())
    ask = DirectAsk(offer=address.offer, first=0, stop=BLOCKS, machine=machine)
    await channel.send_ask(ask, address.secret)
    answer = await finish(channel.answer(address.secret))
    channel.close()
    assert (answer.planes is not None) == bool(answer.block_ids)
    return len(answer.block_ids)


async def test_planes_are_shown_to_processes_of_this_user_and_machine_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (prefill, _):
        address = (await ticket_of(prefill)).direct
        assert address is not None
        assert (address.place, address.pid) == ("cpu", 0)
        assert await shown(address, address.machine, is_near=True) == BLOCKS
        assert await shown(address, "elsewhere", is_near=True) == 0
        assert await shown(address, address.machine, is_near=False) == 0  # whoever that is
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        assert await shown(address, address.machine, is_near=True) == 0
        await until(lambda: leases(prefill) == 0, "an end of what was held")


_CONNECTS = """
import os, socket, sys
os.setuid(65534)
end = socket.socket(socket.AF_UNIX)
end.connect("\\0" + sys.argv[1])
end.recv(1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_the_kernel_says_who_is_at_the_other_end() -> None:
    seen: asyncio.Queue[int | None] = asyncio.Queue()

    def came(*streams: Any) -> None:
        channel = Channel(*streams)
        seen.put_nowait(channel.peer_uid)
        channel.close()

    here = near_listener(1)
    assert here is not None
    async with await asyncio.start_unix_server(came, sock=here):
        name = name_of(here)
        _, writer = await finish(connect_near(name))
        assert await finish(seen.get()) == 0
        writer.close()
        command = [sys.executable, "-c", _CONNECTS, name]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=200)
        assert await finish(seen.get()) == 65534


# What is open


def recorder(done: list[str]) -> Any:
    """A Sharing that notes what is opened, copied and closed."""

    def opened(_: Planes, shared: SharedPlanes) -> Any:
        def noted(what: str) -> Any:
            return lambda *_: done.append(f"{what} {shared.name}")

        noted("open")()
        return SimpleNamespace(copy=noted("copy"), close=noted("close"))

    return SimpleNamespace(place="cpu", open=opened)


def shared(owner: str, name: str) -> SharedPlanes:
    return SharedPlanes(owner=owner, name=name, place="cpu", num_blocks=4, planes=())


def test_planes_are_opened_once_and_closed_before_their_successors_are_opened() -> None:
    done, ids = list[str](), np.zeros(1, np.int32)
    ours = [CpuDevice().allocate_planes(GQA, 4) for _ in range(2)]
    own = [ours[0]]
    planes = OpenPlanes(recorder(done), lambda: own[0])
    for name in ("a1", "b1", "a1", "a2"):
        planes.copy(shared(name[0], name), ids, ids)
    opened = ["open a1", "copy a1", "open b1", "copy b1", "copy a1"]
    assert done == [*opened, "close a1", "open a2", "copy a2"]
    done.clear()
    own[0] = ours[1]  # they were made anew
    planes.copy(shared("b", "b1"), ids, ids)
    assert done == ["close b1", "open b1", "copy b1"]
    done.clear()
    planes.close_unused(60.0)
    assert done == []
    planes.close_unused(0.0)
    assert sorted(done) == ["close a2", "close b1"]
    assert planes.num_open == 0


async def test_planes_that_nobody_reads_any_more_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[SharedPlanes] = []
    open_planes = CpuSharing.open

    def recorded(self: CpuSharing, own: Planes, shared: SharedPlanes) -> Any:
        peer = open_planes(self, own, shared)
        monkeypatch.setattr(peer, "close", lambda: closed.append(shared))
        return peer

    monkeypatch.setattr(CpuSharing, "open", recorded)
    monkeypatch.setattr(landing, "CLOSE_UNUSED_S", 0.05)
    async with pair() as (prefill, decode):
        await claim(decode)
        await until(lambda: len(closed) == 1, "an end of what was open")
        decode.service.reset()
        await publish(prefill, ticket="again")
        await claim(decode, ticket="again")
        assert decode.service.stats().handoff.device_blocks == 2 * BLOCKS
    assert len(closed) == 2
