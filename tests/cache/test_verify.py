"""What `verify` recounts of an index is broken on purpose, one book at a time, and named."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from tests.cache.cached import Cached
from tierkv.cache.keys import MediaItem, Prompt
from tierkv.cache.node import CopyState, Space, Tier


class TwoPrompts(Cached):
    """Two prompts of four blocks that share two, with an image and on both tiers."""

    def __init__(self) -> None:
        super().__init__(2)
        self.root = self.index.spaces.root
        self.acme = self.index.spaces.open(Space("acme", b"a" * 32, quota=(4, 4)))
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


UNFIT = "does not have one DEVICE slot and state for each of its blocks"
BROKEN: list[tuple[str, dict[str, Callable[[Any], object]], str]] = [
    (
        "lower",
        {"digests": lambda told: told[:-1] + b"?"},
        "has digests that do not fit its tokens",
    ),
    ("upper", {"digests": lambda _: b""}, "has digests that do not fit its tokens"),
    (
        "upper",
        {"extras": lambda told: {0: told[0], 2: b"image"}},
        "has media keys for blocks that it does not have",
    ),
    ("lower", {"soft_pins": lambda _: 1}, "has fewer soft pins than its children"),
    ("lower", {"soft_pins": lambda _: -1}, "is softly pinned -1 times"),
    ("lower", {"hits": lambda _: 1}, "has fewer matches than a child"),
    (
        "root",
        {"children": lambda told: {key + b"\xff": child for key, child in told.items()}},
        "root '' has a child that its first token does not find",
    ),
    ("upper", {"order": lambda _: [b"five"]}, "lists other children in `order` than it has"),
    ("root", {"children_on_host": lambda _: 2}, "root '' counts 2 children on HOST, not 1"),
    ("lower.device", {"num_blocks": lambda told: told + 1}, UNFIT),
    ("lower.device", {"_slots": lambda told: 5 * told}, UNFIT),
    (
        "lower.device",
        {"_states": lambda _: np.full(2, CopyState.READY, np.uint8), "uniform": lambda _: None},
        UNFIT,
    ),
    ("lower", {"_stored": lambda _: np.ones(1, np.bool_)}, "does not have one mark for each block"),
    (
        "root.space",
        {"quota": lambda _: (3, None)},
        "must have both a quota and a DEVICE queue of its own, or neither",
    ),
    (
        "acme.space",
        {"quota": lambda _: (None, None)},
        "must have both a quota and a HOST queue of its own, or neither",
    ),
]


@pytest.mark.promise("`verify` names each wrong count of the index.")
@pytest.mark.parametrize(("what", "changes", "words"), BROKEN)
def test_verify_says_which_book_is_wrong(
    what: str, changes: dict[str, Callable[[Any], object]], words: str
) -> None:
    here = TwoPrompts()
    part = attrgetter(what)(here)
    for name, change in changes.items():
        setattr(part, name, change(getattr(part, name)))
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
