"""Reads by Mooncake's transfer engine: which of them are whole, and when nothing moves any more."""

# ruff: noqa: SLF001 - what is made without a server is made of its parts

from __future__ import annotations

import ctypes
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Semaphore, Thread
from typing import cast

import pytest

from tests.mooncake_server import MooncakeServer, module_mooncake  # noqa: F401 - a fixture
from tests.storage.values import content_of, landing
from tierkv.storage import mooncake_engine, mooncake_values
from tierkv.storage.codec import PlainCodec, PlainDigest
from tierkv.storage.mooncake_client import Client, Engine, Replica
from tierkv.storage.mooncake_engine import EngineReads, Place, open_engine, place_of
from tierkv.storage.mooncake_memory import KnownMemory
from tierkv.storage.mooncake_settings import MooncakeSettings
from tierkv.storage.mooncake_values import MooncakeValues
from tierkv.storage.protocol import GetItem, GetStatus, PutItem, PutStatus

_HALT_S = 0.5


@dataclass
class Slow:
    """An engine whose transfers end when they have been looked at a number of times.

    dead: providers that fail at once; frozen: after a halt; refused: those it cannot open.
    """

    memory: Mapping[str, bytes]
    num_looks: int = 3
    frozen_s: float = _HALT_S
    dead: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self._coming: dict[int, tuple[str, int, int, int, int, float]] = {}

    def initialize(self, *_: str) -> int:
        return 0

    def send_probe(self, endpoint: str) -> int:
        self.probed.append(endpoint)
        return 0

    def batch_transfer_async_read(
        self, endpoint: str, into: list[int], addresses: list[int], lengths: list[int]
    ) -> int:
        assert len(into) == len(addresses) == len(lengths) == 1, "it tells of the first one only"
        self.asked.append((endpoint, addresses[0], lengths[0]))
        if endpoint in self.refused:
            return 0
        serial = len(self.asked)
        looks = self.num_looks + serial % 3  # they do not end in the order they began
        at = time.monotonic()
        self._coming[serial] = endpoint, into[0], addresses[0], lengths[0], looks, at
        self.most = max(self.most, len(self._coming))
        return serial

    def transfer_check_status(self, serial: int) -> int:
        endpoint, into, address, length, looks, since = self._coming[serial]
        if endpoint in self.frozen and time.monotonic() - since < self.frozen_s:
            return 0
        if endpoint in self.frozen | self.dead:
            del self._coming[serial]
            return -1
        if looks:
            self._coming[serial] = endpoint, into, address, length, looks - 1, since
            return 0
        ctypes.memmove(into, self.memory[endpoint][address : address + length], length)
        del self._coming[serial]
        return 1

    @property
    def is_still(self) -> bool:
        return not self._coming


def wanted(endpoint: str, names: Sequence[str], size: int) -> list[tuple[Place, GetItem]]:
    """Values that lie one behind the other."""
    return [
        (Place(endpoint, at * size, size), landing(name, 8, size - 8)[0])
        for at, name in enumerate(names)
    ]


def content(item: GetItem) -> bytes:
    return b"".join(item.into)


NAMES = [f"t:f:{at:02}:0" for at in range(40)]
MEMORY = b"".join(content_of(name, 100) for name in NAMES)


def test_values_come_whole_and_no_more_pieces_at_a_time_than_there_should_be() -> None:
    engine = Slow({"here:1": MEMORY})
    values = wanted("here:1", NAMES, 100)
    outcomes = EngineReads(engine, halt_s=_HALT_S).read(values)
    assert [one.status for one in outcomes if one] == [GetStatus.HIT] * 40
    assert [content(item) for _, item in values] == [content_of(name, 100) for name in NAMES]
    assert engine.most == mooncake_engine._MAX_PIECES
    assert len(engine.asked) == 2 * 40, "each piece once"


def test_a_value_is_a_hit_only_if_each_of_its_pieces_has_come() -> None:
    """The payload of the second one lies where the provider has nothing to give."""

    class Torn(Slow):
        def transfer_check_status(self, serial: int) -> int:
            status = super().transfer_check_status(serial)
            return -1 if status == 1 and self.asked[serial - 1][1] == 108 else status

    engine = Torn({"here:1": MEMORY})
    outcomes = EngineReads(engine, halt_s=_HALT_S).read(wanted("here:1", NAMES[:3], 100))
    assert [one and one.status for one in outcomes] == [GetStatus.HIT, None, GetStatus.HIT]


