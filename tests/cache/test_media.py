"""Equal tokens with other media are other blocks, wherever in a run the media lie."""

from __future__ import annotations

import pytest

from tierkv.cache.index import Index
from tierkv.cache.keys import MediaItem, Prompt
from tierkv.cache.node import BlockPool, Tier

SIZE = 4
CAT, DOG = b"c" * 16, b"d" * 16
PLACES = [
    (5, 2, 1),  # inside a block
    (4, 4, 1),  # exactly a block
    (4, 1, 1),  # touches its first edge
    (7, 1, 1),  # touches its last edge
    (3, 2, 0),  # across an edge
    (6, 9, 1),  # across two
    (12, 3, 3),  # in the last block
]


def put(index: Index, prompt: Prompt) -> None:
    match = index.match(prompt)
    lease = index.hold(match.node, match.num_blocks)
    slots = BlockPool("device", 100).allocate(prompt.num_blocks - match.num_blocks)
    index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots)
    index.release(lease)


def prompt(*media: MediaItem) -> Prompt:
    return Prompt.of([7] * 16, SIZE, media)


@pytest.mark.parametrize(("start", "length", "block"), PLACES)
@pytest.mark.parametrize("cached", [CAT, None])
def test_a_match_ends_where_the_media_differ(
    start: int, length: int, block: int, cached: bytes | None
) -> None:
    ours = prompt(MediaItem(start, length, cached)) if cached else prompt()
    others = [prompt(MediaItem(start, length, DOG))]
    if cached:
        others += [prompt(), prompt(MediaItem(start, length, CAT), MediaItem(start, 1, DOG))]
    for other in others:
        index = Index(SIZE)  # a run that no other prompt has split
        put(index, ours)
        assert index.match(ours).num_blocks == 4
        match = index.match(other)
        assert (match.num_blocks, match.partial) == (block, None)
        put(index, other)
        assert index.match(other).num_blocks == 4
        assert index.match(ours).num_blocks == 4
