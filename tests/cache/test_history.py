"""What is remembered of blocks that went: of these, not of others that look like them."""

from __future__ import annotations

import tracemalloc

import pytest

from tierkv.cache.history import History, HistoryEvent, MissCause
from tierkv.cache.index import Index
from tierkv.cache.keys import MediaItem, Prompt
from tierkv.cache.node import BlockPool, Space, Tier

SIZE = 2
CAT, DOG = b"c" * 16, b"d" * 16


def lose_from(block: int, prompt: Prompt, history: History, at: float = 1.0) -> None:
    """Cache the prompt, cut in two runs, and evict it from `block` on."""
    index = Index(SIZE)
    index.spaces.open(Space("acme", b"a" * 32))
    lease = index.hold(index.spaces.root_of(prompt), 0)
    slots = BlockPool("device", 10).allocate(prompt.num_blocks)
    index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots)
    index.release(lease)
    index.release(index.hold(index.match(prompt).node, 1))
    node = index.match(prompt).node
    history.evicted(node, block - node.start, node.num_blocks, Tier.DEVICE, at)
    index.drop(Tier.DEVICE, node, block - node.start, node.num_blocks)


@pytest.mark.parametrize("space", ["", "acme"])
def test_an_evicted_block_is_found_by_its_prompt_and_by_longer_ones(space: str) -> None:
    history, media = History(), [MediaItem(1, 2, CAT)]
    lose_from(2, Prompt.of([1, 2, 3, 4, 5, 6], SIZE, media, space=space), history, at=7.0)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]):
        event = history.find(Prompt.of(tokens, SIZE, media, space=space), 2)
        assert event == HistoryEvent(MissCause.EVICTED, "device", 7.0)


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


def test_a_block_inside_an_evicted_run_is_found_too() -> None:
    """A shorter prompt has cached the run's first blocks again."""
    history, media = History(), [MediaItem(9, 2, CAT)]
    prompt = Prompt.of([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], SIZE, media)
    lose_from(1, prompt, history, at=7.0)
    for block in range(1, 6):
        assert history.find(prompt, block) == HistoryEvent(MissCause.EVICTED, "device", 7.0)
    assert history.find(prompt, 0) is None
    assert history.find(Prompt.of([1, 2, 3, 4, 5, 6, 7, 0], SIZE), 3) is None, "another block"
    dog = Prompt.of([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], SIZE, [MediaItem(9, 2, DOG)])
    assert history.find(dog, 3) is not None, "before the image"
    assert history.find(dog, 5) is None, "behind another image"


@pytest.mark.parametrize("image", [None, 8, 37, 38], ids="image in block {}".format)
@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 5], [1, 2, 3, 30, 31, 36]], ids=str)
def test_a_run_below_any_number_of_others_is_found(cuts: list[int], image: int | None) -> None:
    """What is hashed of the blocks before it lies in as many runs."""
    media = [] if image is None else [MediaItem(2 * image, 1, CAT)]
    history, index, prompt = History(), Index(SIZE), Prompt.of(range(2 * 40), SIZE, media)
    lease = index.hold(index.spaces.root_of(prompt), 0)
    index.insert(Tier.DEVICE, lease, prompt, 40, BlockPool("device", 40).allocate(40))
    index.release(lease)
    for cut in (*cuts, 38):
        index.release(index.hold(index.match(prompt).node, cut))
    node = index.match(prompt).node
    assert node.start == 38
    history.evicted(node, 0, 2, Tier.HOST, 7.0)
    for block in (38, 39):
        assert history.find(prompt, block) == HistoryEvent(MissCause.EVICTED, "host", 7.0)
    near = Prompt.of([*range(7 * 2), 99, *range(7 * 2 + 1, 80)], SIZE, media)  # block 7 of 6 to 38
    assert history.find(near, 38) is None, "another block before it"
    if image is not None:
        assert history.find(Prompt.of(range(2 * 40), SIZE), 38) is None, "without the image"