@pytest.mark.parametrize("what", ["dead", "frozen", "refused"])
def test_of_two_providers_one_that_fails_costs_the_others_values_nothing(what: str) -> None:
    engine = Slow({"good:1": MEMORY, "bad:1": MEMORY})
    setattr(engine, what, frozenset({"bad:1"}))
    good, bad = wanted("good:1", NAMES[:20], 100), wanted("bad:1", NAMES[:20], 100)
    mixed = [one for pair in zip(good, bad, strict=True) for one in pair]
    outcomes = EngineReads(engine, halt_s=_HALT_S).read(mixed)
    assert [one and one.status for one in outcomes] == [GetStatus.HIT, None] * 20
    assert [content(item) for _, item in good] == [content_of(name, 100) for name in NAMES[:20]]
    assert engine.is_still, "nothing is written to a buffer that its owner has back"


def test_a_provider_that_was_silent_is_asked_for_nothing_more() -> None:
    """Each piece would wait as long again."""
    engine = Slow({}, frozen=frozenset({"bad:1"}))
    started = time.monotonic()
    outcomes = EngineReads(engine, halt_s=_HALT_S).read(wanted("bad:1", NAMES, 100))
    assert set(outcomes) == {None}
    assert len(engine.asked) == mooncake_engine._MAX_PIECES
    assert time.monotonic() - started < 8 * _HALT_S


def test_a_provider_is_met_once_and_one_that_hangs_meanwhile_holds_nobody_up() -> None:
    """The engine would wait for it for a minute, and for nobody else meanwhile."""
    go_on = Event()

    class Hangs(Slow):
        def send_probe(self, endpoint: str) -> int:
            super().send_probe(endpoint)
            if endpoint == "bad:1":
                go_on.wait(60)
                return -1
            return 0

    engine = Hangs({"good:1": MEMORY, "bad:1": MEMORY})
    reads = EngineReads(engine, halt_s=_HALT_S)
    both = wanted("bad:1", NAMES[:2], 100) + wanted("good:1", NAMES[:2], 100)
    started = time.monotonic()
    for _ in range(2):
        outcomes = reads.read(both)
        statuses = [None, None, GetStatus.HIT, GetStatus.HIT]
        assert [one and one.status for one in outcomes] == statuses
    assert time.monotonic() - started < 20 * _HALT_S
    assert sorted(engine.probed) == ["bad:1", "good:1"], "no second one behind one that hangs"
    assert {endpoint for endpoint, _, _ in engine.asked} == {"good:1"}
    go_on.set()
    while engine.probed.count("bad:1") < 2:  # it has failed, so that it is tried again
        assert time.monotonic() - started < 60
        assert [one and one.status for one in reads.read(both)][:2] == [None, None]
    assert engine.probed.count("good:1") == 1


def test_several_threads_that_meet_a_provider_send_one_probe() -> None:
    engine = Slow({"here:1": MEMORY})
    reads = EngineReads(engine, halt_s=_HALT_S)
    found: list[list[GetStatus]] = []

    def read() -> None:
        outcomes = reads.read(wanted("here:1", NAMES[:3], 100))
        found.append([one.status for one in outcomes if one])

    threads = [Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[GetStatus.HIT] * 3] * 8
    assert engine.probed == ["here:1"]


def test_a_value_of_which_one_piece_is_lost_is_not_asked_for_any_further() -> None:
    engine = Slow({}, refused=frozenset({"bad:1"}))
    EngineReads(engine, halt_s=_HALT_S).read(wanted("bad:1", NAMES[:3], 100))
    assert [address for _, address, _ in engine.asked] == [0, 100, 200]


def test_nor_is_one_of_which_a_piece_failed_on_its_way() -> None:
    engine = Slow({}, dead=frozenset({"bad:1"}))
    five = [
        (Place("bad:1", at * 100, 100), landing(name, *[20] * 5)[0])
        for at, name in enumerate(NAMES)
    ]
    assert set(EngineReads(engine, halt_s=_HALT_S).read(five)) == {None}
    assert len(engine.asked) < 5 * 40, "the rest of those that the first window cut"


