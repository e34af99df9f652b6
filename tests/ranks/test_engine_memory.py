"""An engine's own memory is used as it is, and refused if it does not fit."""

from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest

from tests.embed.engine import done
from tests.latch import PATIENCE_S
from tests.world import GQA, fingerprint, kv_of
from tierkv.cache.eviction import WritePolicy
from tierkv.embed import Embedded
from tierkv.errors import ConfigError, LayoutError
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.link import HostRegion, Link, SharedMemory, close_all
from tierkv.ranks.memory import (
    EngineCpuDevice,
    EnginePlanes,
    SharedSlots,
    join,
    pieces,
    shared_memory,
    shared_slots,
    side_by_side,
)
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service

BLOCKS = 8
PROMPT = list(range(16))


def _arrays(num_blocks: int = BLOCKS) -> list[np.ndarray]:
    return [np.zeros((num_blocks, plane.block_bytes), np.uint8) for plane in GQA.planes]


def _build(arrays: list[np.ndarray]) -> Service:
    settings = CacheSettings(
        block_size=GQA.block_size,
        device_blocks=BLOCKS,
        host_blocks=16,
        host_write=WritePolicy.WRITE_THROUGH,
    )
    return Service(EngineCpuDevice(arrays), fingerprint(), settings, HandoffSettings(), None)


def test_blocks_are_offloaded_from_and_loaded_into_the_engine_s_own_arrays() -> None:
    arrays = _arrays()
    with Embedded(lambda: _build(arrays)) as cache:
        for name, tokens in (("one", PROMPT), ("all", list(range(900, 932)))):
            found = cache.admit(name, tokens, max_new_tokens=0).wait(PATIENCE_S)
            for rows, array in zip(kv_of(tokens, GQA), arrays, strict=True):
                array[found.block_table] = rows.reshape(len(found.block_table), -1)
            cache.commit(name, tokens)
            done(cache.end(name))
        for array in arrays:
            array[:] = 0
        found = cache.admit("again", [*PROMPT, 5], max_new_tokens=0).wait(PATIENCE_S)
        assert found.matched.host_tokens == len(PROMPT)
        for rows, array in zip(kv_of(PROMPT, GQA), arrays, strict=True):
            assert np.array_equal(array[found.block_table[:4]].reshape(rows.shape), rows)
        cache.end("again").wait(PATIENCE_S)


def test_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="the engine's planes have 5 blocks, but 8 are needed"):
        Embedded(lambda: _build(_arrays(5))).open()
    with pytest.raises(LayoutError, match="the layout's"):
        EnginePlanes(GQA, _arrays()[:-1])
    strided = [np.zeros((BLOCKS, 2 * a.shape[1]), np.uint8)[:, ::2] for a in _arrays()]
    with pytest.raises(LayoutError, match="contiguous"):
        EnginePlanes(GQA, strided)


def test_shared_slots_are_seen_by_all_that_map_them_each_its_piece() -> None:
    descriptor = shared_memory(4 * 10)

    whole = SharedSlots(os.dup(descriptor), 4, 10, slice(0, 10))
    part = SharedSlots(descriptor, 4, 10, slice(6, 10))
    part.array[2] = 7
    assert whole.array[2].tolist() == [0] * 6 + [7] * 4
    part.close()
    assert whole.array.sum() == 28
    with pytest.raises(LayoutError):
        part.close()
    small = shared_memory(39)
    with pytest.raises(ConfigError, match="cannot be mapped"):
        SharedSlots(small, 4, 10, slice(0, 10))


def test_a_rank_that_cannot_map_its_slots_keeps_nothing_that_it_was_sent() -> None:
    """Its end of the life socket is closed too: it will not copy."""
    (here, there), (mine, life) = socket.socketpair(), socket.socketpair()
    slots = [shared_memory(size) for size in (40, 39)]
    regions = (HostRegion(4, 10, 0, 10),) * 2
    descriptors = [*slots, life.fileno()]
    Link(there).send(SharedMemory(regions, has_life=True), descriptors=descriptors)
    close_all(slots)
    life.close()
    with pytest.raises(ConfigError, match="cannot be mapped"):
        join(Link(here), 0, [EnginePlanes(GQA, _arrays())])
    mine.setblocking(False)
    assert mine.recv(1) == b""
    for end in (here, there, mine):
        end.close()


def test_shared_slots_can_be_used_before_they_have_their_memory() -> None:
    """It comes in the background, and changes nothing of what lies there."""
    size = 3 << 20
    slots = shared_slots(64, size)
    slots.array[63] = 7
    slots.array[0, :10] = 5
    deadline = time.monotonic() + PATIENCE_S
    while os.fstat(slots.descriptor).st_blocks * 512 < 64 * size:
        assert time.monotonic() < deadline, "the file gets no memory"
        os.sched_yield()
    assert slots.array[63].min() == slots.array[63].max() == 7
    assert slots.array[0, :11].tolist() == [5] * 10 + [0]
    slots.close()


def test_shared_slots_may_be_closed_while_they_get_their_memory() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        shared_slots(32, 4 << 20).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "tierkv-fill" not in {one.name for one in threading.enumerate()}


def test_shards_lie_whole_one_behind_the_other() -> None:
    whole = side_by_side([GQA, GQA])
    assert whole.num_layers == 2 * GQA.num_layers
    assert whole.block_bytes == 2 * GQA.block_bytes
    assert pieces([GQA, GQA]) == [
        slice(0, GQA.block_bytes),
        slice(GQA.block_bytes, 2 * GQA.block_bytes),
    ]
    assert side_by_side([GQA]).digest == GQA.digest
    with pytest.raises(LayoutError):
        side_by_side([])
