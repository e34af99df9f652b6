"""The longest cached run of a prompt: walks the tree, changes nothing."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import NamedTuple

from tierkv.cache.keys import Prompt
from tierkv.cache.node import Node
from tierkv.cache.states import CopyState
from tierkv.cache.tokens import TOKEN_BYTES, common_tokens, common_tokens_at

Segment = tuple[Node, int, int]  # blocks [i, j) of a node's run, counted from the run's start


class PartialMatch(NamedTuple):
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
    if _is_ready(node):
        device = pos
    for part, start, stop in segments(node, 0, pos) if device < pos else ():
        copies = part.copies[0]
        if copies.uniform is CopyState.READY and not loading:
            device += stop - start
            continue
        ready = copies.leading(CopyState.READY, start, stop) if loading == 0 else 0
        device += ready
        if start + ready < stop:
            loading += copies.present_in(start + ready, stop)
    partial = _partial(node, pos, prompt, max_tokens)
    return Match(node, pos, device, loading, pos - device - loading, partial)


def _is_ready(node: Node) -> bool:
    """Whether the whole path is on the device, as it is mostly."""
    part = node
    while part.parent is not None:
        if part.copies[0].uniform is not CopyState.READY:
            return False
        part = part.parent
    return True


def descend(node: Node, pos: int, prompt: Prompt, stop: int) -> tuple[Node, int]:
    """Follow blocks [pos, stop) of `prompt` from `node`, whose path covers [0, pos)."""
    tokens, width, extras = prompt.tokens, prompt.block_size * TOKEN_BYTES, prompt.extras
    if pos < node.end and pos < stop:
        pos += _shared_blocks(node, pos, prompt, stop)
    while pos < stop and pos == node.end:
        at = pos * width
        extra = extras.get(pos, b"") if extras else b""
        child = node.children.get((extra, tokens[at : at + width]))
        if child is None:
            break
        node = child
        pos += _shared_blocks(node, pos, prompt, stop)
    return node, pos


def segments(node: Node, start: int, stop: int) -> list[Segment]:
    """Blocks [start, stop) of the path to `node`, as parts of runs, in path order."""
    parts: list[Segment] = []
    part: Node | None = node
    while part is not None and part.end > start:
        first, last = max(start, part.start), min(stop, part.end)
        if first < last:
            parts.append((part, first - part.start, last - part.start))
        part = part.parent
    parts.reverse()
    return parts


def _shared_blocks(node: Node, pos: int, prompt: Prompt, stop: int) -> int:
    """How many blocks from `pos` on, at most up to `stop`, `node` shares with the prompt."""
    width = prompt.block_size * TOKEN_BYTES
    first = pos - node.start
    if first == 0 and node.end <= stop and prompt.tokens.startswith(node.tokens, pos * width):
        blocks = node.num_blocks  # compared in place, nothing copied
    else:
        limit = min(stop, node.end) - pos
        blocks = (
            common_tokens_at(
                prompt.tokens,
                pos * width,
                node.packed,
                first * width,
                limit * prompt.block_size,
            )
            // prompt.block_size
        )
    if node.extras or prompt.extras:
        for block in range(pos, pos + blocks):
            if node.extra(block) != prompt.extra(block):
                return block - pos
    return blocks


def _partial(node: Node, pos: int, prompt: Prompt, max_tokens: int) -> PartialMatch | None:
    start = pos * prompt.block_size
    stop = min(max_tokens, start + prompt.block_size)
    if stop <= start or (pos == node.end and not node.order):
        return None
    rest = prompt.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]
    extra = prompt.extra(pos)
    if pos < node.end:
        width = prompt.block_token_bytes
        at = (pos - node.start) * width
        shared = common_tokens(node.packed[at : at + width], rest)
        if shared and node.extra(pos) == extra:
            return PartialMatch(node, pos, shared)
        return None
    # Among sorted byte strings the one that shares most with `rest` is next to its place.
    place = bisect.bisect_left(node.order, (extra, rest))
    best, child = 0, None
    for key in node.order[max(place - 1, 0) : place + 1]:
        if key[0] == extra and (shared := common_tokens(key[1], rest)) > best:
            best, child = shared, node.children[key]
    return None if child is None else PartialMatch(child, pos, best)