def test_a_piece_that_takes_long_hides_no_others() -> None:
    """Of 40 values the last ones are asked for while the first one still hangs."""

    class Noting(Slow):
        asked_before_it_failed = 0

        def transfer_check_status(self, serial: int) -> int:
            status = super().transfer_check_status(serial)
            if status == -1 and not self.asked_before_it_failed:
                self.asked_before_it_failed = len(self.asked)
            return status

    engine = Noting({"good:1": MEMORY, "bad:1": MEMORY}, frozen_s=3.0, frozen=frozenset({"bad:1"}))
    outcomes = EngineReads(engine, halt_s=_HALT_S).read(
        wanted("bad:1", NAMES[:1], 100) + wanted("good:1", NAMES, 100)
    )
    assert [one and one.status for one in outcomes] == [None, *[GetStatus.HIT] * 40]
    assert engine.asked_before_it_failed == 2 * 41


def test_digests_are_made_while_other_values_come() -> None:
    codec = PlainCodec()
    header = bytearray(codec.header_bytes)
    payload = bytearray(64)
    item = GetItem(
        "t:f:a:0", (memoryview(header), memoryview(payload)), partial(codec.digest, header)
    )
    value = content_of("t:f:a:0", len(header) + 64)
    engine = Slow({"here:1": value})
    [outcome] = EngineReads(engine, halt_s=_HALT_S).read([(Place("here:1", 0, len(value)), item)])
    assert outcome is not None
    assert isinstance(outcome.digest, PlainDigest)
    expected = PlainDigest(header)
    expected.update(memoryview(value))
    assert outcome.digest.checksum() == expected.checksum()


@dataclass
class Described:
    """A client whose values are where it is told, and which reads none itself."""

    places: list[dict[str, Place]]  # what it says, the first time and after
    on_disk: frozenset[str] = frozenset()
    asked: list[list[str]] = field(default_factory=list)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [1] * len(keys)

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Replica]]:
        places = self.places.pop(0) if len(self.places) > 1 else self.places[0]
        return {
            key: [cast("Replica", Described.Copy(places[key], key in self.on_disk))]
            for key in keys
            if key in places
        }

    @dataclass
    class Copy:
        place: Place
        on_disk: bool

        def is_memory_replica(self) -> bool:
            return not self.on_disk

        def get_memory_descriptor(self) -> Described.Copy:
            assert not self.on_disk
            return self

        @property
        def buffer_descriptor(self) -> Described.Copy:
            return self

        @property
        def transport_endpoint(self) -> str:
            return self.place.endpoint

        @property
        def buffer_address(self) -> int:
            return self.place.address

        @property
        def size(self) -> int:
            return self.place.num_bytes

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self.asked.append(keys)
        for key, into, lengths in zip(keys, pointers, sizes, strict=True):
            at = 0
            for pointer, length in zip(into, lengths, strict=True):
                ctypes.memmove(pointer, content_of(key, 100)[at : at + length], length)
                at += length
        return [100] * len(keys)


def values_of(client: Described, engine: Engine) -> MooncakeValues:
    values = object.__new__(MooncakeValues)
    values._client = cast("Client", client)
    values._memory = KnownMemory(values._client, (), num_users=1)
    values._url = "mooncake://master:1"
    values._settings = MooncakeSettings()
    values._max_pieces = values._settings.max_pieces
    values._client_reads = Semaphore(1)
    values._engine = EngineReads(engine, halt_s=_HALT_S)
    return values


PLACES = {name: Place("here:1", at * 100, 100) for at, name in enumerate(NAMES)}


def test_what_the_engine_could_not_read_the_client_does() -> None:
    """A provider that came back elsewhere, one only a network card reaches, values on a disk."""
    client = Described([PLACES], on_disk=frozenset({NAMES[1]}))
    engine = Slow({"here:1": MEMORY})
    items = [landing(name, 8, 92)[0] for name in NAMES[:3]]
    values = values_of(client, engine)
    got = values.get([(item, 1) for item in items])
    assert [one.status for one in got] == [GetStatus.HIT] * 3
    assert client.asked == [[NAMES[1]]]
    engine.refused = frozenset({"here:1"})
    got = values.get([(item, 1) for item in items])
    assert [one.status for one in got] == [GetStatus.HIT] * 3
    assert client.asked == [[NAMES[1]], NAMES[:3]]
    assert [content(item) for item in items] == [content_of(name, 100) for name in NAMES[:3]]


