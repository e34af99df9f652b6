"""More blocks for requests that run, before anybody is admitted; and who gives up if all wait."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from tierkv.cache.node import Tier
from tierkv.cache.pool import Ids
from tierkv.errors import BadRequestError, OutOfBlocksError, OverQuotaError, RequestTooLargeError
from tierkv.sched.limits import Limits
from tierkv.sched.request import Request, RequestSpec
from tierkv.sched.running import Running
from tierkv.sched.starting import Starting
from tierkv.sched.tiers import Tiers


class Growing:
    """extending: requests that wait for more blocks right now. limits_of: a request's tenant's.
    let_go: lets one that waits for admission, of one tenant or any, give up what was fetched for
    it; whether there was one."""

    def __init__(
        self,
        tiers: Tiers,
        running: Running,
        starting: Starting,
        *,
        limits_of: Callable[[RequestSpec], Limits],
        let_go: Callable[[str | None], bool],
    ) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._running = running
        self._starting = starting
        self._limits_of = limits_of
        self._let_go = let_go
        self.extending: list[Request] = []
        self._short_of_quota: set[Request] = set()  # of those, who wait for their own tenant only

    async def extend(self, request: Request, num_tokens: int) -> None:
        """Make room in the block table for `num_tokens` beyond the prompt's and the committed ones.

        All the blocks or none. It waits for them before anybody is admitted. Raises
        OutOfBlocksError if all that run wait for one another and this one is the least of them:
        `preempt` it then; also if its tenant may not have as many. Raises RequestTooLargeError if
        the device, its tenant's quota or the limit of one request is too small for it.
        """
        request.check_wanted()
        if num_tokens < 0:
            raise BadRequestError(f"num_tokens must not be negative: {num_tokens}")
        num_tokens = operator.index(num_tokens)  # perhaps NumPy's
        tokens = request.whole_prompt.num_tokens + num_tokens
        if not self._missing(request, tokens):
            return
        self._check(request, tokens)
        self.extending.append(request)
        has_waited = False
        try:
            # Another extension of the same request may have brought what this one wants.
            while count := self._missing(request, tokens):
                slots = self._try_extend(request, count)
                if slots is not None:
                    self._grow(request, slots)
                    break
                if not has_waited:  # with this one all may wait, and one of the others must yield
                    has_waited = True
                    self._tiers.capacity_changed()
                await self._tiers.next_change()
                request.check_wanted()
                self._check(request, tokens)
        finally:
            self.extending.remove(request)
            if request not in self.extending:
                self._short_of_quota.discard(request)
            self._tiers.capacity_changed()

    def holds_up(self, space: str) -> bool:
        """Whether a running request waits for blocks that one of this tenant might take: anybody's,
        if the device is full, its tenant's, if it is only that one's quota."""
        return any(
            request not in self._short_of_quota or request.space == space
            for request in self.extending
        )

    def _missing(self, request: Request, tokens: int) -> int:
        """How many blocks its table lacks for so many tokens."""
        return max(-(-tokens // self._index.block_size) - len(request.block_table), 0)

    def _grow(self, request: Request, slots: Ids) -> None:
        private = np.ones(len(slots), np.bool_)
        request.block_table = np.concatenate([request.block_table, slots])
        request.is_private = np.concatenate([request.is_private, private])
        self._running.grown(request, len(slots))

    def _check(self, request: Request, tokens: int) -> None:
        """Raise at once what no waiting would change."""
        more = self._missing(request, tokens)
        total = len(request.block_table) + more
        limits = self._limits_of(request.spec)
        space = self._index.root_of(request.prompt).space
        for most, what in (
            (self._tiers.pools[Tier.DEVICE].capacity, "the device holds"),
            (space.quota[Tier.DEVICE], "its tenant's quota"),
            (limits.request_blocks, "one request may have"),
        ):
            if most is not None and total > most:
                raise RequestTooLargeError(f"{total} blocks are more than {what}: {most}")
        _, blocks = self._running.of_tenant(space.name)
        if limits.blocks is not None and blocks + more > limits.blocks:
            available = max(limits.blocks - blocks, 0)
            raise OutOfBlocksError("the tenant's limit", needed=more, available=available)

    def _try_extend(self, request: Request, count: int) -> Ids | None:
        while True:
            try:
                return self._starting.take(request.prompt, count)
            except OutOfBlocksError as error:
                if isinstance(error, OverQuotaError):
                    self._short_of_quota.add(request)
                    space = request.space
                else:
                    self._short_of_quota.discard(request)
                    space = None
                rivals = self._who_must_yield(space)
                if not rivals:
                    return None
                if self._let_go(space):
                    continue  # before one that runs gives up, those that wait let go
                # The lowest priority yields, and among equals the last that came.
                if request is min(reversed(rivals), key=lambda one: one.spec.priority):
                    raise
                return None

    def _who_must_yield(self, space: str | None) -> list[Request]:
        """Those that run, of this space or of any, in the order in which they came, if all of them
        wait and nothing else makes room, so that one must give up; else nobody."""
        if self._tiers.is_at_work(space):
            return []
        running = self._running
        rivals = [one for one in running.by_id.values() if space is None or one.space == space]
        return rivals if all(one in self.extending for one in rivals) else []
