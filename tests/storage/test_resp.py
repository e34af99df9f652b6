"""The parser of the Redis protocol: replies in pieces of any size, wrong replies, and requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.values import Taken
from tierkv.storage.base import copy_into
from tierkv.storage.redis.resp import (
    NotRedisError,
    Refused,
    Replies,
    Reply,
    TooLong,
    ValueLanded,
    pack,
    pack_set,
)


@dataclass(frozen=True)
class Case:
    """A reply as bytes, the sizes of the buffers for its value, and the expected result."""

    wire: bytes
    sizes: tuple[int, ...] | None
    reply: Reply
    landed: bytes = b""


def value(content: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(content), content)


contents = st.binary(max_size=200) | st.integers(0, 3_000).map(lambda n: b"\r\n$5" * n)


def too_long(content: bytes, size: int) -> Case:
    content += b"x"
    return Case(value(content), (size % len(content),), TooLong(len(content)))


def landing(content: bytes, cut: int, room: int) -> Case:
    cut %= len(content) + 1
    sizes = (cut, 0, len(content) - cut, room)
    return Case(value(content), sizes, ValueLanded(len(content)), content)


cases = st.one_of(
    st.just(Case(b"+OK\r\n", None, b"OK")),
    st.just(Case(b"-ERR no\r\n", None, Refused("ERR no"))),
    st.integers(-(1 << 63), (1 << 63) - 1).map(lambda n: Case(b":%d\r\n" % n, None, n)),
    st.sampled_from([None, (5,), (0,), ()]).map(lambda sizes: Case(b"$-1\r\n", sizes, None)),
    contents.map(lambda content: Case(value(content), None, content)),
    st.builds(too_long, contents, st.integers(0, 299)),
    st.builds(landing, contents, st.integers(0, 20_000), st.integers(0, 50)),
)


class Reader:
    """A reader that passes pieces of a stream to a parser, as a socket would."""

    def __init__(self) -> None:
        self.parser = Replies()
        self.replies: list[Reply] = []

    def feed(self, piece: bytes, turn_bytes: int = 1 << 20) -> None:
        rest = memoryview(piece)
        while rest:
            targets = self.parser.targets(turn_bytes)
            room = sum(len(target) for target in targets)
            assert room
            taken = rest[: min(room, len(rest))]
            left = taken
            for target in targets:
                copy_into(left[: len(target)], [target[: len(left)]])
                left = left[len(target) :]
            self.replies += self.parser.received(len(taken))
            rest = rest[len(taken) :]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(cases, max_size=12),
    st.lists(st.integers(0, 100_000), max_size=20),
    st.sampled_from([1, 7, 1_000, 1 << 20]),
)
def test_replies_are_the_same_wherever_the_stream_is_cut(
    stream: list[Case], places: list[int], turn_bytes: int
) -> None:
    reader = Reader()
    buffers = []
    digests = [Taken() for _ in stream]
    for case, digest in zip(stream, digests, strict=True):
        sizes = [bytearray(size) for size in case.sizes or ()]
        buffers.append(sizes)
        into = tuple(memoryview(buffer) for buffer in sizes)
        reader.parser.expect(1 << 20 if case.sizes is None else into, digest)
    wire = b"".join(case.wire for case in stream)
    cuts = sorted(place % (len(wire) + 1) for place in places)
    for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        reader.feed(wire[start:stop], turn_bytes)
    assert [
        replace(r, digest=None) if isinstance(r, ValueLanded) else r for r in reader.replies
    ] == [case.reply for case in stream]
    for case, sizes, reply, digest in zip(stream, buffers, reader.replies, digests, strict=True):
        if isinstance(reply, ValueLanded):
            assert b"".join(sizes)[: reply.num_bytes] == case.landed == digest.content
            assert reply.digest is digest
        else:
            assert not digest.content


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 400 Bad Request\r\n", b"*1\r\n:1\r\n", b"$5\r\nabcdefg\r\n", b"$-2\r\n",
        b"$+5\r\n", b"$5 \r\n", b"$999999999999\r\n", b":0x10\r\n", b"$" + b"1" * 30 + b"\r\n",
        b"+" + b"x" * 20_000, b":1_0\r\n", b":\r\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_is_refused(wire: bytes) -> None:
    reader = Reader()
    reader.parser.expect()
    with pytest.raises(NotRedisError):
        reader.feed(wire)


def test_more_answers_than_questions_are_refused_not_counted() -> None:
    reader = Reader()
    for _ in range(3):
        reader.parser.expect()
    with pytest.raises(NotRedisError, match="without a request"):
        reader.feed(b":1\r\n:0\r\n:1\r\n:1\r\n")


def test_requests_are_what_redis_reads() -> None:
    assert pack("GET", "a", 12) == b"*3\r\n$3\r\nGET\r\n$1\r\na\r\n$2\r\n12\r\n"
    pieces = pack_set("k", (b"one", b"", bytearray(b"two")), ["PX", 5, "NX"])
    assert b"".join(pieces) == (
        b"*6\r\n$3\r\nSET\r\n$1\r\nk\r\n$6\r\nonetwo\r\n$2\r\nPX\r\n$1\r\n5\r\n$2\r\nNX\r\n"
    )
    assert b"".join(pack_set("k", (), [])) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$0\r\n\r\n"


def test_the_bytes_of_a_value_are_sent_from_where_they_lie() -> None:
    part = bytearray(b"abc")
    pieces = pack_set("k", (part,), [])
    part[:] = b"xyz"
    assert b"xyz" in b"".join(pieces)
