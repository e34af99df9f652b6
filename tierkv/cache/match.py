"""The longest cached run of a prompt: walks the tree, changes nothing."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from tierkv.cache.keys import Prompt
from tierkv.cache.node import Node, Tier
from tierkv.cache.states import CopyState
from tierkv.cache.tokens import TOKEN_BYTES, common_tokens

Segment = tuple[Node, int, int]  # blocks [i, j) of a node's run, counted from the run's start


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """A cached block or tail whose first tokens are the prompt's next ones; to be copied."""

    node: Node
    block: int  # counted from the prompt's start
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached run from the start of a prompt, in order.

    The first `device_blocks` are on the device, then `loading_blocks` are on their way there,
    then `host_blocks` are on the host; together they are `num_blocks`.
    """

    node: Node
    num_blocks: int
    device_blocks: int
    loading_blocks: int
    host_blocks: int
    partial: PartialMatch | None


def longest_match(root: Node, prompt: Prompt, max_tokens: int) -> Match:
    """The longest run of `prompt`'s first `max_tokens` tokens."""
    node, pos = descend(root, 0, prompt, max_tokens // prompt.block_size)
    device = loading = 0
    for part, start, stop in segments(node, 0, pos):
        states = part.copies[Tier.DEVICE].states[start:stop]
        if loading == 0:
            other = np.flatnonzero(states != CopyState.READY)
            ready = int(other[0]) if len(other) else len(states)
            device += ready
            states = states[ready:]
        loading += int(np.count_nonzero(states))
    return Match(
        node=node,
        num_blocks=pos,
        device_blocks=device,
        loading_blocks=loading,
        host_blocks=pos - device - loading,
        partial=_partial(node, pos, prompt, max_tokens),
    )


def descend(node: Node, pos: int, prompt: Prompt, stop: int) -> tuple[Node, int]:
    """Follow blocks [pos, stop) of `prompt` from `node`, whose path covers [0, pos)."""
    while pos < stop:
        if pos < node.end:
            pos += _shared_blocks(node, pos, prompt, stop)
            if pos < node.end:
                break
            continue
        child = node.children.get((prompt.extra(pos), prompt.block(pos)))
        if child is None:
            break
        node = child
    return node, pos


def segments(node: Node, start: int, stop: int) -> list[Segment]:
    """Blocks [start, stop) of the path to `node`, as parts of runs, in path order."""
    parts: list[Segment] = []
    for part in node.path():
        first, last = max(start, part.start), min(stop, part.end)
        if first < last:
            parts.append((part, first - part.start, last - part.start))
    return parts[::-1]


def _shared_blocks(node: Node, pos: int, prompt: Prompt, stop: int) -> int:
    width = prompt.block_token_bytes
    stop = min(stop, node.end)
    ours = prompt.tokens[pos * width : stop * width]
    theirs = node.tokens[(pos - node.start) * width : (stop - node.start) * width]
    blocks = common_tokens(ours, theirs) // prompt.block_size
    if node.extras or prompt.extras:
        for block in range(pos, pos + blocks):
            if node.extras.get(block, b"") != prompt.extra(block):
                return block - pos
    return blocks


def _partial(node: Node, pos: int, prompt: Prompt, max_tokens: int) -> PartialMatch | None:
    start = pos * prompt.block_size
    stop = min(max_tokens, start + prompt.block_size)
    rest = prompt.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]
    if not rest:
        return None
    if pos < node.end:
        at = (pos - node.start) * prompt.block_token_bytes
        shared = common_tokens(node.tokens[at : at + prompt.block_token_bytes], rest)
        if shared and node.extras.get(pos, b"") == prompt.extra(pos):
            return PartialMatch(node, pos, shared)
        return None
    # Among sorted byte strings the one that shares most with `rest` is next to its place.
    extra = prompt.extra(pos)
    place = bisect.bisect_left(node.order, (extra, rest))
    best, child = 0, None
    for key in node.order[max(place - 1, 0) : place + 1]:
        if key[0] == extra and (shared := common_tokens(key[1], rest)) > best:
            best, child = shared, node.children[key]
    return None if child is None else PartialMatch(child, pos, best)
