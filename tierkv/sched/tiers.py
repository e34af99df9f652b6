"""The device, host and storage tiers of one node, and pins of cached blocks.

A pin protects a prompt's cached blocks from eviction for some time, without a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.cache.eviction import WriteRule
from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt
from tierkv.cache.node import BlockPool, Tier, TreeNode
from tierkv.errors import BadRequestError
from tierkv.sched.copies import Copies, path_keys
from tierkv.sched.events import CacheEvents
from tierkv.sched.eviction import Eviction
from tierkv.sched.request import Decisions
from tierkv.sched.slots import Slots, Work
from tierkv.transfer.mover import Mover
from tierkv.transfer.storage_io import StorageIO


@dataclass(frozen=True, slots=True)
class _Pin:
    timer: asyncio.TimerHandle
    lease: Lease | None
    node: TreeNode | None


class Pins:
    """Pins by name: each protects a prompt's cached blocks for some seconds without a request.

    The blocks of a hard pin are not evicted. The blocks of a soft pin are evicted after all blocks
    without a pin.

    Args:
        index: the index of the blocks.
        on_change: called when a pin has ended, because its blocks may be evicted from then on.
    """

    def __init__(self, index: Index, on_change: Callable[[], None]) -> None:
        self._index = index
        self._on_change = on_change
        self._pins: dict[str, _Pin] = {}

    @property
    def num_leases(self) -> int:
        return sum(pin.lease is not None for pin in self._pins.values())

    @property
    def soft_ends(self) -> list[TreeNode]:
        """The index node with the last pinned block, for each soft pin."""
        return [pin.node for pin in self._pins.values() if pin.node is not None]

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; [] if there are none."""
        wrong = []
        for name, pin in self._pins.items():
            if pin.lease is not None and pin.lease.is_released:
                wrong.append(f"pin {name!r} has lost its lease")
            if pin.node is not None and pin.node.parent is not None and pin.node.soft_pins < 1:
                wrong.append(
                    f"pin {name!r} is soft, but its blocks are not marked as softly pinned"
                )
            if pin.timer.cancelled():
                wrong.append(f"pin {name!r} has no end")
        return wrong

    def pin(self, name: str, prompt: Prompt, ttl_s: float, *, is_soft: bool) -> int:
        """Pin the cached blocks of `prompt` under a name; an earlier pin of the same name ends.

        Args:
            name: name of the pin.
            prompt: the prompt whose cached blocks are pinned.
            ttl_s: seconds until the pin ends, above 0.
            is_soft: True to evict the blocks after all blocks without a pin; False to never evict
                them.

        Returns:
            The number of pinned blocks.

        Raises:
            BadRequestError: `ttl_s` is not above 0.
        """
        if not ttl_s > 0:
            raise BadRequestError(f"a pin's lifetime must be above 0 s, not {ttl_s}")
        match = self._index.match(prompt)
        lease = node = None
        if is_soft:
            node = self._index.pin_softly(match.node, match.num_blocks)
        else:
            lease = self._index.hold(match.node, match.num_blocks)
        self.unpin(name)
        timer = asyncio.get_running_loop().call_later(ttl_s, self.unpin, name)
        self._pins[name] = _Pin(timer, lease, node)
        return match.num_blocks

    def unpin(self, name: str) -> bool:
        """End the pin of this name; return whether there was one."""
        was_there = self._end(name)
        if was_there:
            self._on_change()
        return was_there

    def _end(self, name: str) -> bool:
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        pin.timer.cancel()
        if pin.lease is not None:
            self._index.release(pin.lease)
        if pin.node is not None:
            self._index.unpin_softly(pin.node)
        return True

    def clear(self) -> None:
        for name in list(self._pins):
            self._end(name)


class Tiers:
    """The tiers of one node, and the objects that move blocks between them.

    Args:
        index: the index of all blocks.
        device_pool: the free device slots.
        host_pool: the free host slots.
        mover: copies between device and host.
        storage: reads and writes of the storage tier; None without storage.
        host_rule: decides which device blocks are copied to the host, and when.
        storage_rule: decides which host blocks are written to storage, and when.
        background_copy_bytes: largest number of bytes of early copies (before eviction) to the host
            that run at the same time. Early copies to storage have a limit of their own, which is
            the same number or a quarter of the host tier, if that is less.
        block_bytes: bytes of one block.
    """

    def __init__(  # noqa: PLR0913 - what the tiers are made of
        self,
        *,
        index: Index,
        device_pool: BlockPool,
        host_pool: BlockPool,
        mover: Mover,
        storage: StorageIO | None,
        host_rule: WriteRule,
        storage_rule: WriteRule,
        background_copy_bytes: int,
        block_bytes: int,
    ) -> None:
        self.index = index
        self.mover = mover
        self.decisions = Decisions()
        self.events = CacheEvents(self._digests_of, index.spaces.is_retired)
        self.work = Work()
        self.slots = Slots(device_pool, host_pool, self.work)
        rules = {Tier.DEVICE: host_rule, Tier.HOST: storage_rule}
        self.eviction = Eviction(index, self.slots, self.work, rules, events=self.events)
        self.copies = Copies(
            self.eviction,
            self.slots,
            self.work,
            events=self.events,
            mover=mover,
            storage=storage,
            block_bytes=block_bytes,
            background_copy_bytes=background_copy_bytes,
        )
        self.pins = Pins(index, self.work.capacity_changed)
        self.work.on_capacity(self._forget_retired)

    def retire(self) -> None:
        """Exclude all present blocks from matching, for example after a change of weights.

        Blocks in use stay until their requests end, but are no longer stored or copied to the host.
        """
        if self.events.has_listeners:
            for root in self.index.spaces.roots():
                for node in list(root.children.values()):
                    self.eviction.publish_forgotten(node, 0)
        self.index.spaces.renew()
        self.work.capacity_changed()

    def _forget_retired(self) -> None:
        pending = list(self.index.spaces.retired())
        while pending:
            for child in list(pending.pop().children.values()):
                if child.holders:
                    pending.append(child)
                else:
                    self.eviction.forget(child, 0)

    def _digests_of(self, node: TreeNode, first: int, stop: int) -> list[bytes]:
        if node.is_tail:
            return [key.digest for key in path_keys(self.index, node, first, stop)]
        return self.index.digests(node, stop, start=first)
