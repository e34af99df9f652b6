"""Prefetches: what storage has of a prompt is brought to the host before a request needs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tierkv.api.idempotency import Once
from tierkv.api.sessions import Key
from tierkv.api.types import PrefetchState
from tierkv.cache.keys import Prompt
from tierkv.errors import StoreUnavailableError
from tierkv.http.problems import TooManyError, UnknownIdError
from tierkv.service import Service
from tierkv.tasks import task_group

MOST_RUNNING = 256
MOST_DONE = 4096
DONE_TTL_S = 300.0


@dataclass(slots=True, eq=False)
class Prefetch:
    key: Key
    prompt_tokens: int
    task: asyncio.Task[None] | None = None
    state: PrefetchState = PrefetchState.RUNNING
    tokens: range = range(0)
    problem: str | None = None


class Prefetches:
    """At the end of `running` those under way are given up."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: set[Prefetch] = set()
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        now = asyncio.get_running_loop().time
        self._once: Once[Prefetch] = Once(most=MOST_DONE, ttl_s=DONE_TTL_S, now=now)
        async with task_group() as self._tasks:
            try:
                yield
            finally:
                for prefetch in list(self._running):
                    self.cancel(prefetch)

    async def begin(
        self, key: Key, content: bytes, prompt: Prompt, *, deadline_s: float
    ) -> Prefetch:
        """The prefetch of this key, begun now or before. Raises StoreUnavailableError without a
        storage tier, TooManyError, and DuplicateRequestError."""

        async def first() -> Prefetch:
            if self._service.tiers.copies.storage is None:
                raise StoreUnavailableError("this node has no storage tier")
            if len(self._running) >= MOST_RUNNING:
                raise TooManyError(f"{MOST_RUNNING} prefetches are under way")
            prefetch = Prefetch(key, prompt.num_tokens)
            self._running.add(prefetch)
            assert self._tasks is not None, "prefetches are running"
            prefetch.task = self._tasks.create_task(
                self._run(prefetch, prompt, deadline_s), name="tierkv-prefetch"
            )
            return prefetch

        return await self._once.do(key, content, first)

    def find(self, key: Key) -> Prefetch:
        """Raises UnknownIdError."""
        prefetch = self._once.find(key)
        if prefetch is None:
            raise UnknownIdError(f"there is no prefetch {key[1]!r}")
        return prefetch

    def cancel(self, prefetch: Prefetch) -> None:
        """Wait for it no more: what is on its way still arrives. No error if it is over."""
        if prefetch.task is not None and prefetch in self._running:
            prefetch.task.cancel()
            self._is_over(prefetch, PrefetchState.CANCELLED)

    async def _run(self, prefetch: Prefetch, prompt: Prompt, deadline_s: float) -> None:
        fetched = await self._service.fetcher.fetch(prompt, deadline_s=deadline_s)
        fetched.release()  # the cache decides from here on what stays
        prefetch.tokens = fetched.tokens
        if fetched.first_problem is not None:
            prefetch.problem = fetched.first_problem.reason
        is_whole = prefetch.problem is None
        self._is_over(prefetch, PrefetchState.DONE if is_whole else PrefetchState.PARTIAL)

    def _is_over(self, prefetch: Prefetch, state: PrefetchState) -> None:
        prefetch.state = state
        self._running.discard(prefetch)
        self._once.let_go(prefetch.key)
