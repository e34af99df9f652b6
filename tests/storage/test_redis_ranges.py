"""A value that is read in ranges has one digest, in whatever order they land."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.storage.values import Taken, content_of
from tierkv.storage.base import cut_buffers
from tierkv.storage.protocol import GetItem, GetStatus
from tierkv.storage.redis.node import (
    RangesDigest,
    get_outcome,
    get_requests,
)
from tierkv.storage.redis.resp import Reply, ValueLanded

NUM_BYTES = 1000
NAME = "t:f:a:0"


def landing(sizes: list[int]) -> tuple[bytes, RangesDigest, list[list[memoryview]]]:
    """What is to land, who takes it, and where each range lands: over two buffers."""
    content = content_of(NAME, NUM_BYTES)
    buffers = [memoryview(bytearray(300)), memoryview(bytearray(NUM_BYTES - 300))]
    ranges = cut_buffers(buffers, sizes)
    return content, RangesDigest(Taken(), ranges), [list(views) for views in ranges]


@pytest.mark.parametrize("seed", range(200))
def test_the_digest_takes_all_bytes_once_and_in_order_whatever_lands_first(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, NUM_BYTES), rng.randint(0, 6)))
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, NUM_BYTES])]
    content, whole, ranges = landing(sizes)
    parts = [whole.part(index) for index in range(len(sizes))]
    at = [0, *itertools.accumulate(sizes)]
    left = [index for index, views in enumerate(ranges) for _ in views]
    while left:
        assert not whole.is_complete
        index = rng.choice(left)
        view = ranges[index][0]
        num_bytes = rng.randint(1, len(view))
        view[:num_bytes] = content[at[index] : at[index] + num_bytes]
        parts[index].update(view[:num_bytes])
        at[index] += num_bytes
        ranges[index][0] = view[num_bytes:]
        if num_bytes == len(view):
            ranges[index].pop(0)
            left.remove(index)
    assert whole.is_complete
    taken = whole.digest
    assert isinstance(taken, Taken)
    assert taken.content == content


def test_there_is_no_digest_of_a_value_of_which_a_range_was_begun_twice() -> None:
    content, whole, [first, second] = landing([300, 700])
    first[0][:] = content[:300]
    whole.part(0).update(first[0])
    second[0][:] = content[300:]
    whole.part(1).update(second[0][:400])
    again = whole.part(1)
    again.update(second[0][:300])  # as many bytes as there are, but not these
    again.update(second[0][300:])
    assert not whole.is_complete


@pytest.mark.parametrize("is_all", [True, False])
def test_a_value_has_the_digest_that_took_all_of_it_or_none(*, is_all: bool) -> None:
    num_bytes = 2 << 20
    buffer = memoryview(bytearray(num_bytes))
    item = GetItem(NAME, (buffer,), Taken)
    requests = [make() for make in get_requests(item)]
    assert len(requests) > 1
    landed: list[Reply] = []
    for request in requests:
        [view] = request.into or ()
        assert request.digest is not None
        if is_all or request is not requests[0]:
            request.digest.update(view)
        landed.append(ValueLanded(request.digest))
    outcome = get_outcome(item, landed)
    assert outcome.status is GetStatus.HIT
    if is_all:
        assert isinstance(outcome.digest, Taken)
        assert outcome.digest.content == bytes(num_bytes)
    else:
        assert outcome.digest is None


def test_a_range_that_had_not_begun_may_be_asked_for_again() -> None:
    """As of another server, after the first one did not have it."""
    content, whole, [first, second] = landing([300, 700])
    whole.part(0)
    whole.part(1)
    for index, [view], part in ((1, second, content[300:]), (0, first, content[:300])):
        view[:] = part
        whole.part(index).update(view)
    assert whole.is_complete
