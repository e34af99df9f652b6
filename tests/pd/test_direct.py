"""What may be read of a node's host tier, by whom and for how long, and what is done with bytes
that are not what was promised."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.latch import finish, turns, until
from tests.pd import nodes
from tests.pd.nodes import ROOM, TOKENS, claim, computed, leases, publish, settings, ticket_of
from tests.pd.test_streaming import prefilling
from tests.redis_server import PATIENT, redis_server
from tests.sessions import publish_request
from tests.world import World, background_tasks, world
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, HandoffError
from tierkv.gpu.protocol import SharedPlanes
from tierkv.pd.direct import direct
from tierkv.pd.direct.address import Channel, DirectAddress, DirectAnswer, DirectAsk, this_machine
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.pd.tickets import Standing
from tierkv.sched.budget import Budget
from tierkv.storage.codec import SealedCodec
from tierkv.storage.factory import open_store
from tierkv.storage.protocol import PutItem, PutOutcome, PutStatus
from tierkv.transfer.tier import StorageOptions

COUNT, BLOCKS = len(TOKENS), 10


@asynccontextmanager
async def pair(**there: Any) -> AsyncIterator[tuple[World, World]]:
    """The prefill node has published. there: of its HandoffSettings."""
    way = {"direct": DirectPath.AUTO}
    async with nodes.pair(settings(**(way | there)), settings(**way)) as both:
        await publish(both[0])
        yield both


async def address_of(node: World, ticket_id: str = "ticket") -> DirectAddress:
    address = (await ticket_of(node, ticket_id)).direct
    assert address is not None
    return address


@asynccontextmanager
async def connected(address: DirectAddress) -> AsyncIterator[Channel]:
    channel = Channel(*await asyncio.open_connection(address.host, address.port))
    try:
        await finish(channel.receive_nonce())
        yield channel
    finally:
        channel.close()


async def ask(
    channel: Channel, address: DirectAddress, first: int = 0, stop: int = BLOCKS
) -> DirectAnswer:
    await channel.send_ask(DirectAsk(offer=address.offer, first=first, stop=stop), address.secret)
    return await finish(channel.answer(address.secret))


async def is_hung_up_on(channel: Channel, address: DirectAddress) -> None:
    with pytest.raises((EOFError, OSError)):
        await finish(channel.answer(address.secret))


async def test_what_is_told_is_held_until_the_connection_ends() -> None:
    async with pair() as (prefill, _):
        address = await address_of(prefill)
        async with connected(address) as channel:
            answer = await ask(channel, address)
            assert answer.blocks == tuple(range(BLOCKS))
            assert leases(prefill) == 1
            assert prefill.service.verify() == []
            assert prefill.service.reset() > 0  # held: not forgotten
            assert (await ask(channel, address, first=3, stop=5)).blocks == (3, 4)
            assert leases(prefill) == 1  # the last question's only
        await until(lambda: leases(prefill) == 0, "an end of what was held")
        assert prefill.service.reset() == 0
        await prefill.settle()


@pytest.mark.promise("A producer answers only holders of the ticket.")
async def test_only_a_holder_of_the_ticket_is_told_anything() -> None:
    async with pair() as (prefill, _):
        await publish(prefill, ticket="other")
        address = await address_of(prefill)
        other = await address_of(prefill, "other")
        assert address.secret != other.secret
        for secret, offer in (
            (bytes(16), address.offer),
            (other.secret, address.offer),
            (address.secret, other.offer),
            (address.secret, "x"),
        ):
            wrong = msgspec.structs.replace(address, secret=secret)
            async with connected(wrong) as channel:
                await channel.send_ask(DirectAsk(offer=offer, first=0, stop=1), secret)
                await is_hung_up_on(channel, wrong)
        assert leases(prefill) == 0


async def test_a_question_that_is_played_again_is_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (prefill, _):
        address = await address_of(prefill)
        sent: list[bytes] = []
        write = asyncio.StreamWriter.write

        def noted(self: asyncio.StreamWriter, data: bytes) -> None:
            sent.append(data)
            write(self, data)

        for _ in range(2):  # the second time on another connection
            reader, writer = await asyncio.open_connection(address.host, address.port)
            channel = Channel(reader, writer)
            await finish(channel.receive_nonce())
            if not sent:
                with monkeypatch.context() as patch:
                    patch.setattr(writer, "write", partial(noted, writer))
                    await ask(channel, address)
            writer.write(sent[0])
            await is_hung_up_on(channel, address)
            channel.close()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 400])
async def test_noise_holds_nothing_and_harms_nobody(
    noise: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as a length it is longer than a frame may be: nobody waits for the rest of it."""
    monkeypatch.setattr(direct, "_FIRST_WORD_S", 3600.0)
    async with pair() as (prefill, decode):
        address = await address_of(prefill)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(noise)
        if noise:
            await finish(reader.read())  # the greeting, and the end
        writer.close()
        await claim(decode)
        assert decode.service.stats().handoff.memory_blocks == BLOCKS


