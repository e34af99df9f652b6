"""What is known of a tier when a fetch begins, and what the fetch has taught when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from tierkv.cache.history import Event, Fate
from tierkv.cache.keys import Prompt
from tierkv.sched.estimate import Decision, Estimator, FetchPolicy
from tierkv.sched.fetched import Progress
from tierkv.sched.seldom import Seldom
from tierkv.sched.tiers import Tiers
from tierkv.storage.protocol import GetStatus

log = logging.getLogger("tierkv.fetcher")

_FATES = {GetStatus.DAMAGED: Fate.DAMAGED, GetStatus.FAILED: Fate.FAILED}


class FetchWorth:
    """estimator: decides, and learns; None: every fetch is worth its time."""

    def __init__(self, tiers: Tiers, estimator: Estimator | None) -> None:
        self._tiers = tiers
        self._ended_early = Seldom(log, "fetch ended early (x%d): %s")
        self.estimator = estimator or Estimator(
            bytes_per_token=1.0, policy=FetchPolicy.WAIT_COMPLETE
        )
        self._arrived_bytes = 0.0  # since the start, for all fetches

    def findings(self) -> list[str]:
        """What is wrong, in words, when nothing is on its way."""
        queued = self.estimator.queued_bytes
        if abs(queued) < 1:
            return []
        return [f"nothing runs, but {queued:.0f} bytes are counted as queued for fetches"]

    def refuse(self, progress: Progress, decision: Decision) -> None:
        self._tiers.decisions.recompute_storage += 1
        progress.ends(Fate.NOT_WORTH_IT, decision.reason)

    async def answer(self, question: Awaitable[int], tokens: int, give_up_s: float | None) -> int:
        """The tier's answer; how long it took is remembered. tokens: what is asked about.
        give_up_s: how long it may take; a tier that fails before that is one that was waited for
        so long in vain."""
        loop = asyncio.get_running_loop()
        began, in_time = loop.time(), False
        try:
            found = await question
            in_time = True
        finally:
            took = loop.time() - began
            waited = took if in_time else max(took, give_up_s or 0.0)
            self.estimator.note_answer(tokens, waited, in_time=in_time)
        return found

    def expect(self, progress: Progress, tokens: int) -> None:
        """So many are fetched from now on: others queue behind them."""
        self._tiers.decisions.fetch_storage += tokens > 0
        progress.began = asyncio.get_running_loop().time()
        progress.queued_before = self.estimator.queued_bytes
        progress.arrived_before = self._arrived_bytes
        progress.expected_bytes = tokens * self.estimator.bytes_per_token
        self.estimator.queued_bytes += progress.expected_bytes

    def arrived(self, progress: Progress) -> None:
        """More of it is here, or all that will be."""
        num_bytes = progress.num_tokens * self.estimator.bytes_per_token
        self._arrived_bytes += num_bytes - progress.arrived_bytes
        progress.arrived_bytes = num_bytes

    def note(self, prompt: Prompt, progress: Progress) -> None:
        """What the fetch came to: for the estimate, for `explain`, and for the log."""
        now = asyncio.get_running_loop().time()
        self._tiers.decisions.recompute_late += progress.fate is Fate.LATE
        if progress.waits_since is not None:
            self.estimator.note_wait(progress.num_tokens, now - progress.waits_since)
        if progress.expected_bytes:
            self.arrived(progress)
            self.estimator.queued_bytes -= progress.expected_bytes
            moved = progress.arrived_bytes
            if moved >= progress.expected_bytes or progress.fate is Fate.LATE:
                # Of what was queued before it, only what came: if nothing did, the tier is slow.
                by_others = self._arrived_bytes - progress.arrived_before - moved
                queued = min(progress.queued_before, by_others)
                is_whole = moved >= progress.expected_bytes
                self.estimator.note_fetch(moved + queued, now - progress.began, is_whole=is_whole)
        problem = progress.first_problem
        if problem is None:
            return
        fate = progress.fate or _FATES.get(problem.status)
        if fate is not None:
            event = Event(fate, "storage", now, problem.reason)
            self._tiers.history.record(prompt, progress.lease.num_blocks, event)
        if problem.status is not GetStatus.MISS:
            if progress.was_given_up:
                log.debug("fetch ended early: %s", problem.reason)
            else:
                self._ended_early.warn(problem.reason)
