"""Gives the device's memory up for a while, and takes it again."""

from __future__ import annotations

import operator

from tierkv.cache.node import Tier
from tierkv.errors import ConfigError, OwnershipError
from tierkv.service.memory import Memory
from tierkv.service.parts import Parts

_WHY = "sleep"  # a pause of its own: who has paused the node finds it paused after the wake


async def sleep(parts: Parts, memory: Memory, *, keeps_blocks: bool) -> None:
    """See Service.sleep."""
    with parts.lifecycle.alone(Tier.DEVICE):
        parts.scheduler.pause(why=_WHY)
        try:
            await parts.lifecycle.empty_device(keeps_blocks=keeps_blocks)
        except BaseException:
            if not parts.lifecycle.is_asleep:
                parts.scheduler.unpause(why=_WHY)
            raise
        with memory.changing():
            try:
                await parts.mover.suspend()  # goes to its end even if it is cancelled
            finally:
                memory.give_planes_back()


async def wake(parts: Parts, memory: Memory, device_blocks: int | None) -> None:
    """See Service.wake."""
    with parts.lifecycle.alone(Tier.DEVICE), memory.changing():
        if not parts.lifecycle.is_asleep:
            raise OwnershipError("the device does not sleep")
        before = parts.tiers.pools[Tier.DEVICE].capacity
        # An integer, perhaps NumPy's.
        count = before if device_blocks is None else operator.index(device_blocks)
        if count < 1:
            raise ConfigError(f"a device has 1 block or more, not {count}")
        planes = await memory.new_planes(count)
        try:
            await parts.mover.reopen(planes)
        except BaseException:
            try:
                await parts.mover.suspend()
            finally:
                planes.close()
            raise
        memory.use(planes)
        parts.lifecycle.refill_device(count)
        parts.scheduler.unpause(why=_WHY)
