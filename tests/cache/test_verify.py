"""What `verify` recounts of an index is broken on purpose, one book at a time, and named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.cache.cached import Cached
from tierkv.cache.keys import MediaItem, Prompt
from tierkv.cache.node import CopyState, Space, Tier

# ruff: noqa: SLF001 - to break something is to reach where nobody may


class TwoPrompts(Cached):
    """Two prompts of four blocks that share two, with an image and on both tiers."""

    def __init__(self) -> None:
        super().__init__(2)
        self.index.spaces.open(Space("acme", b"a" * 32, quota=(4, 4)))
        for last in (9, 5):
            image = [MediaItem(0, 1, b"i" * 16)]
            prompt = Prompt.of([1, 2, 3, 4, last, 6, 7, 8], 2, image)
            for tier in Tier:
                lease = self.index.hold(self.index.match(prompt).node, 0)
                slots = self.pools[tier].allocate(4)
                refused = self.index.insert(tier, lease, prompt, 4, slots)
                self.pools[tier].release(slots[list(refused)])
                self.index.release(lease)
                self.lower = lease.node
        assert self.lower.parent is not None
        self.upper = self.lower.parent
        self.index.digests(self.lower, 4)
        assert self.findings() == []


def wrong_digest(here: TwoPrompts) -> None:
    here.lower.digests = here.lower.digests[:-1] + b"?"


def digest_without_its_parents(here: TwoPrompts) -> None:
    here.upper.digests = b""


def media_elsewhere(here: TwoPrompts) -> None:
    here.upper.extras = {0: here.upper.extra(0), here.upper.end: b"image"}


def pins_below(here: TwoPrompts) -> None:
    here.lower.soft_pins = 1


def pins_below_zero(here: TwoPrompts) -> None:
    here.lower.soft_pins = -1


def hits_below(here: TwoPrompts) -> None:
    here.lower.hits = 1


def no_child_by_first_token(here: TwoPrompts) -> None:
    key = here.upper.key
    here.index.spaces.root.children = {key + b"\xff": here.index.spaces.root.children[key]}


def order_of_children(here: TwoPrompts) -> None:
    here.upper.order = [here.lower.key]


def roots_children(here: TwoPrompts) -> None:
    here.index.spaces.root.count_present(Tier.HOST, 1)


def slots_of_fewer_blocks(here: TwoPrompts) -> None:
    here.lower.device.num_blocks += 1


def slots_that_are_gone(here: TwoPrompts) -> None:
    slots = here.lower.device._slots
    assert slots is not None
    here.lower.device._slots = 5 * slots


def equal_states(here: TwoPrompts) -> None:
    device = here.lower.device
    device._states, device.uniform = np.full(2, CopyState.READY, np.uint8), None


def believed_stored(here: TwoPrompts) -> None:
    here.lower._stored = np.ones(1, np.bool_)


def quota_without_queue(here: TwoPrompts) -> None:
    here.index.spaces.root.space.quota = (3, None)


def queue_without_quota(here: TwoPrompts) -> None:
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
def test_verify_says_which_book_is_wrong(broken: Callable[[TwoPrompts], None], words: str) -> None:
    here = TwoPrompts()
    broken(here)
    assert any(words in said for said in here.findings()), here.findings()


def test_a_block_ready_below_one_that_still_comes_is_a_finding() -> None:
    """A match takes the last block's word for all before it."""
    cache = Cached()
    cache.put([1, 2, 3])
    upper = cache.put([1, 2, 4]).parent  # a run of two blocks with two below it
    assert upper is not None
    assert cache.findings() == []
    upper.device.uniform = CopyState.INCOMING
    wrong = [one for one in cache.findings() if "without a ready parent block there" in one]
    assert len(wrong) == 2, "both runs below are named"
