"""Puts into Mooncake in three steps: nothing is seen before it is whole, no name stays taken."""

# ruff: noqa: SLF001 - what is kept of a master that was gone is kept inside

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from tests.mooncake_server import mooncake_server
from tests.storage.values import content_of, landing
from tierkv.storage import mooncake_puts
from tierkv.storage.mooncake_client import Client, Config
from tierkv.storage.mooncake_memory import KnownMemory
from tierkv.storage.mooncake_puts import EXISTS, TOO_LATE, Puts
from tierkv.storage.mooncake_settings import MooncakeSettings
from tierkv.storage.mooncake_values import MooncakeValues
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus

_CONFIG = cast("Config", object())
_GONE = -900
_TORN = -800


@dataclass
class Sessions:
    """A client with Mooncake's rules: one session for a name, which ends or is revoked.

    torn: names whose bytes do not arrive. is_gone: the master.
    """

    there: dict[str, bytes] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)
    torn_status: int = _TORN
    is_gone: bool = False
    on_send: Callable[[], None] = lambda: None
    calls: list[tuple[str, list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions: dict[str, bytearray] = {}

    def batch_put_session_start(self, keys: list[str], sizes: list[int], _: Config) -> list[int]:
        self.calls.append(("start", keys))
        statuses = []
        for key, size in zip(keys, sizes, strict=True):
            if key in self.sessions:
                statuses.append(-600)
            elif self.is_gone:
                statuses.append(_GONE)
            elif key in self.there:
                statuses.append(EXISTS)
            else:
                self.sessions[key] = bytearray(size)
                statuses.append(0)
        return statuses

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        pointers: list[list[int]],
        sizes: list[list[int]],
        offsets: list[list[int]],
    ) -> list[int]:
        self.calls.append(("send", keys))
        self.on_send()
        statuses = []
        for key, some, lengths, places in zip(keys, pointers, sizes, offsets, strict=True):
            for pointer, length, place in zip(some, lengths, places, strict=True):
                self.sessions[key][place : place + length] = ctypes.string_at(pointer, length)
            statuses.append(self.torn_status if key in self.torn else sum(lengths))
        return statuses

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        self.calls.append(("end", keys))
        if self.is_gone:
            return [_GONE] * len(keys)
        for key in keys:
            self.there[key] = bytes(self.sessions.pop(key))
        return [0] * len(keys)

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        self.calls.append(("revoke", keys))
        if self.is_gone:
            return [_GONE] * len(keys)
        for key in keys:
            del self.sessions[key]
        return [0] * len(keys)


def puts_of(client: Sessions, num_sending: int = 1) -> Puts:
    known = cast("Client", client)
    return Puts(known, KnownMemory(known, (), num_users=4), num_sending=num_sending)


def pieces(name: str) -> list[memoryview]:
    content = content_of(name, 50)
    return [memoryview(content[:8]), memoryview(content[8:30]), memoryview(content[30:])]


def put(puts: Puts, *names: str) -> list[int]:
    return puts.put(names, [pieces(name) for name in names], _CONFIG)


def test_a_value_is_there_with_all_its_pieces_in_order_and_not_before_they_have_arrived() -> None:
    client = Sessions()
    seen: list[int] = []
    client.on_send = lambda: seen.append(len(client.there))
    assert put(puts_of(client), "a", "b") == [0, 0]
    assert client.there == {name: content_of(name, 50) for name in "ab"}
    assert seen == [0]
    assert [what for what, _ in client.calls] == ["start", "send", "end"]


@pytest.mark.parametrize("status", [_TORN, 49])
def test_one_that_is_torn_is_taken_back_and_costs_the_others_nothing(status: int) -> None:
    """Or of which fewer bytes went than it has."""
    client = Sessions(torn={"b"}, torn_status=status)
    puts = puts_of(client)
    assert put(puts, "a", "b", "c") == [0, status, 0]
    assert set(client.there) == {"a", "c"}
    assert client.sessions == {}
    client.torn.clear()
    assert put(puts, "b") == [0], "its name is free again"


def test_what_is_there_already_is_neither_sent_nor_touched() -> None:
    client = Sessions({"a": b"first"})
    assert put(puts_of(client), "a", "b") == [EXISTS, 0]
    assert client.there["a"] == b"first"
    assert client.calls[1:] == [("send", ["b"]), ("end", ["b"])]


def test_a_name_given_twice_is_put_once() -> None:
    client = Sessions()
    assert put(puts_of(client), "a", "a", "b") == [0, EXISTS, 0]
    assert client.calls[0] == ("start", ["a", "b"])


def test_a_name_that_another_call_is_putting_is_left_to_it_at_once() -> None:
    client = Sessions()
    puts = puts_of(client)
    inner: list[int] = []
    client.on_send = lambda: inner.extend(put(puts, "a")) if not inner else None
    assert put(puts, "a") == [0]
    assert inner == [EXISTS]
    assert put(puts, "a") == [EXISTS], "there by now"


def test_what_goes_wrong_on_the_way_leaves_nothing_behind() -> None:
    client = Sessions()
    puts = puts_of(client)

    def fails() -> None:
        raise MemoryError

    client.on_send = fails
    with pytest.raises(MemoryError):
        put(puts, "a", "b")
    assert client.sessions == {}
    client.on_send = lambda: None
    assert put(puts, "a", "b") == [0, 0]


def test_a_start_that_goes_wrong_leaves_the_names_free(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Sessions()
    puts = puts_of(client)

    def fails(*_: object) -> list[int]:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(client, "batch_put_session_start", fails)
        with pytest.raises(MemoryError):
            put(puts, "a")
    assert put(puts, "a") == [0]


def test_of_a_master_that_is_gone_nothing_is_sent_to_anybody() -> None:
    client = Sessions(is_gone=True)
    puts = puts_of(client)
    assert put(puts, "a") == [_GONE]
    assert client.calls == [("start", ["a"])]
    client.is_gone = False
    assert put(puts, "a") == [0]


@pytest.mark.parametrize("is_torn", [True, False])
def test_what_could_not_end_ends_when_the_master_is_back(
    monkeypatch: pytest.MonkeyPatch, *, is_torn: bool
) -> None:
    """A value that was whole becomes visible, never one that was torn; and its name is free."""
    monkeypatch.setattr(mooncake_puts, "_TRY_EVERY_S", 0.0)
    client = Sessions(torn={"a"} if is_torn else set())
    puts = puts_of(client)
    client.on_send = lambda: setattr(client, "is_gone", True)
    assert put(puts, "a") == [_TORN if is_torn else _GONE]
    assert set(client.sessions) == {"a"}
    assert put(puts, "b") == [_GONE], "the master is still gone"
    assert set(client.sessions) == {"a"}
    client.is_gone, client.on_send = False, lambda: None
    client.torn.clear()
    assert put(puts, "b") == [0]
    assert client.sessions == {}
    assert ("a" in client.there) is not is_torn
    assert put(puts, "a") == [0 if is_torn else EXISTS]
    assert client.there["a"] == content_of("a", 50)
    assert puts._stuck == []


def test_a_master_that_does_not_let_go_is_not_asked_at_each_put() -> None:
    client = Sessions()
    puts = puts_of(client)
    client.on_send = lambda: setattr(client, "is_gone", True)
    put(puts, "a")
    before = len(client.calls)
    for _ in range(20):
        put(puts, "b")
    again = [names for what, names in client.calls[before:] if what in {"end", "revoke"}]
    assert len(again) <= 2 * (1 + 5), "once a second"
    assert [what for what, _ in client.calls].count("start") == 21


def test_room_is_reserved_and_values_become_visible_while_others_are_sent() -> None:
    """Of two calls one sends; the other one has had its room reserved."""
    client = Sessions()
    puts = puts_of(client)
    go_on = threading.Event()
    sending: list[int] = []

    def send() -> None:
        sending.append(1)
        assert len(sending) == 1, "one at a time"
        assert go_on.wait(30)
        sending.pop()

    client.on_send = send
    threads = [threading.Thread(target=put, args=(puts, name)) for name in "ab"]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while len(client.sessions) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    assert set(client.sessions) == {"a", "b"}
    assert [what for what, _ in client.calls].count("send") == 1
    go_on.set()
    for thread in threads:
        thread.join()
    assert set(client.there) == {"a", "b"}


def test_bytes_whose_turn_comes_after_their_room_may_be_anothers_are_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mooncake_puts, "_RESERVED_S", -1.0)
    client = Sessions()
    assert put(puts_of(client), "a") == [TOO_LATE]
    assert [what for what, _ in client.calls] == ["start", "revoke"]
    assert client.sessions == {}


def stored(values: MooncakeValues, items: Sequence[PutItem]) -> set[PutStatus]:
    batches = values.batches_to_put([(item, 0) for item in items])
    return {one.status for batch in batches for one in values.put(batch)}


def test_of_a_provider_that_was_frozen_while_values_came_none_is_seen_and_all_can_be_put() -> None:
    """Real: the put returns when none of its bytes are read any more."""
    names = [f"t:f:{index}:0" for index in range(4)]
    items = [
        PutItem(name, (b"head", content_of(name, 512 << 10)), keep_existing=True) for name in names
    ]
    with mooncake_server("64 MB") as server:
        values = MooncakeValues(
            ("127.0.0.1", server.master_port), server.url, MooncakeSettings(connect_timeout_s=2.0)
        )
        first = [PutItem("t:f:first:0", (b"x" * 100,))]
        assert stored(values, first) == {PutStatus.STORED}
        assert stored(values, first) == {PutStatus.EXISTED}, "whatever was heard of it before"
        server.provider.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.provider.pid, os.WSTOPPED | os.WNOWAIT)
        started, worked = time.monotonic(), time.thread_time()
        assert stored(values, items) == {PutStatus.FAILED}
        took, worked = time.monotonic() - started, time.thread_time() - worked
        assert took < 45
        assert worked < took / 2, "who waits leaves its core to others"
        assert values.states(names) == [0] * 4
        server.provider.send_signal(signal.SIGCONT)
        give_up_at = time.monotonic() + 60
        # The master may have given the provider up meanwhile.
        while stored(values, items) - {PutStatus.STORED, PutStatus.EXISTED}:
            assert time.monotonic() < give_up_at
        landings = [landing(name, 4, 512 << 10) for name in names]
        got = values.get([(item, 1) for item, _ in landings])
        assert {one.status for one in got} == {GetStatus.HIT}
        assert [bytes(payload) for _, (_, payload) in landings] == [
            content_of(name, 512 << 10) for name in names
        ]
        values.close()


