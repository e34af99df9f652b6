"""What `verify` recounts of an index is broken on purpose, one book at a time, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tierkv.cache import invariants
from tierkv.cache.index import Index
from tierkv.cache.keys import MediaItem, Prompt
from tierkv.cache.node import BlockPool, CopyState, Space, Tier, TreeNode

# ruff: noqa: SLF001 - to break something is to reach where nobody may


@dataclass
class Cached:
    """Two prompts of four blocks that share two, the first with an image and on both tiers."""

    index: Index
    pools: dict[Tier, BlockPool]
    upper: TreeNode
    lower: TreeNode


def cached() -> Cached:
    index = Index(2, b"r" * 32)
    index.spaces.open(Space("acme", b"a" * 32, quota=(4, 4)))
    pools = {tier: BlockPool(tier.name.lower(), 20) for tier in Tier}
    prompts = [Prompt.of([1, 2, 3, 4, last, 6, 7, 8], 2, [MediaItem(0, 1, b"i" * 16)])
               for last in (5, 9)]  # fmt: skip
    for prompt in prompts:
        for tier in (Tier.DEVICE, Tier.HOST):
            lease = index.hold(index.match(prompt).node, 0)
            slots = pools[tier].allocate(4)
            pools[tier].release(slots[list(index.insert(tier, lease, prompt, 4, slots))])
            index.release(lease)
    lower = index.match(prompts[0]).node
    assert lower.parent is not None
    index.digests(lower, 4)
    made = Cached(index, pools, lower.parent, lower)
    assert said_of(made) == []
    return made


def said_of(here: Cached) -> list[str]:
    return invariants.findings(here.index, here.pools, {tier: [] for tier in Tier})


def wrong_digest(here: Cached) -> None:
    here.lower.digests = here.lower.digests[:-1] + b"?"


def digest_without_its_parents(here: Cached) -> None:
    here.upper.digests = b""


def media_elsewhere(here: Cached) -> None:
    here.upper.extras = {0: here.upper.extra(0), here.upper.end: b"image"}


def pins_below(here: Cached) -> None:
    here.lower.soft_pins = 1


def pins_below_zero(here: Cached) -> None:
    here.lower.soft_pins = -1


def hits_below(here: Cached) -> None:
    here.lower.hits = 1


def no_child_by_first_token(here: Cached) -> None:
    key = here.upper.key
    here.index.spaces.root.children = {key + b"\xff": here.index.spaces.root.children[key]}


def order_of_children(here: Cached) -> None:
    here.upper.order = [here.lower.key]


def roots_children(here: Cached) -> None:
    here.index.spaces.root.count_present(Tier.HOST, 1)


def slots_of_fewer_blocks(here: Cached) -> None:
    here.lower.device.num_blocks += 1


def slots_that_are_gone(here: Cached) -> None:
    slots = here.lower.device._slots
    assert slots is not None
    here.lower.device._slots = 5 * slots


def equal_states(here: Cached) -> None:
    device = here.lower.device
    device._states, device.uniform = np.full(2, CopyState.READY, np.uint8), None


def believed_stored(here: Cached) -> None:
    here.lower._stored = np.ones(1, np.bool_)


def quota_without_queue(here: Cached) -> None:
    here.index.spaces.root.space.quota = (3, None)


def queue_without_quota(here: Cached) -> None:
    here.index.spaces.root_named("acme").space.quota = (None, None)


@pytest.mark.promise("`verify` names each wrong count of the index.")
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (wrong_digest, "has digests that do not fit its tokens"),
        (digest_without_its_parents, "has digests that do not fit its tokens"),
        (media_elsewhere, "has media keys for blocks that it does not have"),
        (pins_below, "has fewer soft pins than its children"),
        (pins_below_zero, "is softly pinned -1 times"),
        (hits_below, "has fewer matches than a child"),
        (no_child_by_first_token, "root '' has a child that its first token does not find"),
        (order_of_children, "lists other children in `order` than it has"),
        (roots_children, "root '' counts 2 children on HOST, not 1"),
        (slots_of_fewer_blocks, "does not have one DEVICE slot and state for each of its blocks"),
        (slots_that_are_gone, "does not have one DEVICE slot and state for each of its blocks"),
        (equal_states, "does not have one DEVICE slot and state for each of its blocks"),
        (believed_stored, "does not have one mark for each block"),
        (quota_without_queue, "must have both a quota and a DEVICE queue of its own, or neither"),
        (queue_without_quota, "must have both a quota and a HOST queue of its own, or neither"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_verify_says_which_book_is_wrong(broken: Callable[[Cached], None], words: str) -> None:
    here = cached()
    broken(here)
    assert any(words in said for said in said_of(here)), said_of(here)


def test_a_block_ready_below_one_that_still_comes_is_a_finding() -> None:
    """A match takes the last block's word for all before it."""
    index, pool = Index(1), BlockPool("device", 8)
    for tokens in ((1, 2, 3), (1, 2, 4)):  # a run of two blocks with two below it
        prompt = Prompt.of(tokens, 1)
        match = index.match(prompt)
        lease = index.hold(match.node, match.num_blocks)
        slots = pool.allocate(3 - match.num_blocks)
        index.insert(Tier.DEVICE, lease, prompt, 3, slots)
    pools = {Tier.DEVICE: pool, Tier.HOST: BlockPool("host", 0)}
    assert invariants.findings(index, pools, {tier: [] for tier in Tier}) == []
    [upper] = index.spaces.root.children.values()
    upper.device.uniform = CopyState.INCOMING
    wrong = invariants.findings(index, pools, {tier: [] for tier in Tier})
    assert len(wrong) == 2, "both runs below are named"
    assert all("without a ready parent block there" in text for text in wrong)
