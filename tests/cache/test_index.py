"""Small promises of the index, its copies and pools that random steps seldom come across."""

from __future__ import annotations

import numpy as np

from tests.cache.cached import Cached
from tierkv.cache.keys import Prompt, pack
from tierkv.cache.node import BOUNDS_S, TICKS_PER_S, Change, CopyState, Tier, TierCopies


def test_holding_a_run_for_a_copy_is_not_a_use() -> None:
    cache = Cached()
    oldest = cache.put([1])
    cache.put([2])
    cache.index.release(cache.index.hold_as_is(oldest))
    assert cache.index.spaces.order[Tier.DEVICE].victims(1)[0].node is oldest


def test_a_tail_that_is_on_its_way_is_not_placed_a_second_time() -> None:
    cache, prompt = Cached(2), Prompt.of([1, 2, 3], 2)
    index = cache.index
    lease = index.hold(cache.put(prompt, Tier.HOST), 1)
    tail, _ = index.insert_tail(Tier.HOST, lease, prompt, 1)
    slots = np.array([0, 1], np.int32)
    index.change(Tier.DEVICE, lease.node, 0, 1, Change.RESERVE, slots=slots[:1])
    load = index.hold_as_is(tail)
    index.change(Tier.DEVICE, tail, 1, 2, Change.RESERVE, slots=slots[1:])
    assert index.insert_tail(Tier.DEVICE, lease, prompt, 7) == (tail, False)
    assert index.states(Tier.DEVICE, tail, 1, 2) == [CopyState.INCOMING]
    assert index.slots(Tier.DEVICE, tail, 1, 2).tolist() == [1]
    index.release(load)


def test_a_held_run_whose_last_copy_failed_stays_till_its_lease_ends_and_goes_then() -> None:
    cache = Cached()
    index, run = cache.index, cache.put([1, 2])
    cache.put([1, 3])  # splits it
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
    index = (cache := Cached()).index
    index.at(1000.0)
    run = cache.put([1, 2])
    index.at(1020.0)
    first = index.hold(run, 2)
    index.count_hit(first)
    assert index.reuse_gaps.counts[BOUNDS_S.index(30)] == 1
    assert abs(index.reuse_gaps.total_ticks / TICKS_PER_S - 20) < 0.1
    index.at(1050.0)
    second = index.hold(run, 2)
    index.count_hit(second)
    assert index.reuse_gaps.counts[0] == sum(index.reuse_gaps.counts) - 1 == 1
    index.release(first)
    index.release(second)


def test_a_block_is_as_old_as_its_first_use_also_after_its_run_was_cut_in_two() -> None:
    cache = Cached()
    cache.index.at(1000.0)
    old = cache.put([1, 2, 3])
    cache.index.at(1020.0)
    new = cache.put([1, 2, 4])
    assert new.parent is old.parent is not None
    ages = [round(node.born / TICKS_PER_S) for node in (old, new, old.parent)]
    assert ages == [1000, 1020, 1000]


def test_of_blocks_with_one_first_token_the_one_that_shares_most_is_matched_in_part() -> None:
    cache = Cached(4)
    for tokens in ([1, 5, 5, 5], [1, 2, 9, 9], [1, 2, 3, 4]):
        cache.put(tokens)
    for asked, shared in (([1, 2, 3, 9], 3), ([1, 2, 3, 0], 3), ([1, 2, 8, 8], 2), ([1, 5, 5], 3)):
        partial = cache.index.match(cache.prompt(asked)).partial
        assert partial is not None
        assert partial.num_tokens == shared
