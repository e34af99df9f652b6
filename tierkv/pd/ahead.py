"""Brings blocks of a prompt here while its prefill goes on elsewhere: storage to host to device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tierkv.cache.keys import Prompt
from tierkv.cache.node import Tier
from tierkv.errors import TransferError
from tierkv.sched.fetch import Fetched, Fetcher
from tierkv.sched.request import RequestSpec
from tierkv.sched.scheduler import Scheduler

# A load takes the loop half a millisecond, in which PCIe 5 moves 25 MiB: while a prompt of 80 MiB
# comes, five of them took it a tenth of its time (2-core x86-64 VM and H200, 2026-11-23).
LEAST_BYTES = 32 << 20


class Ahead:
    """Holds nothing between its steps: what came is cached like anything else, and may have to be
    fetched again when room is short. So a claim that waits for its ticket is in nobody's way."""

    def __init__(
        self,
        spec: RequestSpec,
        scheduler: Scheduler,
        fetcher: Fetcher,
        *,
        before_fetch: Callable[[Prompt], Awaitable[None]],
        came: list[range],
        deadline_s: float,
    ) -> None:
        """before_fetch: ask the producer where blocks are. came: takes which tokens were fetched.
        deadline_s: for one step's fetch."""
        self._spec = spec
        self._scheduler = scheduler
        self._fetcher = fetcher
        self._before_fetch = before_fetch
        self._came_here = came
        self._deadline_s = deadline_s
        self._wanted = 0
        self._done = 0
        self._came = asyncio.Event()

    def ready(self, num_blocks: int | None) -> None:
        """The prompt's first blocks are in storage; None: nobody said how many."""
        most = self._spec.prompt.num_blocks
        self._wanted = max(self._wanted, most if num_blocks is None else min(num_blocks, most))
        self._came.set()

    async def run(self) -> None:
        """Until cancelled. What goes wrong here is found again by the claim itself."""
        while True:
            await self._came.wait()
            self._came.clear()
            if self._wanted <= self._done:
                continue
            prefix = _first_blocks(self._spec.prompt, self._wanted)
            await self._before_fetch(prefix)
            fetched = await self._fetcher.fetch(prefix, deadline_s=self._deadline_s)
            self._came_here.append(fetched.tokens)
            try:
                if fetched.first_problem is None:
                    self._done = prefix.num_blocks
                else:
                    self._wanted = self._done
                await self._load(prefix, fetched)
            finally:
                fetched.release()

    async def _load(self, prefix: Prompt, fetched: Fetched) -> None:
        """Bring to the device what is on the host now, if there is room that nobody waits for."""
        tiers = self._scheduler.tiers
        has_room = tiers.available(Tier.DEVICE) >= 2 * self._spec.num_blocks
        if has_room and fetched.tokens:
            with suppress(TransferError):
                num_blocks = fetched.tokens.stop // prefix.block_size
                await self._scheduler.load_ahead(_first_blocks(prefix, num_blocks))


class LoadsAhead:
    """Brings to the device what has been fetched of a prompt, LEAST_BYTES or more at a time, while
    the rest is fetched. What comes last the request itself brings.

    has_room: whether the device could take so many blocks now, and nobody is before them.
    """

    def __init__(
        self, spec: RequestSpec, scheduler: Scheduler, has_room: Callable[[int], bool]
    ) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._has_room = has_room
        self._least_blocks = LEAST_BYTES / scheduler.tiers.mover.planes.layout.block_bytes
        self._on_host = self._begun = self._on_device = 0
        self._came = asyncio.Event()

    def arrived(self, num_blocks: int) -> None:
        """The prompt's first blocks are on the host."""
        self._on_host = min(num_blocks, self._spec.prompt.num_blocks)
        if self._on_host - self._begun >= self._least_blocks:
            self._came.set()

    async def run(self) -> None:
        """Until cancelled; loads that have begun then go on, and the request finds them."""
        while True:
            await self._came.wait()
            self._came.clear()
            on_host = self._begun = self._on_host
            if self._has_room(self._spec.num_blocks - self._on_device):
                with suppress(TransferError):  # the request tries again, and is told
                    await self._scheduler.load_ahead(_first_blocks(self._spec.prompt, on_host))
                    self._on_device = on_host


def _first_blocks(prompt: Prompt, count: int) -> Prompt:
    tokens = prompt.tokens[: count * prompt.block_token_bytes]
    extras = {block: extra for block, extra in prompt.extras.items() if block < count}
    return Prompt(tokens, prompt.block_size, extras, prompt.space)