def test_a_part_of_a_run_is_that_part_only() -> None:
    """Blocks 3 to 5 of 2 to 8."""
    history, index, prompt = History(), Index(SIZE), Prompt.of(range(2 * 8), SIZE)
    lease = index.hold(index.spaces.root_of(prompt), 0)
    index.insert(Tier.DEVICE, lease, prompt, 8, BlockPool("device", 8).allocate(8))
    index.release(lease)
    index.release(index.hold(index.match(prompt).node, 2))
    history.evicted(index.match(prompt).node, 1, 4, Tier.DEVICE, 7.0)
    found = [history.find(prompt, block) is not None for block in range(8)]
    assert found == [False] * 3 + [True] * 3 + [False] * 2
    assert history.find(Prompt.of(range(2 * 5 + 1), SIZE), 5) is None, "not a whole block"


def test_the_newest_of_what_happened_to_a_block_counts_whichever_run_it_went_with() -> None:
    history, prompt = History(), Prompt.of([1, 2, 3, 4, 5, 6, 7, 8], SIZE)
    history.record(prompt, 2, HistoryEvent(MissCause.LATE, "storage", 1.0))
    lose_from(1, prompt, history, at=7.0)
    lose_from(1, Prompt.of([1, 2, 3, 4], SIZE), history, at=9.0)  # its first block once more
    assert [e.at if (e := history.find(prompt, n)) else None for n in range(4)] == [None, 9, 7, 7]
    lose_from(1, Prompt.of([1, 2, 3, 4, 5, 6], SIZE), history, at=11.0)  # a shorter run of it
    assert [e.at if (e := history.find(prompt, n)) else None for n in range(4)] == [None, 11, 11, 7]


def test_of_runs_whose_tokens_are_forgotten_the_first_block_is_remembered() -> None:
    history = History(capacity_bytes=4 * 432)  # of four runs
    prompts = [Prompt.of([n, n, 1, 2, 3, 4, 5, 6], SIZE) for n in range(9)]
    for n, prompt in enumerate(prompts):
        lose_from(1, prompt, history, at=float(n))
    inside = [e.at if (e := history.find(prompt, 2)) else None for prompt in prompts]
    assert inside == [None] * 6 + [6.0, 7.0, 8.0], "the older half goes at once"
    first = [e.at if (e := history.find(prompt, 1)) else None for prompt in prompts]
    assert first == list(range(9))


@pytest.mark.parametrize("blocks", [1, 2, 30], ids="runs of {} blocks".format)
def test_what_is_remembered_of_blocks_that_went_takes_13_mb_at_most(blocks: int) -> None:
    index, pool = Index(16), BlockPool("device", 64)
    history = History(32_768 >> 4, (4 << 20) >> 4)  # a sixteenth of what it is
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(2_200):
            prompt = Prompt.of([n] * 16 * (1 + blocks), 16)
            lease = index.hold(index.spaces.root_of(prompt), 0)
            slots = pool.allocate(prompt.num_blocks)
            index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots)
            index.release(lease)
            node = index.match(prompt).node
            history.evicted(node, 1, node.num_blocks, Tier.DEVICE, n + 0.5)
            pool.release(index.drop(Tier.DEVICE, node, 0, node.num_blocks))
        assert tracemalloc.get_traced_memory()[0] - before < 13e6 / 16
    finally:
        tracemalloc.stop()
    assert 32_768 >> 5 < len(history) <= 32_768 >> 4


def test_the_oldest_events_are_forgotten_and_one_that_repeats_is_new() -> None:
    history, prompts = History(2), [Prompt.of([n, n], SIZE) for n in range(3)]
    late = HistoryEvent(MissCause.LATE, "storage", 1.0)
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        history.record(prompt, 0, late)
    assert len(history) == 2
    assert [history.find(prompt, 0) for prompt in prompts] == [late, None, late]
