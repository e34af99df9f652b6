"""Stored keys of cached blocks, and how far a prompt goes on in storage beyond what is cached."""

from __future__ import annotations

from tierkv.cache.index import Index
from tierkv.cache.keys import KeyRun, Prompt, StoredKey, Tail
from tierkv.cache.match import Match
from tierkv.cache.node import TreeNode
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.transfer.storage_io import StorageIO

# Blocks whose keys are made, and asked for, at once: 20 ms of the loop's time at most. Of a prompt
# that was never stored, no more than these are made.
PIECE_BLOCKS = 2048


def path_keys(index: Index, node: TreeNode, first: int, stop: int) -> list[StoredKey]:
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
    size, space = prompt.block_size, prompt.space
    digests = index.digests(match.node, match.num_blocks)
    known = [StoredKey(one, size, is_tail=False, space=space) for one in digests]
    return known + list(keys_beyond(index, prompt, match))


def keys_beyond(index: Index, prompt: Prompt, match: Match) -> KeyRun:
    """The stored keys of what follows `match`, which is of this prompt and of this moment."""
    end = match.num_blocks
    last = index.digests(match.node, end, start=max(end - 1, 0))
    return KeyRun.of(prompt, last[-1] if last else match.node.space.root_digest, end)


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
    found = await _follow(storage, keys_beyond(index, prompt, match), piece_blocks)
    return found, _end_token(prompt, match, found) - match.num_blocks * prompt.block_size


async def tokens_beyond(index: Index, storage: StorageIO, prompt: Prompt, match: Match) -> int:
    """How many tokens a fetch would bring: what follows `match` without a gap, and then the first
    tokens of a tail that another prompt left there; none for what is cached here in part already.

    match: of this prompt, from this moment. Raises StoreUnavailableError.
    """
    here = match.partial.num_tokens if match.partial else 0
    start = match.num_blocks * prompt.block_size
    if here >= prompt.num_tokens - start:
        return 0
    keys = keys_beyond(index, prompt, match)
    found = await _follow(storage, keys, PIECE_BLOCKS)
    num_tokens = _end_token(prompt, match, found) - start
    if found == len(keys):
        return num_tokens
    block = match.num_blocks + found
    wanted, extra = prompt.block(block), prompt.extra(block)
    # A tail of its own, storage does not have, whatever is listed.
    missing = (keys[found].digest,) if block == prompt.num_blocks else ()
    parent = keys.parent_of(found)
    tail = await storage.tails.best(parent, wanted, extra, prompt.space, missing=missing)
    shared = tail.num_shared if tail is not None else 0
    if not found and shared <= here:
        return 0
    return num_tokens + shared


async def _follow(storage: StorageIO, keys: KeyRun, piece_blocks: int) -> int:
    """How many of `keys` storage has from the first on."""
    found = 0
    while found < len(keys):
        piece = keys[found : found + piece_blocks]
        present = await storage.count_present(piece)
        found += present
        if present < len(piece):
            break
    return found


def _end_token(prompt: Prompt, match: Match, num_keys: int) -> int:
    return min((match.num_blocks + num_keys) * prompt.block_size, prompt.num_tokens)