def test_of_a_silent_provider_the_client_asks_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for it as long again, and hold the buffers."""
    monkeypatch.setattr(MooncakeSettings, "halt_s", property(lambda _: _HALT_S))
    client = Described([PLACES])
    engine = Slow({"here:1": MEMORY}, frozen=frozenset({"here:1"}))
    got = values_of(client, engine).get([(landing(name, 8, 92)[0], 1) for name in NAMES[:3]])
    assert {one.status for one in got} == {GetStatus.FAILED}
    assert all("does not answer" in one.reason for one in got)
    assert client.asked == []


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_value_whose_memory_was_given_away_while_it_came_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    """The master keeps it where it is for some seconds after it has said where; no question is
    asked again of a read that is quicker than that."""
    monkeypatch.setattr(mooncake_values, "_LEASE_S", -1.0 if is_slow else 60.0)
    moved = {**PLACES, NAMES[1]: Place("here:1", 3000, 100)}
    del moved[NAMES[2]]
    client = Described([PLACES, moved])
    values = values_of(client, Slow({"here:1": MEMORY}))
    got = values.get([(landing(name, 8, 92)[0], 1) for name in NAMES[:4]])
    kinds = [GetStatus.HIT, GetStatus.MISS, GetStatus.MISS, GetStatus.HIT]
    assert [one.status for one in got] == (kinds if is_slow else [GetStatus.HIT] * 4)
    assert client.asked == []


def test_a_value_of_another_size_is_damaged_and_read_by_nobody() -> None:
    client, engine = Described([PLACES]), Slow({"here:1": MEMORY})
    [got] = values_of(client, engine).get([(landing(NAMES[0], 8, 93)[0], 1)])
    assert got.status is GetStatus.DAMAGED
    assert "has 100 bytes, not 101" in got.reason
    assert (engine.asked, client.asked) == ([], [])


def test_what_the_master_says_is_not_there_is_asked_for_no_further() -> None:
    client, engine = Described([PLACES]), Slow({"here:1": MEMORY})
    items = [landing(name, 8, 92)[0] for name in NAMES[:3]]
    got = values_of(client, engine).get([(items[0], 0), (items[1], -900), (items[2], 1)])
    assert [one.status for one in got] == [GetStatus.MISS, GetStatus.FAILED, GetStatus.HIT]
    assert {address for _, address, _ in engine.asked} == {200, 208}


def test_the_real_engine_reads_what_the_real_client_wrote(
    module_mooncake: MooncakeServer,  # noqa: F811 - the fixture
) -> None:
    """And leaves the environment as it was, in which others look for a network card."""
    assert "MC_FORCE_TCP" not in os.environ
    engine = open_engine("127.0.0.1")
    assert engine is not None
    assert "MC_FORCE_TCP" not in os.environ
    values = MooncakeValues(
        ("127.0.0.1", module_mooncake.master_port), module_mooncake.url, MooncakeSettings()
    )
    name, size = "t:f:real:0", 3 << 20
    [stored] = values.put([(PutItem(name, (content_of(name, size),)), 0)])
    assert stored.status is PutStatus.STORED
    replicas = values._client.batch_get_replica_desc([name])[name]
    place = place_of(replicas)
    assert place is not None
    assert place.num_bytes == size
    item, _ = landing(name, 88, size - 88)
    [outcome] = EngineReads(engine, halt_s=2).read([(place, item)])
    assert outcome is not None
    assert content(item) == content_of(name, size)
    lost = Place(place.endpoint, 4096, size)
    assert EngineReads(engine, halt_s=2).read([(lost, item)]) == [None]
    values.close()


def test_without_an_engine_or_with_one_that_does_not_start_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Package:
        class TransferEngine(Slow):
            def __init__(self) -> None:
                super().__init__({})

            def initialize(self, *_: str) -> int:
                assert os.environ["MC_FORCE_TCP"] == "1"
                return -1

    monkeypatch.setenv("MC_FORCE_TCP", "0")
    monkeypatch.setattr(importlib, "import_module", lambda _: Package)
    assert open_engine("127.0.0.1") is None
    assert os.environ["MC_FORCE_TCP"] == "0", "as its owner has set it"

    def missing(_: str) -> object:
        raise ImportError

    monkeypatch.setattr(importlib, "import_module", missing)
    assert open_engine("127.0.0.1") is None
