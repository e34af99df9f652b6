"""Stored keys of cached blocks, and how far a prompt goes on in storage beyond what is cached."""

from __future__ import annotations

from typing import NamedTuple

from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt, StoredKey, Tail, chain, keys_of
from tierkv.cache.match import Match
from tierkv.cache.node import Node
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.transfer.storage_io import StorageIO

# Blocks whose keys are made, and asked for, at once: 20 ms of the loop's time at most. Of a prompt
# that was never stored, no more than these are made.
PIECE_BLOCKS = 2048


def path_keys(index: Index, node: Node, first: int, stop: int) -> list[StoredKey]:
    """The stored keys of path blocks [first, stop), a tail being the last of its path."""
    size, space = index.block_size, node.space
    digests = index.digests(node, node.start if node.is_tail else stop)
    keys = [StoredKey(one, size, is_tail=False, space=space.name) for one in digests]
    if node.is_tail:
        parent = digests[-1] if digests else space.root_digest
        tail = Tail(parent, node.tokens, node.extra(node.start))
        tokens = len(node.tokens) // TOKEN_BYTES
        keys.append(StoredKey(tail.digest, tokens, is_tail=True, space=space.name, tail=tail))
    return keys[first:stop]


def prompt_keys(index: Index, prompt: Prompt) -> list[StoredKey]:
    """The stored keys of `prompt`, tail included. What is cached of it keeps its digests."""
    match = index.match(prompt)
    root = match.node.space.root_digest
    digests = index.digests(match.node, match.num_blocks)
    parent = digests[-1] if digests else root
    return keys_of(root, prompt, digests + chain(parent, prompt, match.num_blocks))


async def stored_beyond(
    index: Index,
    storage: StorageIO,
    prompt: Prompt,
    match: Match,
    *,
    piece_blocks: int = PIECE_BLOCKS,
) -> tuple[int, int]:
    """How many blocks, the tail included, and how many tokens follow `match` without a gap.

    match: of this prompt, from this moment. Raises StoreUnavailableError.
    """
    end = await _follow(index, storage, prompt, match, piece_blocks)
    return end.num_blocks, end.num_tokens


async def tokens_beyond(index: Index, storage: StorageIO, prompt: Prompt, match: Match) -> int:
    """How many tokens a fetch would bring: what follows `match` without a gap, and then the first
    tokens of a tail that another prompt left there; none for what is cached here in part already.

    match: of this prompt, from this moment. Raises StoreUnavailableError.
    """
    here = match.partial.num_tokens if match.partial else 0
    rest = prompt.num_tokens - match.num_blocks * prompt.block_size
    if here >= rest:
        return 0
    end = await _follow(index, storage, prompt, match, PIECE_BLOCKS)
    if not end.missing:
        return end.num_tokens
    block = match.num_blocks + end.num_blocks
    wanted, extra = prompt.block(block), prompt.extra(block)
    tail = await storage.tails.best(end.parent, wanted, extra, prompt.space, missing=end.missing)
    shared = tail.num_shared if tail is not None else 0
    if not end.num_blocks and shared <= here:
        return 0
    return end.num_tokens + shared


class _End(NamedTuple):
    """Where storage's answer ends. parent: the digest of the last block before it. missing: digests
    of what was asked for from there on, () if nothing is missing."""

    num_blocks: int
    num_tokens: int
    parent: bytes
    missing: tuple[bytes, ...]


async def _follow(
    index: Index, storage: StorageIO, prompt: Prompt, match: Match, piece_blocks: int
) -> _End:
    known = index.digests(match.node, match.num_blocks)
    parent = known[-1] if known else match.node.space.root_digest
    start, num_blocks, num_tokens = match.num_blocks, 0, 0
    while True:
        stop = min(start + piece_blocks, prompt.num_blocks)
        digests = chain(parent, prompt, start, stop)
        keys = keys_of(parent, prompt, digests)
        if stop < prompt.num_blocks:
            keys = keys[: len(digests)]  # the tail comes with the last piece
        found = await storage.count_present(keys) if keys else 0
        num_blocks += found
        num_tokens += sum(key.num_tokens for key in keys[:found])
        parent = digests[found - 1] if 0 < found <= len(digests) else parent
        if found < len(keys) or stop == prompt.num_blocks:
            return _End(num_blocks, num_tokens, parent, tuple(one.digest for one in keys[found:]))
        start = stop