def test_a_value_whose_master_froze_while_it_became_visible_is_there_when_it_goes_on() -> None:
    """Real: whether it had heard of the end nobody knows until it is asked again."""
    names = ["t:f:whole:0", "t:f:other:0"]
    items = [PutItem(name, (b"head", content_of(name, 50_000))) for name in names]
    with mooncake_server("64 MB") as server:
        values = MooncakeValues(
            ("127.0.0.1", server.master_port), server.url, MooncakeSettings(connect_timeout_s=1.0)
        )
        client = values._client

        class FreezesItsMaster:
            """Once, when the bytes have arrived."""

            def __init__(self) -> None:
                self.is_due = True

            def __getattr__(self, name: str) -> object:
                return getattr(client, name)

            def batch_put_from_multi_buffer_ranges(self, *given: list[object]) -> list[int]:
                sent: list[int] = client.batch_put_from_multi_buffer_ranges(*given)  # type: ignore[arg-type]
                if self.is_due:
                    server.master.send_signal(signal.SIGSTOP)
                    os.waitid(os.P_PID, server.master.pid, os.WSTOPPED | os.WNOWAIT)
                self.is_due = False
                return sent

        values._puts._client = cast("Client", FreezesItsMaster())
        assert stored(values, items[:1]) == {PutStatus.FAILED}
        server.master.send_signal(signal.SIGCONT)
        give_up_at = time.monotonic() + 60
        while stored(values, items[1:]) - {PutStatus.STORED, PutStatus.EXISTED}:
            assert time.monotonic() < give_up_at
        while values._puts._stuck:
            assert time.monotonic() < give_up_at
            stored(values, items[1:])
        assert stored(values, items[:1]) <= {PutStatus.STORED, PutStatus.EXISTED}
        item, [_, payload] = landing(names[0], 4, 50_000)
        assert [one.status for one in values.get([(item, 1)])] == [GetStatus.HIT]
        assert bytes(payload) == content_of(names[0], 50_000)
        values.close()
