"""Cache events over ZeroMQ, read by a router that knows the published format, not tierkv."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.api.nodes import process, run_to_end
from tests.embed.test_groups import FULL, WINDOW, Hybrid, hybrid, tokens_of
from tests.latch import PATIENCE_S, finish, until
from tests.redis_server import free_port
from tests.world import World, tokens, world
from tierkv.api.settings import NodeSettings
from tierkv.cache.eviction import WritePolicy
from tierkv.config import load
from tierkv.errors import BadRequestError, ConfigError
from tierkv.service.kv_events import EventForm, EventsSection, KvEventPublisher

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

END = (-1).to_bytes(8, "big", signed=True)
THROUGH = WritePolicy.WRITE_THROUGH


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """As the format says: a map with its type, or the fields in order."""


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    rank: int | None = None


@dataclass
class Router:
    """Keeps which blocks are on which medium. number: of the last batch."""

    socket: Any
    topic: bytes = b""
    number: int = -1
    gaps: int = 0
    blocks: dict[str, set[bytes | int]] = field(default_factory=dict)
    stored: list[BlockStored] = field(default_factory=list)
    num_cleared: int = 0

    async def read(self) -> None:
        self.topic, number, batch = await finish(self.socket.recv_multipart())
        self.take(int.from_bytes(number, "big"), batch)

    def take(self, number: int, batch: bytes) -> None:
        self.gaps += self.number >= 0 and number != self.number + 1
        self.number = number
        for event in msgspec.msgpack.decode(batch, type=Batch).events:
            if isinstance(event, BlockStored):
                self.blocks.setdefault(str(event.medium), set()).update(event.block_hashes)
                self.stored.append(event)
            elif isinstance(event, BlockRemoved):
                self.blocks.setdefault(str(event.medium), set()).difference_update(
                    event.block_hashes
                )
            else:
                self.blocks.clear()
                self.num_cleared += 1

    async def until(self, medium: str, count: int) -> None:
        while len(self.blocks.get(medium, ())) != count:
            await self.read()


@asynccontextmanager
async def router(endpoint: str) -> AsyncIterator[Router]:
    with zmq_asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        yield Router(socket)


@asynccontextmanager
async def publishing(
    folder: Path, here: World, **settings: Any
) -> AsyncIterator[tuple[Router, KvEventPublisher]]:
    """A publisher of that world's events, and a router that hears all from now on."""
    endpoint = f"ipc://{folder}/events"
    publisher = here_publisher(here, EventsSection(endpoint=endpoint, **settings))
    service = here.service
    async with router(endpoint) as reader, publisher.running(service.events, service.index):
        first = asyncio.create_task(reader.read())
        base = 10_000
        while not first.done():  # a subscription takes a moment to arrive
            await here.run(tokens(5, base))
            base += 5
            await asyncio.sleep(0.01)
        await here.run(tokens(14, 90_000))  # the last blocks: three at once
        await here.settle()
        while not any(len(event.block_hashes) == 3 for event in reader.stored):
            await reader.read()
        while here.service.stats().device.used:
            await here.service.forget()
        await reader.until("GPU", 0)
        while here.service.stats().host.used:
            await here.service.forget()
        await reader.until("CPU", 0)
        yield Router(reader.socket, number=reader.number), publisher


def here_publisher(here: World, settings: EventsSection) -> KvEventPublisher:
    return KvEventPublisher(settings, "node-a", {"": here.service.fingerprint})


async def test_each_block_hangs_at_the_one_before_it_with_its_tokens(tmp_path: Path) -> None:
    async with (
        world(device_blocks=32) as here,
        publishing(tmp_path, here, token_ids=True) as (reader, _),
    ):
        await here.run(tokens(18))
        await here.run([*tokens(8), *tokens(12, 900)])
        await reader.until("GPU", 4 + 3)
        prefix: dict[bytes | int | None, list[int]] = {None: []}
        for event in reader.stored:
            parent, size = event.parent_block_hash, event.block_size
            for at, digest in enumerate(event.block_hashes):
                prefix[digest] = prefix[parent] + event.token_ids[at * size : (at + 1) * size]
                parent = digest
        told = sorted(prefix.values())
        assert tokens(16) in told
        assert [*tokens(8), *tokens(12, 900)] in told


