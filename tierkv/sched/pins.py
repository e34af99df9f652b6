"""Pins by name: blocks that stay until they are unpinned or their time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt
from tierkv.cache.node import TreeNode
from tierkv.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class _Pin:
    timer: asyncio.TimerHandle
    lease: Lease | None
    node: TreeNode | None


class Pins:
    """A hard pin is a lease: its blocks are not evicted at all. A soft one lets them go last.

    on_change: called when one has ended, for those who wait for room.
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
        """Where the soft ones end."""
        return [pin.node for pin in self._pins.values() if pin.node is not None]

    def findings(self) -> list[str]:
        """What is wrong, in words."""
        wrong = []
        for name, pin in self._pins.items():
            if pin.lease is not None and pin.lease.is_released:
                wrong.append(f"pin {name!r} has lost its lease")
            if pin.node is not None and pin.node.parent is not None and pin.node.soft_pins < 1:
                wrong.append(f"pin {name!r} is soft, but its blocks are not marked")
            if pin.timer.cancelled():
                wrong.append(f"pin {name!r} would never end")
        return wrong

    def pin(self, name: str, prompt: Prompt, ttl_s: float, *, is_soft: bool) -> int:
        """Pin what is cached of `prompt` for `ttl_s` seconds; how many blocks that is. A pin of
        the same name is replaced."""
        if not ttl_s > 0:
            raise BadRequestError("a pin lasts for more than 0 seconds")
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
        """Whether there was such a pin."""
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
