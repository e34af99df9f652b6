"""Small promises of the index, its copies and pools that random steps seldom come across."""

from __future__ import annotations

import numpy as np

from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt, pack
from tierkv.cache.node import BOUNDS_S, TICKS_PER_S, BlockPool, Change, CopyState, Tier, TierCopies


def put(index: Index, pool: BlockPool, tokens: list[int], tier: Tier = Tier.DEVICE) -> None:
    prompt = Prompt.of(tokens, index.block_size)
    match = index.match(prompt)
    lease = index.hold(match.node, match.num_blocks)
    needed = prompt.num_blocks - match.num_blocks
    index.insert(tier, lease, prompt, prompt.num_blocks, pool.allocate(needed))
    if prompt.tail_tokens:
        index.insert_tail(tier, lease, prompt, int(pool.allocate(1)[0]))
    index.release(lease)


def test_holding_a_run_for_a_copy_is_not_a_use() -> None:
    index, pool = Index(1), BlockPool("device", 4)
    put(index, pool, [1])
    put(index, pool, [2])
    oldest = index.match(Prompt.of([1], 1)).node
    index.release(index.hold_as_is(oldest))
    assert index.spaces.order[Tier.DEVICE].victims(1)[0].node is oldest


def test_a_tail_that_is_on_its_way_is_not_placed_a_second_time() -> None:
    index, pool = Index(2), BlockPool("host", 4)
    put(index, pool, [1, 2, 3], Tier.HOST)
    prompt = Prompt.of([1, 2, 3], 2)
    lease = index.hold(index.match(prompt).node, 1)
    slots = np.array([0, 1], np.int32)
    index.change(Tier.DEVICE, lease.node, 0, 1, Change.RESERVE, slots=slots[:1])
    tail = next(iter(lease.node.children.values()))
    load = index.hold_as_is(tail)
    index.change(Tier.DEVICE, tail, 1, 2, Change.RESERVE, slots=slots[1:])
    assert index.insert_tail(Tier.DEVICE, lease, prompt, 7) == (tail, False)
    assert index.states(Tier.DEVICE, tail, 1, 2) == [CopyState.INCOMING]
    assert index.slots(Tier.DEVICE, tail, 1, 2).tolist() == [1]
    index.release(load)


def test_a_held_run_whose_last_copy_failed_stays_till_its_lease_ends_and_goes_then() -> None:
    index, pool = Index(1), BlockPool("device", 4)
    put(index, pool, [1, 2])
    put(index, pool, [1, 3])  # splits it
    run = index.match(Prompt.of([1, 2], 1)).node
    index.change(Tier.HOST, run, 1, 2, Change.RESERVE, slots=np.array([0], np.int32))
    index.drop(Tier.DEVICE, run, 0, 1)
    lease = index.hold_as_is(run)
    assert index.change(Tier.HOST, run, 1, 2, Change.FAIL).tolist() == [0]
    assert run in list(index.spaces.nodes()), "its path stays while it is held"
    index.release(lease)
    assert {node.tokens for node in index.spaces.nodes()} == {pack([1]), pack([3])}


def test_what_is_left_of_a_long_run_does_not_keep_the_slots_of_all() -> None:
    copies = TierCopies(100, CopyState.READY, np.arange(100, dtype=np.int32))
    assert copies.drop_ready(3).tolist() == list(range(3, 100))
    assert copies.slots.tolist() == [0, 1, 2]
    assert copies.fits(3)


def test_a_match_counts_how_long_its_end_was_not_used_and_nothing_while_others_use_it() -> None:
    index, pool = Index(1), BlockPool("device", 4)
    index.at(1000.0)
    put(index, pool, [1, 2])
    index.at(1020.0)
    match = index.match(Prompt.of([1, 2], 1))
    first = index.hold(match.node, 2)
    index.count_hit(first)
    assert index.reuse_gaps.counts[BOUNDS_S.index(30)] == 1
    assert abs(index.reuse_gaps.total_ticks / TICKS_PER_S - 20) < 0.1
    index.at(1050.0)
    second = index.hold(match.node, 2)
    index.count_hit(second)
    assert index.reuse_gaps.counts[0] == sum(index.reuse_gaps.counts) - 1 == 1
    index.release(first)
    index.release(second)


def test_a_block_is_as_old_as_its_first_use_also_after_its_run_was_cut_in_two() -> None:
    index, pool = Index(1), BlockPool("device", 9)
    index.at(1000.0)
    put(index, pool, [1, 2, 3])
    index.at(1020.0)
    put(index, pool, [1, 2, 4])
    born = {
        block: round(index.match(Prompt.of([1, 2, block], 1)).node.born / TICKS_PER_S)
        for block in (3, 4)
    }
    above = index.match(Prompt.of([1, 2], 1)).node
    assert born == {3: 1000, 4: 1020}
    assert round(above.born / TICKS_PER_S) == 1000


def test_of_blocks_with_one_first_token_the_one_that_shares_most_is_matched_in_part() -> None:
    index, pool = Index(4), BlockPool("device", 4)
    for tokens in ([1, 5, 5, 5], [1, 2, 9, 9], [1, 2, 3, 4]):
        put(index, pool, tokens)
    for asked, shared in (([1, 2, 3, 9], 3), ([1, 2, 3, 0], 3), ([1, 2, 8, 8], 2), ([1, 5, 5], 3)):
        partial = index.match(Prompt.of(asked, 4)).partial
        assert partial is not None
        assert partial.num_tokens == shared