@pytest.mark.promise("KV events carry tokens only if asked for.")
@pytest.mark.promise("A KV event names the session that computed the blocks.")
async def test_blocks_are_published_with_the_session_of_their_turn_and_unasked_without_tokens(
    tmp_path: Path,
) -> None:
    async with (
        world(device_blocks=16, with_store=True, host_write=THROUGH) as here,
        publishing(tmp_path, here) as (reader, _),
    ):
        await here.run(tokens(8))
        await reader.until("GPU", 2)
        reader.stored.clear()
        request = await here.admit(tokens(18), session_id="s")
        await here.prefill(request, tokens(18))
        await here.ended(request)
        await reader.until("GPU", 4)
        await reader.until("CPU", 4)
        seen = {(event.medium, event.session_id) for event in reader.stored}
        assert seen == {("GPU", "s"), ("CPU", None)}
        assert not any(event.token_ids for event in reader.stored)


async def test_the_older_form_has_fields_in_order_and_numbers_for_keys(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    told: list[list[Any]] = []
    async with world(device_blocks=64) as here, router(endpoint) as reader:
        settings = EventsSection(endpoint=endpoint, form=EventForm.ARRAY, token_ids=True)
        publisher = here_publisher(here, settings)

        async def turn() -> None:
            request = await here.admit(tokens(8), session_id="s")  # the form has no such field
            await here.prefill(request, tokens(8))
            await here.ended(request)

        async with publisher.running(here.service.events, here.service.index):
            await until(lambda: here.service.events.has_listeners, "a publisher that listens")
            hearing = asyncio.ensure_future(reader.socket.recv_multipart())
            while not hearing.done():  # a subscription takes a moment to arrive
                await turn()
                await here.service.forget()
                await asyncio.sleep(0.01)
            told += msgspec.msgpack.decode((await hearing)[2])[1]
            await turn()
            while not any(event[0] == "BlockStored" for event in told):
                told += msgspec.msgpack.decode((await finish(reader.socket.recv_multipart()))[2])[1]
        while ["AllBlocksCleared"] not in told:
            told += msgspec.msgpack.decode((await finish(reader.socket.recv_multipart()))[2])[1]
    kind, hashes, parent, ids, size, *rest = next(one for one in told if one[0] == "BlockStored")
    assert (kind, parent, ids, size) == ("BlockStored", None, tokens(8), 4)
    assert [type(one) for one in hashes] == [int, int]
    assert rest == [None, "GPU", None]


@pytest.mark.promise("Missed KV events are replayed; after lost ones the full state follows.")
async def test_what_was_missed_is_replayed(tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    async with (
        world(device_blocks=64) as here,
        publishing(tmp_path, here, replay=replay) as (reader, _),
    ):
        await here.run(tokens(16))
        await reader.until("GPU", 4)
        missed_from = reader.number + 1
        await here.run(tokens(16, 100))
        await here.run(tokens(16, 200))
        await reader.until("GPU", 12)
        late = Router(None)
        with zmq_asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(replay)
            await asking.send_multipart([b"", b"no number"])  # refused, and nobody is hurt
            await asking.send_multipart([b"", missed_from.to_bytes(8, "big")])
            while True:
                _, topic, number, batch = await finish(asking.recv_multipart())
                if number == END:
                    break
                assert topic == reader.topic
                late.take(int.from_bytes(number, "big"), batch)
        assert (late.number, late.gaps) == (reader.number, 0)
        assert len(late.blocks["GPU"]) == 8


# An engine that gives its blocks names of its own

GROUPS = [WINDOW, FULL]  # the index is not that of the first


def names_of(length: int, group: int, base: int = 0) -> list[bytes]:
    """What an engine calls the full blocks of a prompt."""
    count = length // GROUPS[group].block_size
    return [bytes([group]) * 24 + (base + at).to_bytes(8, "big") for at in range(count)]


def all_names(length: int, base: int = 0) -> list[list[bytes]]:
    return [names_of(length, group, base) for group in range(len(GROUPS))]


@dataclass
class Heard:
    """All that a router is told, by a plain socket."""

    socket: Any
    told: list[Any] = field(default_factory=list)

    def until(self, is_enough: Callable[[], bool], unpack: Any = Batch) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_enough():
            assert time.monotonic() < end, self.told
            if self.socket.poll(50):
                _, _, batch = self.socket.recv_multipart()
                if unpack is Batch:
                    self.told += msgspec.msgpack.decode(batch, type=Batch).events
                else:
                    self.told += msgspec.msgpack.decode(batch)[1]


@contextmanager
def engine_telling(
    folder: Path, form: EventForm = EventForm.MAP, **more: Any
) -> Iterator[tuple[Hybrid, Heard]]:
    """An engine in this process, and a router that hears all from now on."""
    section = EventsSection(endpoint=f"ipc://{folder}/events", form=form, token_ids=True)
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
        hybrid(GROUPS, kv_events=section, **more) as engine,
    ):
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"")
        socket.connect(section.endpoint)
        number = 500
        while not socket.poll(10):  # a subscription takes a moment to arrive
            engine.save(tokens_of(8, number))
            number += 1
        engine.cache.reset().wait(PATIENCE_S)
        while socket.poll(200):
            socket.recv_multipart()
        yield engine, Heard(socket)