@pytest.mark.promise("Bytes that changed since the ticket are fetched from storage.")
async def test_bytes_that_changed_since_are_fetched_from_storage() -> None:
    async with pair() as (prefill, decode):
        address = await address_of(prefill)
        source = decode.service.require_handoff().source
        with source.supply() as near:
            near.learn(await ticket_of(prefill))
            await finish(near.ask(decode.prompt(TOKENS)))
            async with connected(address) as channel:
                answer = await ask(channel, address)
                before = ctypes.string_at(answer.addresses[4], 8)
                ctypes.memset(answer.addresses[4], before[0] ^ 0xFF, 1)
                fetched = await finish(
                    decode.service.fetcher.fetch(decode.prompt(TOKENS), Budget(100.0))
                )
                assert fetched.first_problem is None
                fetched.release()
                ctypes.memmove(answer.addresses[4], before, 8)
        stats = decode.service.stats().handoff
        assert (stats.memory_blocks, stats.damaged_direct_blocks) == (BLOCKS - 1, 1)
        assert decode.storage_stats.fetched_blocks == 2  # that one, and the tail
        assert decode.storage_stats.damaged_blocks == 0  # what is stored is as it was
        await claim(decode)


async def test_a_question_that_was_cancelled_anywhere_can_be_asked_again() -> None:
    async with pair() as (prefill, decode):
        source = decode.service.require_handoff().source
        prompt = decode.prompt(TOKENS)
        for num_turns in range(30):
            with source.supply() as near:
                near.learn(await ticket_of(prefill))
                asking = asyncio.create_task(near.ask(prompt))
                await turns(num_turns)
                asking.cancel()
                await asyncio.wait([asking])
                await finish(near.ask(prompt))
                assert source.num_offered == BLOCKS
        await until(lambda: leases(prefill) == 0, "an end of what was held")
        await claim(decode)


async def test_a_ticket_that_was_claimed_opens_nothing_any_more() -> None:
    async with pair() as (prefill, decode):
        address = await address_of(prefill)
        await claim(decode)
        ledger = prefill.service.require_handoff().ledger
        await until(lambda: ledger.num_holds == 0, "the acknowledgement")
        async with connected(address) as channel:
            assert (await ask(channel, address)).blocks == ()
        assert leases(prefill) == 0


async def test_a_prompt_whose_ticket_is_not_written_is_offered_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(with_store=True, handoff=settings(direct=DirectPath.AUTO), **ROOM) as node:
        put = node.the_store.put

        async def no_ticket(items: Sequence[PutItem]) -> list[PutOutcome]:
            if any(":ticket:" in item.name for item in items):
                return [PutOutcome(PutStatus.FULL, "no ticket is taken")] * len(items)
            return await put(items)

        monkeypatch.setattr(node.the_store, "put", no_ticket)
        request = await computed(node, TOKENS)
        with pytest.raises(HandoffError):
            await finish(publish_request(node.service, request, "ticket", [1]))
        assert node.service.require_handoff().ledger.num_holds == 0
        await node.ended(request)


async def test_blocks_that_are_gone_from_the_host_are_not_told() -> None:
    async with pair() as (prefill, decode):
        address = await address_of(prefill)
        prefill.service.reset()
        async with connected(address) as channel:
            assert (await ask(channel, address)).blocks == ()
        await claim(decode)
        assert decode.storage_stats.fetched_blocks == BLOCKS + 1


async def test_blocks_that_storage_had_before_are_on_the_host_for_claimers_too() -> None:
    async with pair() as (prefill, _):
        prefill.service.reset()
        request = await prefill.admit(TOKENS, uses_cache=False)
        await prefill.prefill(request, TOKENS)
        published = await finish(publish_request(prefill.service, request, "again", [1]))
        assert published.flushed_bytes == 0
        await until(lambda: not prefill.service.tiers.copies.num_offloads, "the copies to the host")
        address = await address_of(prefill, "again")
        async with connected(address) as channel:
            assert (await ask(channel, address)).blocks == tuple(range(BLOCKS))
        await prefill.ended(request)


async def test_a_question_for_what_does_not_exist_is_answered_with_nothing() -> None:
    async with pair() as (prefill, _):
        address = await address_of(prefill)
        async with connected(address) as channel:
            for first, stop in ((BLOCKS, BLOCKS + 5), (-1, 5), (5, 5), (0, 1 << 40)):
                assert (await ask(channel, address, first=first, stop=stop)).blocks == ()
            assert len((await ask(channel, address, stop=99)).blocks) == BLOCKS


async def test_a_node_that_ends_hangs_up_on_its_claimers() -> None:
    before = background_tasks()
    async with pair() as (prefill, _):
        address = await address_of(prefill)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        channel = Channel(reader, writer)
        await finish(channel.receive_nonce())
        await ask(channel, address)
    await is_hung_up_on(channel, address)  # and its books were in order
    writer.close()
    await until(lambda: background_tasks() == before, "the end of every task")
    with pytest.raises(OSError, match="refused"):
        await asyncio.open_connection(address.host, address.port)


