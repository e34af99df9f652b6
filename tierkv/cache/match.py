"""The longest cached run of a prompt: walks the tree, changes nothing."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final, NamedTuple

from tierkv.cache.copies import CopyState
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Segment, TreeNode, child_key
from tierkv.cache.tokens import TOKEN_BYTES, common_blocks, common_tokens

_READY: Final = CopyState.READY


class PartialMatch(NamedTuple):
    """A cached block or tail whose first tokens are the prompt's next ones; to be copied."""

    node: TreeNode
    block: int  # counted from the prompt's start
    num_tokens: int


@dataclass(slots=True)  # a value; frozen it would take 0.5 us more to make
class Match:
    """The longest cached run from the start of a prompt, in order.

    The first `device_blocks` are on the device, then `loading_blocks` are on their way there,
    then `host_blocks` are on the host; together they are `num_blocks`.
    """

    node: TreeNode
    num_blocks: int
    device_blocks: int
    loading_blocks: int
    host_blocks: int
    partial: PartialMatch | None


def longest_match(root: TreeNode, prompt: Prompt, max_tokens: int) -> Match:
    """The longest run of `prompt`'s first `max_tokens` tokens."""
    size = prompt.block_size
    node, pos = descend(root, 0, prompt, max_tokens // size)
    device, loading = pos, 0
    if node.device.uniform is not _READY and pos:  # else the path above is, too: see `verify`
        device, loading = _on_device(node, pos)
    partial = None
    if pos * size < max_tokens and (pos < node.end or node.children):
        stop = (pos + 1) * size
        if stop > max_tokens:  # noqa: PLR1730 - min() takes 0.1 us
            stop = max_tokens
        partial = _partial(node, pos, prompt, stop)
    return Match(node, pos, device, loading, pos - device - loading, partial)


def _on_device(node: TreeNode, pos: int) -> tuple[int, int]:
    """How many of the first `pos` blocks of the path are there, and how many after them come."""
    device = loading = 0
    for part, start, stop in segments(node, 0, pos):
        copies = part.device
        ready = copies.leading(_READY, start, stop) if loading == 0 else 0
        device += ready
        if start + ready < stop:
            loading += copies.present_in(start + ready, stop)
    return device, loading


def descend(node: TreeNode, pos: int, prompt: Prompt, stop: int) -> tuple[TreeNode, int]:
    """Follow blocks [pos, stop) of `prompt` from `node`, whose path covers [0, pos)."""
    tokens, width, extras = prompt.tokens, prompt.block_size * TOKEN_BYTES, prompt.extras
    startswith = tokens.startswith
    end = node.end
    if pos < end and pos < stop:
        pos += _shared_blocks(node, pos, prompt, stop)
    while pos == end and pos < stop:
        at = pos * width
        key = tokens[at : at + TOKEN_BYTES]
        if extras:
            key = child_key(key, prompt.extra(pos))
        child = node.children.get(key)
        if child is None:
            break
        num_bytes = child.token_bytes
        if child.end <= stop and num_bytes >= width and not (extras or child.extras):
            run: bytes | memoryview = child.packed
            if len(run) != num_bytes:  # there is more in it than the run: a view copies nothing
                first = child.packed_at
                run = memoryview(run)[first : first + num_bytes]
            if startswith(run, at):
                node, pos = child, child.end  # the whole run, as mostly
                end = pos
                continue
        if node.order:  # others begin with the same token
            child = node.child_with(tokens[at : at + width], prompt.extra(pos))
        if child is None or child.is_tail or not (n := _shared_blocks(child, pos, prompt, stop)):
            break
        node, end, pos = child, child.end, pos + n
    return node, pos


def segments(node: TreeNode, start: int, stop: int) -> list[Segment]:
    """Blocks [start, stop) of the path to `node`, as parts of runs, in path order."""
    parts: list[Segment] = []
    part: TreeNode | None = node
    while part is not None and part.end > start:
        first, last = max(start, part.start), min(stop, part.end)
        if first < last:
            parts.append((part, first - part.start, last - part.start))
        part = part.parent
    parts.reverse()
    return parts


def _shared_blocks(node: TreeNode, pos: int, prompt: Prompt, stop: int) -> int:
    """How many blocks from `pos` on, at most up to `stop`, `node` shares with the prompt."""
    width = prompt.block_size * TOKEN_BYTES
    at, most = node.packed_at + (pos - node.start) * width, min(stop, node.end) - pos
    blocks = common_blocks(prompt.tokens, pos * width, node.packed, at, most, width)
    if node.extras or prompt.extras:
        for block in range(pos, pos + blocks):
            if node.extra(block) != prompt.extra(block):
                return block - pos
    return blocks


def _partial(node: TreeNode, pos: int, prompt: Prompt, stop: int) -> PartialMatch | None:
    """What shares most with block `pos`, which ends at token `stop`, if not with all of it."""
    rest = prompt.tokens[pos * prompt.block_size * TOKEN_BYTES : stop * TOKEN_BYTES]
    extra = prompt.extras.get(pos, b"")
    if pos < node.end:
        shared = common_tokens(node.tokens_of(pos - node.start, pos - node.start + 1), rest)
        if shared and node.extra(pos) == extra:
            return PartialMatch(node, pos, shared)
        return None
    first, order = child_key(rest[:TOKEN_BYTES], extra), node.order
    if first not in node.children:
        return None
    keys = [first]
    if order:
        # Among sorted byte strings the one that shares most with `rest` is next to its place.
        place = bisect.bisect_left(order, child_key(rest, extra))
        keys += [key for key in order[max(place - 1, 0) : place + 1] if key.startswith(first)]
    found = [node.children[key] for key in keys]
    lengths = [common_tokens(child.tokens_of(0, 1), rest) for child in found]
    best = max(lengths)
    return PartialMatch(found[lengths.index(best)], pos, best)