@pytest.mark.promise("KV events carry an engine's own hashes.")
def test_an_engines_own_hashes_are_what_routers_are_told(tmp_path: Path) -> None:
    tokens = tokens_of(18)
    names = [[*names_of(18, group), None] for group in range(len(GROUPS))]
    with engine_telling(tmp_path) as (engine, heard):
        engine.save(tokens, external_ids=names)

        def stored(group: int) -> list[BlockStored]:
            found = [one for one in heard.told if isinstance(one, BlockStored)]
            return [one for one in found if one.group_idx == group]

        heard.until(lambda: sum(len(one.block_hashes) for one in heard.told) == 8)
        assert [len(one.block_hashes) for one in stored(1)] == [4]
        [full] = stored(1)
        assert (full.block_hashes, full.parent_block_hash) == (names_of(18, 1), None)
        assert (full.token_ids, full.block_size, full.medium) == (tokens[:16], 4, "CPU")
        assert (full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == (
            "full_attention",
            None,
        )
        windows = {one.block_hashes[0]: one for one in stored(0)}
        assert sorted(windows) == names_of(18, 0)
        last = windows[names_of(18, 0)[-1]]
        assert last.parent_block_hash == names_of(18, 0)[-2]
        assert (last.kv_cache_spec_kind, last.kv_cache_spec_sliding_window) == ("sliding_window", 8)
        longer = [*tokens[:16], *tokens_of(4, 9)]
        engine.save(longer, external_ids=all_names(20))
        heard.until(lambda: stored(1)[-1].parent_block_hash is not None)
        assert stored(1)[-1].parent_block_hash == full.block_hashes[-1]
        heard.told.clear()
        engine.cache.reset().wait(PATIENCE_S)
        heard.until(lambda: sum(len(one.block_hashes) for one in heard.told) == 10)
        gone = {
            (one.group_idx, name)
            for one in heard.told
            if isinstance(one, BlockRemoved)
            for name in one.block_hashes
        }
        assert gone == {(group, name) for group in range(2) for name in names_of(20, group)}


def test_blocks_that_come_from_storage_have_the_names_that_the_lookup_gave(tmp_path: Path) -> None:
    store, tokens = (tmp_path / "store").as_uri(), tokens_of(16)
    with hybrid(GROUPS, store) as first:
        first.save(tokens)
    with engine_telling(tmp_path, store=store) as (engine, heard):
        with pytest.raises(BadRequestError, match="each of 2 groups"):
            engine.cache.lookup("b", engine.prompt(tokens), external_ids=[[]])
        found = engine.lookup("b", tokens, external_ids=all_names(40))  # more than there are
        assert found.num_tokens == 16

        def told(medium: str) -> list[Any]:
            events = [one for one in heard.told if one.group_idx == 1 and one.medium == medium]
            return [name for one in events for name in one.block_hashes]

        heard.until(lambda: bool(told("CPU") and told("STORAGE")))
        assert told("CPU") == told("STORAGE") == names_of(16, 1)
        engine.cache.release("b")


@pytest.mark.parametrize("form", [EventForm.ARRAY, EventForm.MAP_INT])
def test_names_are_numbers_where_routers_want_them(tmp_path: Path, form: EventForm) -> None:
    names: list[list[Any]] = all_names(16)
    names[1] = [*names[1][:2], 1 << 63, "a text"]
    with engine_telling(tmp_path, form) as (engine, heard):
        engine.save(tokens_of(16), external_ids=names)
        of_full: list[Any] = []

        def is_told() -> bool:
            maps = [one for one in heard.told if isinstance(one, dict)]
            arrays = [one for one in heard.told if isinstance(one, list) and len(one) > 9]
            of_full[:] = [one["block_hashes"] for one in maps if one.get("group_idx") == 1]
            of_full.extend(one[1] for one in arrays if one[8:11] == [None, 1, "full_attention"])
            return bool(of_full)

        heard.until(is_told, unpack=None)
        assert of_full == [[0, 1, 1 << 63, int.from_bytes(b"a text", "big")]]


async def test_a_node_publishes_and_its_end_clears_all(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    settings = tmp_path / "node.toml"
    settings.write_text(f'[events]\nendpoint = "{endpoint}"\n[node]\nname = "pod"\n')
    async with router(endpoint) as reader, process(tmp_path, "--config", settings) as node:
        hearing = asyncio.create_task(reader.read())
        while not hearing.done():
            await node.client.post("/v1/generate", {"prompt": f"{len(reader.stored)}" * 40})
            await node.client.ask("DELETE", "/v1/blocks")
        assert reader.topic == b"kv@pod@tierkv-ref-tiny"
        node.terminate()
        while not reader.num_cleared or reader.blocks:
            await reader.read()
        assert await node.ended() == 0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('endpoint = "tcp://*:5557"', "can be reached from other machines"),
        ('endpoint = "tcp://10.1.2.3:5557"', "can be reached from other machines"),
        ('endpoint = "ipc:///tmp/a"\nreplay = "tcp://[::]:1"', "can be reached from other"),
        ('endpoint = "http://127.0.0.1:1"', "is not an address to listen on"),
        ('replay = "tcp://127.0.0.1:1"', "events.replay needs events.endpoint"),
        ('endpoint = "tcp://127.0.0.1:1"\nform = "list"', "events.form"),
    ],
)
def test_wrong_settings_are_one_sentence(table: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f"[events]\n{table}\n")
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(NodeSettings, file, {})


def test_other_machines_may_read_where_that_is_allowed() -> None:
    given = {"TIERKV_EVENTS__ENDPOINT": "tcp://*:5557", "TIERKV_NODE__ALLOW_INSECURE_BIND": "true"}
    assert load(NodeSettings, None, given).events.endpoint == "tcp://*:5557"


async def test_an_address_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq_asyncio.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind(endpoint)
        status, _, err = await run_to_end(
            tmp_path, "serve", "--port", "0", TIERKV_EVENTS__ENDPOINT=endpoint
        )
    assert status == 1
    assert f"error: the node cannot listen on events.endpoint {endpoint}" in err
    assert "Traceback" not in err
