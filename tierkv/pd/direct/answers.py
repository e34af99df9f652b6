"""What a prefill node tells claimers: where the blocks of its tickets lie, held there meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tierkv.cache.copies import CopyState
from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import Tier
from tierkv.errors import ConfigError
from tierkv.gpu.protocol import HostSlots
from tierkv.pd.direct.address import MAX_BLOCKS, Answer, Ask
from tierkv.pd.direct.planes import ShownPlanes
from tierkv.sched.tiers import Tiers
from tierkv.storage.codec import PlainCodec
from tierkv.storage.threads import WorkerThreads
from tierkv.transfer.slices import Slices

log = logging.getLogger("tierkv.handoff")

_PLAIN = PlainCodec()


@dataclass(slots=True)
class Held:
    """What the last answer on one connection names. uid: who is at its other end, None if that is
    not known."""

    uid: int | None
    leases: list[Lease] = field(default_factory=list)


class Answers:
    """prompts: that may be asked for, by the name of the offer.

    planes: this node's, if it shows them, to claimers that say they are on `machine`.
    on_blocks: called with the number of blocks that a claimer was told of.
    """

    def __init__(  # noqa: PLR0913 - what it shows, and to whom
        self,
        tiers: Tiers,
        slices: Slices,
        slots: HostSlots,
        *,
        machine: str,
        planes: ShownPlanes | None,
        held_s: float,
        on_blocks: Callable[[int], None],
    ) -> None:
        self._tiers = tiers
        self._slices = slices
        self._slots = slots
        self._machine = machine
        self._planes = planes
        self._held_s = held_s
        self._on_blocks = on_blocks
        self._threads = WorkerThreads("direct hand-off", 1)
        self.prompts: dict[str, Prompt] = {}
        self.num_leases = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._threads.running():
            yield

    async def answer(self, ask: Ask, held: Held) -> Answer:
        """What of it is whole, held by a lease that is put into `held` in place of the last."""
        was_held = bool(held.leases) and self._tiers.mover.device.failure is None
        self.let_go(held)
        answer = await self._answer(ask, held)
        self._on_blocks(len(answer.blocks) + len(answer.block_ids))
        return msgspec.structs.replace(answer, held_s=self._held_s, was_held=was_held)

    def let_go(self, held: Held) -> None:
        for lease in held.leases:
            self._tiers.index.release(lease)
            self.num_leases -= 1
        if held.leases:
            held.leases.clear()
            self._tiers.capacity_changed()

    async def _answer(self, ask: Ask, held: Held) -> Answer:
        prompt = self.prompts.get(ask.offer)
        if prompt is None or not 0 <= ask.first < ask.stop <= ask.first + MAX_BLOCKS:
            return Answer()
        if ask.machine:
            return await self._on_device(ask, prompt, held)
        return await self._on_host(ask, prompt, held)

    def _hold(self, prompt: Prompt, stop: int, held: Held) -> Lease:
        index = self._tiers.index
        held.leases.append(index.hold(index.match(prompt).node, stop))
        self.num_leases += 1
        return held.leases[-1]

    async def _on_device(self, ask: Ask, prompt: Prompt, held: Held) -> Answer:
        stop = min(ask.stop, self._tiers.index.match(prompt).device_blocks)
        # Who has a handle can read and write all of the planes, as this user's processes can.
        may = ask.machine == self._machine and held.uid == os.geteuid()
        is_sound = self._tiers.mover.device.failure is None
        if stop <= ask.first or self._planes is None or not may or not is_sound:
            return Answer()
        node = self._hold(prompt, stop, held).node
        try:
            planes = await self._threads.run(self._planes.describe)
        except ConfigError as error:
            log.warning("the device's blocks are not shown: %s", error)
            self.let_go(held)
            return Answer()
        ids = self._tiers.index.slots(Tier.DEVICE, node, ask.first, stop)
        return Answer(planes=planes, block_ids=tuple(ids.tolist()))

    async def _on_host(self, ask: Ask, prompt: Prompt, held: Held) -> Answer:
        tiers, index = self._tiers, self._tiers.index
        stop = min(ask.stop, index.match(prompt).num_blocks)
        if stop <= ask.first:
            return Answer()
        node = self._hold(prompt, stop, held).node
        states = index.states(Tier.HOST, node, ask.first, stop)
        slots = index.slots(Tier.HOST, node, ask.first, stop).tolist()
        ready = [i for i, state in enumerate(states) if state is CopyState.READY]
        keys = tiers.prompt_keys(prompt)[ask.first : stop]
        rows = [(keys[i], slots[i]) for i in ready]
        headers = await self._threads.run(lambda: tuple(self._header(*row) for row in rows))
        array = self._slots.array
        base, width = int(array.ctypes.data), int(array.strides[0])
        return Answer(
            blocks=tuple(ask.first + i for i in ready),
            addresses=tuple(base + slot * width for _, slot in rows),
            headers=headers,
        )

    def _header(self, key: StoredKey, slot: int) -> bytes:
        part = self._slices.parts[0]
        payload = np.ascontiguousarray(part.payload(slot, key.num_tokens))
        return _PLAIN.encode(payload.data, self._slices.identity(key, part.shard))[0]
