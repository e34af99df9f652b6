"""How a prefill node says that it lives: a value with a short time to live, written again and again
while it has open tickets."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from uuid import uuid4

from tierkv.clock import Clock
from tierkv.errors import StoreCorruptError, StoreUnavailableError
from tierkv.pd.small import SmallValues
from tierkv.tasks import background
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.handoff")

_BEATS_PER_LEASE = 3
_MAX_BYTES = 64
_GOODBYE_S = 0.5
_AGAIN_S = 0.2
_DECIMALS, _DIGITS = 3, 20


def _until(until: float, incarnation: str) -> bytes:
    """A decimal number, as it always was: seconds with three decimals. The 20 digits behind them
    say whose it is."""
    return f"{until:.3f}{_digits_of(incarnation)}".encode()


def _is_of(value: bytes, incarnation: str) -> bool:
    """Whether it is this producer's, not another's under its name; it is believed of a value that
    ends after the third decimal, as older nodes write it."""
    digits = value.partition(b".")[2][_DECIMALS:]
    return not digits or digits == _digits_of(incarnation).encode()


def _digits_of(incarnation: str) -> str:
    number = int.from_bytes(hashlib.sha256(incarnation.encode()).digest(), "big")
    return f"{number % 10**_DIGITS:0{_DIGITS}}"


class ProducerLease:
    """One for all open tickets of a running node, which a restarted node does not take over."""

    def __init__(
        self, storage: StorageIO, values: SmallValues, clock: Clock, *, lease_s: float
    ) -> None:
        self.incarnation = uuid4().hex
        self.lease_s = lease_s
        self._storage = storage
        self._values = values
        self._clock = clock
        self._num_held = 0
        self._wanted = asyncio.Event()
        self._beaten = asyncio.Event()
        self._hurry = asyncio.Event()
        self._beaten_at = float("-inf")
        self.num_beats = 0

    @property
    def num_held(self) -> int:
        return self._num_held

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """At the end the lease is given up at once, so that nobody waits for it to end."""
        async with background({"tierkv-producer-lease": self._keep()}):
            yield
        if self.num_beats:
            with suppress(StoreUnavailableError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await self._storage.store.delete([self._name])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Say that this node lives until the body has ended."""
        self._num_held += 1
        self._wanted.set()
        if asyncio.get_running_loop().time() - self._beaten_at > self.beat_s:
            self._beaten.clear()
            self._hurry.set()
        try:
            yield
        finally:
            self._num_held -= 1
            if not self._num_held:
                self._wanted.clear()

    async def is_said(self) -> None:
        """Return once it was said. Inside `held`."""
        await self._beaten.wait()

    async def is_alive(self, incarnation: str) -> bool:
        """Whether the node that calls itself so says that it lives. Raises StoreUnavailableError.

        A store that drops nothing by itself is not believed beyond what the value says.
        """
        name = self._storage.names.producer(incarnation)
        try:
            value = await self._values.get(name, max_bytes=_MAX_BYTES)
        except StoreCorruptError:
            return False
        if value is None or not _is_of(value, incarnation):
            return False
        if self._storage.store.capabilities.has_ttl:
            return True
        try:
            return float(value) > self._clock.wall()
        except ValueError:
            return False

    @property
    def beat_s(self) -> float:
        return self.lease_s / _BEATS_PER_LEASE

    @property
    def _name(self) -> str:
        return self._storage.names.producer(self.incarnation)

    async def _keep(self) -> None:
        """The lease outlasts two beats that fail. After one it is tried again soon: a store that
        was away may have let the lease run out, and is back."""
        while True:
            await self._wanted.wait()
            until = _until(self._clock.wall() + self.lease_s, self.incarnation)
            pause_s = min(_AGAIN_S, self.beat_s)
            with suppress(TimeoutError, StoreUnavailableError):
                async with asyncio.timeout(self.lease_s):
                    await self._values.put(self._name, until, ttl_s=self.lease_s)
                pause_s = self.beat_s
            self.num_beats += 1
            self._beaten_at = asyncio.get_running_loop().time()
            self._beaten.set()
            self._hurry.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()
