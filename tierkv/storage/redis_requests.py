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
from tierkv.storage.redis_exchange import Failure, Request
from tierkv.storage.redis_ranges import LONGEST_WHOLE, RangeDigest, RangesDigest, range_sizes
from tierkv.storage.resp import (
    Argument,
    Landed,
    OtherLength,
    Refused,
    Reply,
    pack,
    pack_each,
    pack_set,
)

# Of servers that take no values now and give them all the same: full, cannot save, too few
# replicas, a replica; from us, who may only read; of this size (proto-max-bulk-len).
TAKES_NOTHING = re.compile(
    "OOM |MISCONF |NOREPLICAS |READONLY |NOPERM .* to run |ERR Protocol error: invalid bulk length"
)


_STORED: Final = PutOutcome(PutStatus.STORED)
_EXISTED: Final = PutOutcome(PutStatus.EXISTED)


def question(*command: Argument, num_bytes: int = 0) -> Request:
    """A command whose reply is small, or at most `num_bytes`."""
    return Request([memoryview(pack(*command))], None, num_bytes)


def pipeline(commands: bytes, num_replies: int) -> Request:
    """Several packed commands in one request, each with a small reply."""
    request = Request([memoryview(commands)], None, 0)
    request.num_replies = num_replies
    return request


def question_each(verb: str, names: Sequence[str], *more: int) -> Request:
    """`verb name more` about each name, whose replies are numbers."""
    request = pipeline(pack_each(verb, names, *more), len(names))
    request.is_once = verb == "UNLINK"  # the second time there would be none
    return request


def get_requests(item: GetItem) -> list[Callable[[], Request]]:
    """What makes GET of the value, or of its ranges, see `is_in_ranges`.

    The last range ends one byte after the value, so that a longer one shows.
    """
    if not is_in_ranges(item):
        return [partial(get_whole_request, item)]
    num_bytes = item.num_bytes
    makers: list[Callable[[], Request]] = []
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


def get_whole_request(item: GetItem) -> Request:
    """GET of the value, however long."""
    return _get(("GET", item.name), item.into, item.digest)


def _get(
    command: Sequence[Argument],
    into: tuple[memoryview, ...],
    digest: Callable[[], Digest | None] | None = None,
) -> Request:
    num_bytes = sum(view.nbytes for view in into)
    request = Request([memoryview(pack(*command))], into, num_bytes)
    if digest is not None:
        request.digest = digest()
    return request


def put_request(item: PutItem) -> Request:
    options: list[Argument] = []
    if item.ttl_s is not None:
        options += ["PX", math.ceil(item.ttl_s * 1000)]
    if item.leaves_existing:
        options.append("NX")
    request = Request(pack_set(item.name, item.given, options), None, item.num_bytes)
    request.complete = item.complete
    # Had the first try been carried out, and its answer lost, a second would be told EXISTED.
    request.may_retry = not item.only_new
    return request


def get_outcome(item: GetItem, replies: Sequence[Reply | Failure]) -> GetOutcome:
    """From the replies to `get_requests`: the first that brought nothing decides. MISS of a value
    in ranges can also mean that it ends where one of them begins."""
    for reply in replies:
        if not isinstance(reply, Landed):
            return _no_hit(item, reply, num_ranges=len(replies))
    last = replies[-1]
    digest = last.digest if isinstance(last, Landed) else None
    if isinstance(digest, RangeDigest):
        digest = digest.whole.digest if digest.whole.is_complete else None
    return GetOutcome(GetStatus.HIT, digest=digest)


def _no_hit(  # noqa: PLR0911 - a table
    item: GetItem, reply: Reply | Failure, *, num_ranges: int
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
        case Failure(reason):
            return GetOutcome(GetStatus.FAILED, reason)
    return GetOutcome(GetStatus.FAILED, f"{item.name}: {reply!r:.80} is no answer to a GET")


def put_outcome(item: PutItem, reply: Reply | Failure) -> PutOutcome:
    match reply:
        case None:
            return _EXISTED
        case b"OK":
            return _STORED
        case Refused(message):
            status = PutStatus.FULL if TAKES_NOTHING.match(message) else PutStatus.FAILED
            return PutOutcome(status, f"{item.name}: {message}")
        case Failure(reason):
            return PutOutcome(PutStatus.FAILED, reason)
    return PutOutcome(PutStatus.FAILED, f"{item.name}: {reply!r:.80} is no answer to a SET")
