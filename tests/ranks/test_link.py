"""Records between a scheduler and its workers: what comes back, and what is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.latch import PATIENCE_S
from tierkv.errors import ConfigError, StoreCorruptError
from tierkv.ranks.link import (
    MAGIC,
    VERSION,
    Goodbye,
    Hello,
    HostRegion,
    Link,
    Record,
    SharedMemory,
    WorkerRefused,
    listen,
    read,
    remove_left_over,
)
from tierkv.storage.codec import seal

RECORDS = [
    Hello(1, 8, b"digest", 77),
    SharedMemory((HostRegion(4, 64, 0, 32),)),
    WorkerRefused("no place"),
    Goodbye(),
]
BODY = {"type": "hello", "rank": 1, "num_blocks": 8, "layout_digest": b"digest", "pid": 77}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert read(seal(MAGIC, VERSION, record)) == record


@pytest.mark.parametrize("version", [VERSION, VERSION + 1])
def test_a_damaged_record_or_one_of_another_version_is_refused(version: int) -> None:
    whole = seal(MAGIC, version, RECORDS[-1])
    damaged = whole if version != VERSION else whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(StoreCorruptError):
        read(damaged)


@pytest.mark.parametrize("change", [{"rank": "text"}, {"type": "shout"}], ids=str)
def test_a_record_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(StoreCorruptError):
        read(seal(MAGIC, VERSION, BODY | change))


def test_fields_that_are_not_known_are_passed_over() -> None:
    assert read(seal(MAGIC, VERSION, BODY | {"later": 1})) == RECORDS[0]


def test_a_link_on_which_nothing_comes_for_a_while_stays_open() -> None:
    here, there = socket.socketpair()
    link, other = Link(here), Link(there)
    here.settimeout(0.01)
    assert link.receive() == []
    other.send(Goodbye())
    here.settimeout(PATIENCE_S)
    assert [read(one) for one in link.receive()] == [Goodbye()]
    for end in (link, other):
        end.close()


@pytest.mark.promise("A new engine removes sockets of killed engines and no living one.")
def test_sockets_of_schedulers_that_were_killed_are_removed_and_no_other_is_disturbed(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as killed, socket.socket(socket.AF_UNIX) as begun:
        killed.bind(str(tmp_path / "killed.sock"))
        begun.bind(str(tmp_path / "begun.sock"))  # and does not listen yet
        killed.close()
        (tmp_path / "file.sock").touch()
        with listen(str(tmp_path / "live.sock")) as live:
            remove_left_over([*tmp_path.glob("*.sock"), tmp_path / "gone.sock"])
            left = {path.name for path in tmp_path.iterdir()}
            assert left == {"begun.sock", "file.sock", "live.sock"}
            live.settimeout(0)
            with pytest.raises(BlockingIOError):  # nobody has come
                live.accept()


def test_the_socket_of_a_killed_scheduler_is_taken_over_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # and never listens again
    with listen(str(path)), pytest.raises(ConfigError, match="in use"):
        listen(str(path))
    path.unlink()
    path.write_text("a file of another program")
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(str(path))
    assert path.read_text() == "a file of another program"
