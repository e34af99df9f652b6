"""Opens what a service needs, in order, and closes it in reverse: memory, lanes, store, parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tierkv.cache.keys import Names
from tierkv.errors import ConfigError
from tierkv.pd.staging import STAGING_BLOCKS
from tierkv.sched.ranked import RankedDevice
from tierkv.service.memory import Memory
from tierkv.service.parts import MadeOf, Parts
from tierkv.transfer.mover import Mover
from tierkv.transfer.tier import StorageTier


def check(made_of: MadeOf) -> RankedDevice | None:
    """Raise ConfigError if device, layout and settings do not fit; the device, if it has ranks."""
    settings = made_of.settings
    if made_of.fingerprint.layout.block_size != settings.block_size:
        raise ConfigError("the layout and the cache settings name different block sizes")
    ranks = made_of.device if isinstance(made_of.device, RankedDevice) else None
    num_ranks = len(ranks.devices) if ranks is not None else 1
    if num_ranks != settings.tensor_parallel:
        raise ConfigError(
            f"cache.tensor_parallel is {settings.tensor_parallel}, the device has {num_ranks}"
        )
    return ranks


@asynccontextmanager
async def opened(made_of: MadeOf, memory: Memory, storage: StorageTier) -> AsyncIterator[Parts]:
    """At the end it waits for every copy, and checks the books; see Parts.running."""
    settings, ranks = made_of.settings, check(made_of)
    host_slots = settings.host_slots + STAGING_BLOCKS
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(memory.running(settings.device_blocks, host_slots))
        mover = Mover(made_of.device, memory.planes, memory.host)
        await stack.enter_async_context(mover.running())
        await stack.enter_async_context(memory.open_to_changes())
        storing = storage.running(
            Names(made_of.handoff.prefix, made_of.fingerprint.short),
            made_of.fingerprint.layout,
            memory.host,
            ranks.slices(memory.host) if ranks is not None else (),
            deadline_s=made_of.handoff.lookup_deadline_s,
            block_ttl_s=made_of.handoff.block_ttl_s,
        )
        await stack.enter_async_context(storing)
        parts = Parts(made_of, mover, memory.host, storage)
        await stack.enter_async_context(parts.running())
        yield parts