async def test_by_itself_a_node_listens_for_this_machine_only_and_only_once_it_publishes() -> None:
    async with pair() as (prefill, _):
        address = await address_of(prefill)
        assert (address.host, address.engine) == ("127.0.0.1", "")
        assert address.machine == await asyncio.to_thread(this_machine)


async def test_blocks_that_storage_may_not_see_are_not_shown() -> None:
    """Whoever reads the store reads the ticket too."""
    sealed = StorageOptions(codecs=lambda _: SealedCodec(bytes(32)))
    async with world(with_store=True, storage=sealed) as node:
        await publish(node)
        assert (await ticket_of(node)).direct is None


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"direct": DirectPath.NETWORK}, "direct_host"),
        ({"direct_host": "0.0.0.0"}, "other machines cannot reach"),
        ({"direct_host": "prefill.example"}, "IP address"),
        ({"direct_port": 70_000}, "direct_port"),
        ({"direct_lease_s": 0.0}, "direct_lease_s"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HandoffSettings(**fields)


async def test_a_port_that_is_taken_only_costs_the_direct_path() -> None:
    taken = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with taken, pair(direct_port=port) as (prefill, decode):
        assert (await ticket_of(prefill)).direct is None
        await claim(decode)


async def test_what_came_straight_from_the_producer_counts_apart_from_storage() -> None:
    async with pair() as (_, decode):
        request = await nodes.claimed(decode)
        tail = COUNT % request.spec.prompt.block_size
        matched = request.matched
        assert (matched.direct_tokens, matched.storage_tokens) == (COUNT - tail, tail)
        assert matched.total_tokens == COUNT
        counts = decode.service.stats().requests
        assert (counts.direct_hit_tokens, counts.storage_hit_tokens) == (COUNT - tail, tail)
        decode.service.scheduler.end(request)


async def test_an_unexpected_error_costs_the_claimer_its_connection_and_ends_no_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> bytes:
        raise RuntimeError("a fault of a library")

    async with pair() as (prefill, decode):
        with monkeypatch.context() as patch:
            patch.setattr(direct.DirectServer, "_header", fails)
            address = await address_of(prefill)
            async with connected(address) as channel:
                ask_all = DirectAsk(offer=address.offer, first=0, stop=BLOCKS)
                await channel.send_ask(ask_all, address.secret)
                await is_hung_up_on(channel, address)
        assert leases(prefill) == 0
        assert prefill.service.failure is None
        async with connected(address) as channel:
            assert (await ask(channel, address)).blocks == tuple(range(BLOCKS))
        await claim(decode)


async def test_a_failure_that_a_full_store_does_not_take_is_told_by_the_producer() -> None:
    """The claim does not wait for its deadline of 100 s."""
    with redis_server("--maxmemory-policy", "noeviction") as server:
        direct = settings(direct=DirectPath.AUTO)
        prefill_node, decode_node = (
            world(store=open_store(server.url, PATIENT, SystemClock()), handoff=direct)
            for _ in range(2)
        )
        async with prefill_node as prefill, decode_node as decode:
            async with prefilling(prefill, TOKENS) as computing:
                claiming = asyncio.create_task(nodes.claimed(decode, ticket="t"))
                await computing.compute(8)
                while (await decode.service.ticket_state("t")).state is not Standing.OPEN:
                    await turns(3)
                server.execute("CONFIG", "SET", "maxmemory", "1")
                await computing.rest()
                with pytest.raises(HandoffError, match=r"gave up: .*OOM") as caught:
                    async with asyncio.timeout(20):
                        await claiming
            assert caught.value.reason == "producer_failed"
            server.execute("CONFIG", "SET", "maxmemory", "0")
            async with prefilling(prefill, TOKENS) as computing:  # the same offer is open again
                again = asyncio.create_task(nodes.claimed(decode, ticket="t", name="again"))
                await computing.compute(COUNT)
                await asyncio.wait([again], timeout=0.1)
                computing.stream.finish([42])
                await decode.ended(await again)


@pytest.mark.parametrize("blocks", [(4,), (0, -1), (1 << 40,)])
def test_an_answer_names_only_blocks_of_the_device_that_it_shows(blocks: tuple[int, ...]) -> None:
    shown = SharedPlanes(owner="o", name="n", place="cpu", num_blocks=4, planes=())
    assert DirectAnswer(planes=shown, block_ids=(0, 3)).block_ids == (0, 3)
    with pytest.raises(ValueError, match="beyond the device"):
        DirectAnswer(planes=shown, block_ids=blocks)
    with pytest.raises(ValueError, match="beyond the device"):
        DirectAnswer(block_ids=(0,))


def test_an_answer_says_as_much_of_each_block() -> None:
    with pytest.raises(ValueError, match="per block"):
        DirectAnswer(blocks=(1, 2), addresses=(1,), headers=(b"",))
