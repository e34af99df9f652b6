"""How far a prompt goes on in storage beyond what a node has, asked for in pieces."""

from __future__ import annotations

from tierkv.cache.keys import Prompt, chain, keys_of
from tierkv.cache.match import Match
from tierkv.sched.tiers import Tiers
from tierkv.transfer.storage_io import StorageIO

# Blocks whose keys are made, and asked for, at once: 20 ms of the loop's time at most. Of a prompt
# that was never stored, no more than these are made.
PIECE_BLOCKS = 2048


async def stored_beyond(
    tiers: Tiers,
    storage: StorageIO,
    prompt: Prompt,
    match: Match,
    *,
    piece_blocks: int = PIECE_BLOCKS,
) -> tuple[int, int]:
    """How many blocks, the tail included, and how many tokens follow `match` without a gap.

    match: of this prompt, from this moment. Raises StoreUnavailableError.
    """
    known = tiers.index.digests(match.node, match.num_blocks)
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
        if found < len(keys) or stop == prompt.num_blocks:
            return num_blocks, num_tokens
        parent, start = digests[-1], stop
