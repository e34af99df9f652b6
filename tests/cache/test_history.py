"""What is remembered of blocks that went: of these, not of others that look like them."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from tests.cache.cached import Cached
from tierkv.cache.history import History, HistoryEvent, MissCause
from tierkv.cache.keys import MediaItem, Prompt, unpack
from tierkv.cache.node import Space, Tier, TreeNode

SIZE = 2
CAT, DOG = b"c" * 16, b"d" * 16


def lose_from(block: int, prompt: Prompt, history: History, at: float = 1.0) -> None:
    """Cache the prompt, cut in two runs, and evict it from `block` on."""
    cache = Cached(SIZE)
    node = cache.put(prompt)
    cache.index.release(cache.index.hold(node, 1))
    history.evicted(node, block - node.start, node.num_blocks, Tier.DEVICE, at)
    cache.drop(node, block - node.start, node.num_blocks)


def random_prompt(rng: random.Random, known: list[Prompt]) -> Prompt:
    """A prompt that often begins like one of before, or differs from it in one place."""
    tokens = [rng.randrange(2) for _ in range(rng.choice((3, 8, 60)))]
    space, image = rng.choice(("", "acme")), rng.choice((None, None, CAT, DOG))
    if known and rng.random() < 0.7:
        before = rng.choice(known)
        space, tokens = before.space, [*unpack(before.tokens).tolist(), *tokens[:3]]
        if rng.random() < 0.3:
            tokens[rng.randrange(len(tokens))] ^= 1
    media = [MediaItem(len(tokens) // 3, 1, image)] if image else []
    return Prompt.of(tokens[:66], SIZE, media, space=space)  # told by itself and 32 before


@pytest.mark.parametrize("seed", range(3))
def test_what_is_told_of_a_block_has_happened_to_it_and_what_went_last_is_told(seed: int) -> None:
    rng, history, prompts = random.Random(seed), History(), list[Prompt]()
    cache = Cached(SIZE)
    index = cache.index
    index.spaces.open(Space("acme", b"a" * 32))
    happened: dict[tuple[object, ...], set[float]] = {}

    def name(prompt: Prompt, block: int) -> tuple[object, ...]:
        """All that a block's KV depends on."""
        tokens = prompt.tokens[: 4 * SIZE * (block + 1)]
        return prompt.space, tokens, *(prompt.extra(at) for at in range(block + 1))

    def name_in(node: TreeNode, block: int) -> tuple[object, ...]:
        path = list(node.path())[::-1]
        tokens = b"".join(part.tokens for part in path)[: 4 * SIZE * (block + 1)]
        extras = [part.extra(at) for part in path for at in range(part.start, part.end)]
        return node.space.name, tokens, *extras[: block + 1]

    for at in range(1, 200):
        prompt = random_prompt(rng, prompts)
        prompts.append(prompt)
        cache.put(prompt)
        for node, start, stop in index.spaces.order[Tier.DEVICE].victims(rng.randrange(60)):
            blocks = range(node.start + start, node.start + stop)
            ends = [(one, index.match(one)) for one in prompts]
            gone = [o for o, end in ends if end.node is node and end.num_blocks >= blocks.stop]
            for block in blocks:
                happened.setdefault(name_in(node, block), set()).add(float(at))
            history.evicted(node, start, stop, Tier.DEVICE, float(at))
            cache.drop(node, start, stop)
            for block in blocks if gone else ():
                event = HistoryEvent(MissCause.EVICTED, "device", float(at))
                assert history.find(gone[0], block) == event
        for other in (random_prompt(rng, prompts), rng.choice(prompts)):
            for block in range(other.num_blocks):
                told = history.find(other, block)
                assert told is None or told.at in happened[name(other, block)]


def test_of_runs_whose_tokens_are_forgotten_the_first_block_is_remembered() -> None:
    history = History(capacity_bytes=4 * 432)  # of four runs
    prompts = [Prompt.of([n, n, 1, 2, 3, 4, 5, 6], SIZE) for n in range(9)]
    for n, prompt in enumerate(prompts):
        lose_from(1, prompt, history, at=float(n))
    inside = [e.at if (e := history.find(prompt, 2)) else None for prompt in prompts]
    assert inside == [None] * 6 + [6.0, 7.0, 8.0], "the older half goes at once"
    first = [e.at if (e := history.find(prompt, 1)) else None for prompt in prompts]
    assert first == list(range(9))


@pytest.mark.parametrize("blocks", [1, 30], ids="runs of {} blocks".format)
def test_what_is_remembered_of_blocks_that_went_takes_13_mb_at_most(blocks: int) -> None:
    cache = Cached(16)
    history = History(32_768 >> 4, (4 << 20) >> 4)  # a sixteenth of what it is
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(2_200):
            prompt = Prompt.of([n] * 16 * (1 + blocks), 16)
            node = cache.put(prompt)
            history.evicted(node, 1, node.num_blocks, Tier.DEVICE, n + 0.5)
            cache.drop(node, 0, node.num_blocks)
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
