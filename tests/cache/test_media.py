"""Equal tokens with other media are other blocks, wherever in a run the media lie."""

from __future__ import annotations

import pytest

from tests.cache.cached import Cached
from tierkv.cache.keys import MediaItem, Prompt

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
        cache = Cached(SIZE)  # a run that no other prompt has split
        cache.put(ours)
        match = cache.index.match(other)
        assert (match.num_blocks, match.partial) == (block, None)
        cache.put(other)
        assert (cache.num_matched(other), cache.num_matched(ours)) == (4, 4)
