"""What a request would find, without making one: lookup and explain."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from tierkv.cache.copies import CopyState
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.cache.node import Tier
from tierkv.errors import StoreUnavailableError
from tierkv.observe import Lookup
from tierkv.sched.explain import Explanation, Surroundings, explain
from tierkv.sched.stored import stored_beyond, tokens_beyond
from tierkv.service.parts import Parts


async def look_up(parts: Parts, prompt: Prompt) -> Lookup:
    """See Service.lookup."""
    match, size = parts.index.match(prompt), prompt.block_size
    partial = match.partial
    is_on_device = False
    if partial is not None:  # looked at before the wait, after which it may be gone
        [state] = parts.index.states(Tier.DEVICE, partial.node, partial.block, partial.block + 1)
        is_on_device = state is CopyState.READY
    storage, stored = parts.tiers.storage, 0
    is_known = True
    if storage is not None:
        try:
            stored = await tokens_beyond(parts.tiers, storage, prompt, match)
        except StoreUnavailableError:
            is_known = False
    device = (match.device_blocks + match.loading_blocks) * size
    host = match.host_blocks * size
    if partial is not None and not stored:  # else storage has more of that block
        if is_on_device:
            device += partial.num_tokens
        else:
            host += partial.num_tokens
    return Lookup(prompt.num_tokens, device, host, stored if is_known else None)


async def stored_blocks(parts: Parts, prompt: Prompt, deadline_s: float) -> range | None:
    """Which blocks storage has beyond the local match; None if it does not say so in time."""
    storage, match = parts.tiers.storage, parts.index.match(prompt)
    if storage is not None:
        with suppress(StoreUnavailableError, TimeoutError):
            async with asyncio.timeout(deadline_s):
                stored, _ = await stored_beyond(parts.tiers, storage, prompt, match)
                return range(match.num_blocks, match.num_blocks + stored)
    return None


def explain_now(
    parts: Parts,
    prompt: Prompt,
    fingerprints: Mapping[str, Fingerprint] | None,
    stored: range | None = None,
) -> Explanation:
    """See Service.explain. fingerprints: those of which the caller may hear. stored: blocks that
    storage has, if it was asked."""
    fetcher, computing = parts.fetcher, parts.scheduler.computing

    def is_fetching(asked: Prompt, block: int) -> bool:
        if not fetcher.num_in_flight:
            return False
        keys = parts.tiers.prompt_keys(asked)
        return block < len(keys) and fetcher.is_fetching(keys[block].digest)

    around = Surroundings(
        fetching=is_fetching,
        computing=lambda match, asked: computing.find(match, asked, asked.num_blocks) is not None,
        fingerprints=fingerprints,
        stored=stored,
        now=asyncio.get_running_loop().time(),
    )
    return explain(parts.index, prompt, parts.tiers.history, around)
