"""A run refers to the bytes of the prompt it came with where that wastes little, else copies."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.cache import invariants
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt, common_blocks, common_tokens, pack
from tierkv.cache.node import BlockPool, Tier, TreeNode

SIZE = 4
CAPACITY = 200


class Cache:
    def __init__(self) -> None:
        self.index = Index(SIZE)
        self.pool = BlockPool("device", CAPACITY)

    def run(self, tokens: list[int]) -> TreeNode:
        """Where a prompt ends that was computed and is held no more."""
        prompt = Prompt.of(tokens, SIZE)
        match = self.index.match(prompt)
        lease = self.index.hold(match.node, match.num_blocks)
        slots = self.pool.allocate(prompt.num_blocks - match.num_blocks)
        self.index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots)
        self.index.release(lease)
        return lease.node

    def evict(self, count: int) -> None:
        for victim in self.index.spaces.order[Tier.DEVICE].victims(count):
            self.pool.release(self.index.drop(Tier.DEVICE, *victim))

    def drop(self, node: TreeNode, start: int, stop: int) -> None:
        self.pool.release(self.index.drop(Tier.DEVICE, node, start, stop))

    def findings(self) -> list[str]:
        nobody: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        pools = {Tier.DEVICE: self.pool, Tier.HOST: BlockPool("host", 0)}
        return invariants.findings(self.index, pools, nobody)

    def check(self) -> None:
        assert self.findings() == []

    def check_is_told(self, what: str) -> None:
        assert [what in finding for finding in self.findings()] == [True]


def numbered(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_a_prompt_that_shares_little_is_not_copied() -> None:
    cache = Cache()
    shared = numbered(2 * SIZE)
    cache.run(shared)
    cache.run(shared + numbered(SIZE, 5000))  # so that what follows branches off
    tokens = pack(shared + numbered(40 * SIZE, 1000))
    prompt = Prompt(tokens, SIZE)
    match = cache.index.match(prompt)
    lease = cache.index.hold(match.node, match.num_blocks)
    cache.index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, cache.pool.allocate(40))
    assert lease.node.packed is tokens
    assert lease.node.tokens == tokens[2 * SIZE * 4 :]
    cache.index.release(lease)
    cache.check()
    lease.node.packed = b"\7" * 2 * SIZE * 4 + tokens[2 * SIZE * 4 :]
    (wrong,) = cache.findings()
    assert "other tokens before its own" in wrong


def test_a_prompt_that_shares_most_leaves_nothing_of_itself_in_memory() -> None:
    cache = Cache()
    shared = numbered(40 * SIZE)
    cache.run(shared)
    cache.run(shared + numbered(SIZE, 5000))  # so that what follows branches off
    node = cache.run(shared + numbered(2 * SIZE, 1000))
    assert len(node.packed) == 2 * SIZE * 4
    cache.check()


def test_the_halves_of_a_run_share_its_bytes_until_most_of_them_are_needed_no_more() -> None:
    cache, base = Cache(), numbered(40 * SIZE)
    lower = cache.run(base)
    packed = lower.packed
    for at in (30, 20, 8):  # cut in four, from the end on
        cache.run(base[: at * SIZE] + numbered(SIZE, 1000 * at))
    runs = [lower, *list(lower.path())[1:]]
    assert [node.num_blocks for node in runs] == [10, 10, 12, 8]
    assert all(node.packed is packed for node in runs), "a split copies no tokens"
    assert b"".join(node.tokens for node in reversed(runs)) == pack(base)
    cache.check()
    cache.drop(lower, 0, 10)  # 30 of 40 blocks are needed
    assert [node.packed is packed for node in runs[1:]] == [True] * 3
    for node in runs[1:3]:  # and now the last 8
        for child in list(node.children.values()):
            cache.drop(child, 0, child.num_blocks)
        cache.drop(node, 0, node.num_blocks)
    assert runs[3].packed == pack(base[: 8 * SIZE])
    runs[3].packed += b"\0" * 4 * 25 * SIZE
    cache.check_is_told("keeps too many tokens of removed blocks in memory")


def test_a_run_whose_end_went_lets_go_of_what_it_shares_with_runs_above() -> None:
    cache, base = Cache(), numbered(40 * SIZE)
    lower = cache.run(base)
    packed = lower.packed
    cache.run(base[: 2 * SIZE] + numbered(SIZE, 1000))
    upper = lower.parent
    assert upper is not None
    assert upper.packed is packed
    cache.drop(lower, 8, 38)  # 10 of 40 blocks are needed: a quarter
    assert upper.packed is lower.packed is packed
    cache.drop(lower, 7, 8)
    assert upper.packed == pack(base[: 2 * SIZE])
    assert lower.packed == pack(base[2 * SIZE : 9 * SIZE])
    cache.check()


@pytest.mark.parametrize("shared", [0, 1, 2047, 2048, 2049, 26_623, 26_624, 40_000])
@pytest.mark.parametrize("size", [1, 3, 16, 50_000])
def test_common_blocks_are_counted_beyond_every_look(shared: int, size: int) -> None:
    left = np.arange(40_000, dtype=np.int32)
    right = left.copy()
    right[shared:] += 1
    packed, other = left.tobytes(), b"\7" * 8 + right.tobytes()
    most, width = 40_000 // size, 4 * size
    assert common_blocks(packed, 0, other, 8, most, width) == shared // size
    if shared > 3 * size:
        at = 3 * width
        found = common_blocks(packed, at, other, 8 + at, most - 3, width)
        assert found == shared // size - 3
        assert common_blocks(packed, 0, other, 8, 3, width) == 3
    assert common_tokens(packed, other[8:]) == shared
