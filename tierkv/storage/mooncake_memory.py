"""The memory that Mooncake's client has been told of: a network card moves bytes of no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np

from tierkv.errors import StoreUnavailableError
from tierkv.storage.mooncake_client import Client
from tierkv.storage.protocol import Buffer

# For one call's headers, tails and slices that are put together, which lie outside the pools. What
# is beyond that stays where it is: over TCP it goes all the same.
_SCRATCH_BYTES = 4 << 20

Pieces = Sequence[memoryview]


def pointer(view: Buffer) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class KnownMemory:
    """pools: of the node; with none nothing is registered, and everything stays where it is.
    num_users: so many calls at a time have pieces that are not in a pool."""

    def __init__(self, client: Client, pools: Pieces, *, num_users: int) -> None:
        self._client = client
        self._scratch: SimpleQueue[memoryview] = SimpleQueue()
        self._pools = [pool.cast("B") for pool in pools if pool.nbytes]
        if self._pools:
            memory = memoryview(bytearray(num_users * _SCRATCH_BYTES))
            self._pools.append(memory)
            for at in range(0, len(memory), _SCRATCH_BYTES):
                self._scratch.put(memory[at : at + _SCRATCH_BYTES])
        self._ranges = [range(start := pointer(p), start + len(p)) for p in self._pools]
        self._registered: list[int] = []

    def register(self) -> None:
        """Raises StoreUnavailableError."""
        for where in self._ranges:
            if status := self._client.register_buffer(where.start, len(where)):
                raise StoreUnavailableError(
                    f"Mooncake cannot register {len(where)} bytes of host memory ({status})"
                )
            self._registered.append(where.start)

    def unregister(self) -> None:
        while self._registered:
            self._client.unregister_buffer(self._registered.pop())

    @contextmanager
    def known(
        self, values: Sequence[Pieces]
    ) -> Iterator[tuple[Sequence[Pieces], Sequence[tuple[memoryview, memoryview]]]]:
        """Inside: the values' pieces, where the client may read and write them; and which of them
        are copies, each (the piece, its copy). Blocks while too many calls have such pieces."""
        if not self._pools:
            yield values, ()
            return
        scratch = self._scratch.get()
        try:
            at, known, copies = 0, [], []
            for pieces in values:
                mine = []
                for piece in pieces:
                    end = at + len(piece)
                    if end > len(scratch) or self._has(piece):
                        mine.append(piece)
                        continue
                    mine.append(scratch[at:end])
                    copies.append((piece, mine[-1]))
                    at = end
                known.append(mine)
            yield known, copies
        finally:
            self._scratch.put(scratch)

    def _has(self, piece: memoryview) -> bool:
        start = pointer(piece)
        return any(start in where and start + len(piece) <= where.stop for where in self._ranges)
