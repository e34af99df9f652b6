"""Values and questions as commands to a Redis server, and what its replies mean for them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from tierkv.storage.buffers import cut_buffers
from tierkv.storage.protocol import (
    Digest,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
)
from tierkv.storage.redis.resp import (
    Argument,
    OtherLength,
    Refused,
    Reply,
    ValueLanded,
    pack,
    pack_each,
    pack_set,
)
from tierkv.storage.redis.wire import Unanswered, WireRequest

# Of servers that take no values now and give them all the same: full, cannot save, too few
# replicas, a replica; from us, who may only read; of this size (proto-max-bulk-len).
TAKES_NOTHING = re.compile(
    "OOM |MISCONF |NOREPLICAS |READONLY |NOPERM .* to run |ERR Protocol error: invalid bulk length"
)


_STORED: Final = PutOutcome(PutStatus.STORED)
_EXISTED: Final = PutOutcome(PutStatus.EXISTED)


def question(*command: Argument, num_bytes: int = 0) -> WireRequest:
    """A command whose reply is small, or at most `num_bytes`."""
    return WireRequest([memoryview(pack(*command))], None, num_bytes)


def pipeline(commands: bytes, num_replies: int) -> WireRequest:
    """Several packed commands in one request, each with a small reply."""
    request = WireRequest([memoryview(commands)], None, 0)
    request.num_replies = num_replies
    return request


def question_each(verb: str, names: Sequence[str], *more: int) -> WireRequest:
    """`verb name more` about each name, whose replies are numbers."""
    request = pipeline(pack_each(verb, names, *more), len(names))
    request.is_once = verb == "UNLINK"  # the second time there would be none
    return request


def get_requests(item: GetItem) -> list[Callable[[], WireRequest]]:
    """What makes GET of the value, or of its ranges, see `is_in_ranges`.

    The last range ends one byte after the value, so that a longer one shows.
    """
    if not is_in_ranges(item):
        return [partial(get_whole_request, item)]
    num_bytes = item.num_bytes
    makers: list[Callable[[], WireRequest]] = []
    sizes = range_sizes(num_bytes)
    ranges = cut_buffers(item.into, sizes)
    digest = None if item.digest is None else item.digest()
    whole = None if digest is None else RangesDigest(digest, ranges)
    start = 0
    for index, (size, views) in enumerate(zip(sizes, ranges, strict=True)):
        end = start + size
        last = end - 1 if end < num_bytes else end
        part = None if whole is None else partial(whole.part, index)
        makers.append(partial(_get, ("GETRANGE", item.name, start, last), views, part))
        start = end
    return makers


def is_in_ranges(item: GetItem) -> bool:
    """Whether it is long, and whoever asks for it makes a digest: of a value that is replaced
    between two ranges this tells. Others see only values as they were written."""
    return item.digest is not None and item.num_bytes > LONGEST_WHOLE


def get_whole_request(item: GetItem) -> WireRequest:
    """GET of the value, however long."""
    return _get(("GET", item.name), item.into, item.digest)


def _get(
    command: Sequence[Argument],
    into: tuple[memoryview, ...],
    digest: Callable[[], Digest | None] | None = None,
) -> WireRequest:
    num_bytes = sum(view.nbytes for view in into)
    request = WireRequest([memoryview(pack(*command))], into, num_bytes)
    if digest is not None:
        request.digest = digest()
    return request


def put_request(item: PutItem) -> WireRequest:
    options: list[Argument] = []
    if item.ttl_s is not None:
        options += ["PX", math.ceil(item.ttl_s * 1000)]
    if item.leaves_existing:
        options.append("NX")
    request = WireRequest(pack_set(item.name, item.parts, options), None, item.num_bytes)
    request.complete = item.complete
    # Had the first try been carried out, and its answer lost, a second would be told EXISTED.
    request.may_retry = not item.only_new
    return request


def get_outcome(item: GetItem, replies: Sequence[Reply | Unanswered]) -> GetOutcome:
    """From the replies to `get_requests`: the first that brought nothing decides. MISS of a value
    in ranges can also mean that it ends where one of them begins."""
    for reply in replies:
        if not isinstance(reply, ValueLanded):
            return _no_hit(item, reply, num_ranges=len(replies))
    last = replies[-1]
    digest = last.digest if isinstance(last, ValueLanded) else None
    if isinstance(digest, RangeDigest):
        digest = digest.whole.digest if digest.whole.is_complete else None
    return GetOutcome(GetStatus.HIT, digest=digest)


def _no_hit(  # noqa: PLR0911 - a table
    item: GetItem, reply: Reply | Unanswered, *, num_ranges: int
) -> GetOutcome:
    match reply:
        case None:
            return GetOutcome(GetStatus.MISS)
        case OtherLength(0) if num_ranges > 1:
            return GetOutcome(GetStatus.MISS)  # GETRANGE of what is not there
        case OtherLength(num_bytes):
            return GetOutcome(
                GetStatus.DAMAGED,
                f"{item.name}, or a range of it, has {num_bytes} bytes; it should have "
                f"{item.num_bytes}",
            )
        case Refused(message) if reply.code == "WRONGTYPE":
            return GetOutcome(GetStatus.DAMAGED, f"{item.name} is not a string: {message}")
        case Refused(message):
            return GetOutcome(GetStatus.FAILED, f"{item.name}: {message}")
        case Unanswered(reason):
            return GetOutcome(GetStatus.FAILED, reason)
    return GetOutcome(GetStatus.FAILED, f"{item.name}: {reply!r:.80} is no answer to a GET")


def put_outcome(item: PutItem, reply: Reply | Unanswered) -> PutOutcome:
    match reply:
        case None:
            return _EXISTED
        case b"OK":
            return _STORED
        case Refused(message):
            status = PutStatus.FULL if TAKES_NOTHING.match(message) else PutStatus.FAILED
            return PutOutcome(status, f"{item.name}: {message}")
        case Unanswered(reason):
            return PutOutcome(PutStatus.FAILED, reason)
    return PutOutcome(PutStatus.FAILED, f"{item.name}: {reply!r:.80} is no answer to a SET")


# What is longer than LONGEST_WHOLE is read in ranges of about _RANGE_BYTES: half a MiB, a header.
# The server copies each answer twice, and the second time from its processor's cache if it is not
# longer: 2 MiB take it 0.33 to 0.38 ms, and 0.52 in one piece. GET of 2 MiB at 1.3 to 1.55 of the
# rate in one piece, of 8 MiB at 1.6 of that in ranges of 2 MiB; 512 KiB in halves came to 0.5 to
# 0.8 (loopback, Redis 7.0, 1 MiB of cache for each of 2 cores, 2026-11-23).
_RANGE_BYTES = 520 << 10
LONGEST_WHOLE = 768 << 10


def range_sizes(num_bytes: int) -> list[int]:
    num_ranges = -(-num_bytes // _RANGE_BYTES)
    least, longer = divmod(num_bytes, num_ranges)
    return [least + (index < longer) for index in range(num_ranges)]


class RangesDigest:
    """The digest of a value whose ranges land in any order: what lands before its turn is read
    again, from memory, when that comes."""

    def __init__(self, digest: Digest, ranges: Sequence[tuple[memoryview, ...]]) -> None:
        self.digest = digest
        self._ranges = ranges
        self._left = [sum(map(len, views)) for views in ranges]  # bytes to come of each
        self._next = 0  # which the digest is given now
        self._is_void = False

    @property
    def is_complete(self) -> bool:
        return self._next == len(self._ranges) and not self._is_void

    def part(self, index: int) -> RangeDigest:
        """What takes one of the ranges as it lands. Once more, of one that has begun to: then there
        is no digest of all."""
        self._is_void |= self._left[index] < sum(map(len, self._ranges[index]))
        return RangeDigest(self, index)

    def landed(self, index: int, piece: memoryview) -> None:
        self._left[index] -= len(piece)
        if index != self._next:
            return
        self.digest.update(piece)
        while self._left[self._next] == 0:
            self._next += 1
            if self._next == len(self._ranges):
                return
            self._catch_up(self._ranges[self._next], self._left[self._next])

    def _catch_up(self, views: Sequence[memoryview], left: int) -> None:
        num_landed = sum(map(len, views)) - left
        for view in views:
            if num_landed > 0:
                self.digest.update(view[:num_landed])
            num_landed -= len(view)


class RangeDigest:
    """A `Digest` of one range, for `whole`."""

    __slots__ = ("_index", "whole")

    def __init__(self, whole: RangesDigest, index: int) -> None:
        self.whole = whole
        self._index = index

    def update(self, piece: memoryview, /) -> None:
        self.whole.landed(self._index, piece)
