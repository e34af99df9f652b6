"""Values with a payload codec pass through all stores.

Values of the last release can be read. Values without a payload codec can be read by the last
release.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.redis_server import RedisServer
from tests.storage.test_format_document import KEY, SLOTS, TOKENS, digests, node, opened
from tests.storage.values import put_one
from tests.stored import stored_keys
from tierkv.cache.keys import Fingerprint, Names, Prompt, StoredKey
from tierkv.cache.layout import layered
from tierkv.clock import SystemClock
from tierkv.gpu.cpu import CpuHostSlots
from tierkv.storage.codec import (
    IDENTITY,
    PAYLOAD_CODECS,
    Damage,
    DamagedValueError,
    PayloadCodecs,
    PlainCodec,
    TenantCodecs,
    Trust,
    ValueIdentity,
    codec_for,
)
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.maintenance import verify
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Buffer, GetStatus, PutItem, PutStatus, Store
from tierkv.transfer.storage_io import StorageIO

NUMBER = 7
IDENTITY_OF_A = ValueIdentity(bytes(range(32)), bytes(range(32)), 16)
LONG = layered(16, [("key", "bfloat16", 4096), ("value", "bfloat16", 4096)], num_layers=2)


class Zlib:
    """A payload codec that compresses with zlib."""

    def encode(self, payload: Buffer) -> Buffer:
        return zlib.compress(payload, 1)

    def decode(self, stored: bytes, room: memoryview) -> int:
        inflater = zlib.decompressobj()
        try:
            content = inflater.decompress(stored, len(room))
        except zlib.error as error:
            raise DamagedValueError(Damage.CHECKSUM, f"it is no zlib stream: {error}") from error
        if inflater.unconsumed_tail or inflater.unused_data or not inflater.eof:
            raise DamagedValueError(Damage.LENGTH, f"it inflates to more than {len(room)} bytes")
        room[: len(content)] = content
        return len(content)


ZLIB = PayloadCodecs({NUMBER: Zlib()}, writes_with=NUMBER)


# The codec alone


@pytest.mark.parametrize("trust", Trust)
def test_a_payload_is_stored_shorter_and_comes_back_whole(trust: Trust) -> None:
    codec = codec_for(trust, bytes(32), ZLIB)
    content = b"much the same " * 1_000
    header, stored = codec.encode(content, IDENTITY_OF_A)
    assert memoryview(stored).nbytes < 200
    assert int.from_bytes(header[60:64], "little") == NUMBER
    room = memoryview(bytearray(20_000))
    room[: len(stored)] = stored
    assert codec.decode(header, room, IDENTITY_OF_A, num_bytes=len(stored)) == len(content)
    assert room[: len(content)] == content


@pytest.mark.parametrize("trust", Trust)
def test_a_payload_that_would_not_be_shorter_is_stored_as_it_is(trust: Trust) -> None:
    content = np.random.default_rng(1).bytes(5_000)
    header, stored = codec_for(trust, bytes(32), ZLIB).encode(content, IDENTITY_OF_A)
    assert int.from_bytes(header[60:64], "little") == IDENTITY
    room = memoryview(bytearray(stored))
    assert codec_for(trust, bytes(32)).decode(header, room, IDENTITY_OF_A) == len(content)
    assert room == content


def test_without_a_payload_codec_no_byte_of_a_payload_is_copied() -> None:
    content = bytearray(5_000)
    assert PlainCodec().encode(content, IDENTITY_OF_A)[1] is content
    assert PAYLOAD_CODECS.writes_with == IDENTITY


@pytest.mark.parametrize("trust", Trust)
def test_a_value_of_an_unknown_payload_codec_is_refused_by_its_number(trust: Trust) -> None:
    header, stored = codec_for(trust, bytes(32), ZLIB).encode(bytes(9_000), IDENTITY_OF_A)
    with pytest.raises(DamagedValueError, match="payload codec 7") as caught:
        codec_for(trust, bytes(32)).decode(header, memoryview(bytearray(stored)), IDENTITY_OF_A)
    assert caught.value.damage is Damage.VERSION


@pytest.mark.parametrize("trust", Trust)
@pytest.mark.parametrize("room_bytes", [100, 8_999])
def test_a_payload_that_is_longer_than_its_room_is_refused(trust: Trust, room_bytes: int) -> None:
    codec = codec_for(trust, bytes(32), ZLIB)
    header, stored = codec.encode(bytes(9_000), IDENTITY_OF_A)
    room = memoryview(bytearray(room_bytes))
    room[: len(stored)] = stored
    with pytest.raises(DamagedValueError, match="inflates") as caught:
        codec.decode(header, room, IDENTITY_OF_A, num_bytes=len(stored))
    assert caught.value.damage is Damage.LENGTH


@pytest.mark.parametrize("trust", Trust)
@pytest.mark.parametrize("num_bytes", [-88, -1, 0, 1])
def test_a_value_that_was_cut_is_damaged_whatever_its_room_holds(
    trust: Trust, num_bytes: int
) -> None:
    for payloads in (PAYLOAD_CODECS, ZLIB):
        codec = codec_for(trust, bytes(32), payloads)
        header, stored = codec.encode(bytes(9_000), IDENTITY_OF_A)
        room = memoryview(bytearray(9_000))
        room[: len(stored)] = stored
        with pytest.raises(DamagedValueError) as caught:
            codec.decode(header, room, IDENTITY_OF_A, num_bytes=num_bytes)
        assert caught.value.damage is Damage.LENGTH


# Through stores


@dataclass
class Place:
    """A store, and the blocks of one prompt in host slots. No codec makes two of them shorter."""

    store: Store
    trust: Trust
    payloads: PayloadCodecs = ZLIB
    host: CpuHostSlots = field(default_factory=lambda: CpuHostSlots(LONG, 12))
    io: StorageIO = field(init=False)
    keys: list[StoredKey] = field(init=False)

    def __post_init__(self) -> None:
        who = Fingerprint("model", LONG)
        names = Names("tierkv", who.short)
        self.keys = stored_keys(who.root(), Prompt.of(range(16 * 4 + 5), 16))
        self.io = StorageIO(
            self.store,
            names,
            LONG,
            self.host,
            block_ttl_s=None,
            codecs=TenantCodecs(self.trust, KEY, self.payloads),
        )
        rng = np.random.default_rng(5)
        self.host.array[:] = rng.integers(0, 4, self.host.array.shape, np.uint8)
        self.host.array[:2] = rng.integers(0, 256, self.host.array[:2].shape, np.uint8)

    async def flush(self) -> None:
        put = await self.io.flush(self.keys, np.arange(5, dtype=np.int32))
        assert {outcome.status for outcome in put} == {PutStatus.STORED}

    async def fetch(self) -> list[GetStatus]:
        """Fill slots 6 to 10 with other bytes, and read the prompt into them."""
        self.host.array[6:11] = 0xEE
        got = await self.io.fetch(self.keys, np.arange(6, 11, dtype=np.int32))
        return [outcome.status for outcome in got]


URLS = ("memory://", "file", "redis", "layered")


@asynccontextmanager
async def place(
    url: str, trust: Trust, tmp_path: Path, redis: RedisServer, payloads: PayloadCodecs = ZLIB
) -> AsyncIterator[Place]:
    files = (tmp_path / "values").as_uri()
    urls = {"file": files, "redis": redis.url, "layered": f"layered:memory://|{files}"}
    store = open_store(urls.get(url, url), StoreSettings(), SystemClock())
    here = Place(store, trust, payloads)
    async with store.running(), here.io.running():
        yield here


@pytest.mark.parametrize("trust", Trust)
@pytest.mark.parametrize("url", URLS)
async def test_blocks_and_tails_come_back_byte_for_byte_through_a_payload_codec(
    url: str, trust: Trust, tmp_path: Path, empty_redis: RedisServer
) -> None:
    async with place(url, trust, tmp_path, empty_redis) as here:
        await here.flush()
        stored = {v.name: v.num_bytes for v in (await here.store.list("tierkv", limit=99)).values}
        sizes = [stored[here.io.names.name(key)] for key in here.keys]
        assert min(sizes[:2]) > LONG.block_bytes > 2 * max(sizes[2:])
        for _ in range(2):  # the second time from the near store, if there is one
            assert await here.fetch() == [GetStatus.HIT] * 5
            assert np.array_equal(here.host.array[6:10], here.host.array[:4])
            tail = [LONG.cut_tail(here.host.array[slot], 5).tobytes() for slot in (4, 10)]
            assert tail[0] == tail[1]
        tail_key = here.keys[-1]
        assert tail_key.tail is not None
        found = await here.io.tails.best(tail_key.tail.parent, tail_key.tail.tokens, b"", "")
        assert found is not None
        assert found.key.digest == tail_key.digest
        verified = await verify(here.store, "tierkv", KEY)  # `verify` has no payload codec
        assert len(verified.damaged) in {3, 6}  # copies in near stores, too
        assert {"payload codec 7" in why for _, why in verified.damaged} == {True}


@pytest.mark.parametrize("num_bytes", [0, 1, LONG.block_bytes - 1, LONG.block_bytes + 1])
async def test_a_payload_of_another_length_than_the_slot_is_damage(num_bytes: int) -> None:
    here = Place(MemoryStore(MemorySettings(), SystemClock()), Trust.TRUSTED)
    async with here.store.running(), here.io.running():
        key = here.keys[0]
        identity = here.io.slices.identity(key, here.io.slices.parts[0].shard)
        for payloads in (ZLIB, PAYLOAD_CODECS):
            parts = PlainCodec(payloads).encode(bytes(num_bytes), identity)
            await here.store.put([PutItem(here.io.names.name(key), parts, keep_existing=False)])
            assert (await here.fetch())[0] is GetStatus.DAMAGED


async def test_nodes_with_and_without_a_payload_codec_share_what_both_can_read(
    tmp_path: Path, empty_redis: RedisServer
) -> None:
    """A reader with a codec reads values without one. A reader without the codec gets DAMAGED."""
    async with place("redis", Trust.TRUSTED, tmp_path, empty_redis, PAYLOAD_CODECS) as old:
        await old.flush()
        async with place("redis", Trust.TRUSTED, tmp_path, empty_redis) as new:
            assert await new.fetch() == [GetStatus.HIT] * 5
            await new.store.delete([new.io.names.name(key) for key in new.keys])
            await new.flush()
            assert (await old.fetch())[2:] == [GetStatus.DAMAGED] * 3


# Values of the release before payload codecs

RECORDED: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("recorded_values.json").read_text()
)


@pytest.mark.parametrize("payloads", [PAYLOAD_CODECS, ZLIB])
@pytest.mark.parametrize("trust", Trust)
async def test_values_of_the_last_release_are_read(trust: Trust, payloads: PayloadCodecs) -> None:
    async with node(1, trust, payloads) as one:
        for name, content in RECORDED[trust.value].items():
            await put_one(one.store, name, bytes.fromhex(content))
        await one.check_fetch()
        parent, tail = digests()[1:]
        wanted = np.array(TOKENS[8:], "<i4").tobytes()
        found = await one.io.tails.best(parent, wanted, b"", "")
        assert found is not None
        assert found.key.digest == tail


@pytest.mark.parametrize("trust", Trust)
async def test_the_last_release_can_read_what_is_written_now(trust: Trust) -> None:
    """The stored bytes are the same; values with a random nonce are compared after decryption."""
    async with node(1, trust) as one:
        one.fill_slots()
        await one.io.flush(one.stored_keys(), SLOTS)
        for name, recorded in RECORDED[trust.value].items():
            written = await one.store.get(name, max_bytes=1 << 20)
            assert written is not None
            old, digest = bytes.fromhex(recorded), bytes.fromhex(name.split(":")[2])
            if trust is not Trust.SEALED:
                assert written == old
            assert written[:72] == old[:72]
            assert opened(trust, digest, written) == opened(trust, digest, old)
