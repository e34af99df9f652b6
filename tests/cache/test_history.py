"""What is remembered of blocks that went: of these, not of others that look like them."""

from __future__ import annotations

import pytest

from tierkv.cache.history import Event, Fate, History
from tierkv.cache.index import Index
from tierkv.cache.keys import MediaItem, Prompt
from tierkv.cache.node import Tier
from tierkv.cache.pool import BlockPool
from tierkv.cache.space import Space

SIZE = 2
CAT, DOG = b"c" * 16, b"d" * 16


def lose_from(block: int, prompt: Prompt, history: History, at: float = 1.0) -> None:
    """Cache the prompt, cut in two runs, and evict it from `block` on."""
    index = Index(SIZE)
    index.open_space(Space("acme", b"a" * 32))
    lease = index.hold(index.root_of(prompt), 0)
    slots = BlockPool("device", 10).allocate(prompt.num_blocks)
    index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots)
    index.release(lease)
    index.release(index.hold(index.match(prompt).node, 1))
    node = index.match(prompt).node
    history.evicted(node, block - node.start, Tier.DEVICE, at)


@pytest.mark.parametrize("space", ["", "acme"])
def test_an_evicted_block_is_found_by_its_prompt_and_by_longer_ones(space: str) -> None:
    history, media = History(), [MediaItem(1, 2, CAT)]
    lose_from(2, Prompt.of([1, 2, 3, 4, 5, 6], SIZE, media, space=space), history, at=7.0)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]):
        event = history.find(Prompt.of(tokens, SIZE, media, space=space), 2)
        assert event == Event(Fate.EVICTED, "device", 7.0)


@pytest.mark.parametrize(
    "other",
    [
        Prompt.of([9, 2, 3, 4, 5, 6], SIZE, [MediaItem(1, 2, CAT)]),  # another beginning
        Prompt.of([1, 2, 3, 4, 5, 7], SIZE, [MediaItem(1, 2, CAT)]),
        Prompt.of([1, 2, 3, 4, 5, 6], SIZE, [MediaItem(1, 2, DOG)]),  # another image before it
        Prompt.of([1, 2, 3, 4, 5, 6], SIZE),
        Prompt.of([1, 2, 3, 4, 5, 6], SIZE, [MediaItem(1, 2, CAT)], space="acme"),
    ],
    ids=["beginning", "block", "image", "no image", "tenant"],
)
def test_what_another_prompt_lost_is_not_told_of_this_one(other: Prompt) -> None:
    history = History()
    lose_from(2, Prompt.of([1, 2, 3, 4, 5, 6], SIZE, [MediaItem(1, 2, CAT)]), history)
    assert history.find(other, 2) is None


def test_the_oldest_events_are_forgotten_and_one_that_repeats_is_new() -> None:
    history, prompts = History(2), [Prompt.of([n, n], SIZE) for n in range(3)]
    late = Event(Fate.LATE, "storage", 1.0)
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        history.record(prompt, 0, late)
    assert len(history) == 2
    assert [history.find(prompt, 0) for prompt in prompts] == [late, None, late]
