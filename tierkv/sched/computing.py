"""Blocks that running requests are computing right now, so that others may wait for them.

A promise is found by where the next of its blocks hangs in the tree: who has matched up to there
and goes on with the same block shares at least that one. An owner may be slow, fail or leave, so
every wait has an end of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.cache.keys import Prompt
from tierkv.cache.match import Match
from tierkv.cache.node import TreeNode
from tierkv.cache.tokens import common_blocks
from tierkv.sched.worth import HEDGE, Prefill, Regret

_Key = tuple[str, int, bytes, bytes]  # space, node, extra keys and tokens of the next block
_MAX_CAUTION = 6


@dataclass(slots=True)
class Decisions:
    """Counts since the start, one for each run of blocks that was decided on.

    load_host: brought to the device from the host. fetch_storage: brought from storage.
    wait_device: waited for, while another request computes them. wait_storage: waited for, while
    another request's fetch brings them. recompute_device: computed, although another request was
    at it. recompute_storage: computed, although storage had them, or was not even asked, since
    that was estimated to be slower. recompute_late: computed, since storage was too slow.
    """

    load_host: int = 0
    fetch_storage: int = 0
    wait_device: int = 0
    wait_storage: int = 0
    recompute_device: int = 0
    recompute_storage: int = 0
    recompute_late: int = 0


@dataclass(slots=True, eq=False)
class Promise:
    """Blocks [first, stop) of `prompt`, which its request computes. first grows with each commit.

    begun: seconds on the loop's clock; from then on it computes. begun_at: the block it began with.
    num_waiting: requests that wait for it.
    """

    prompt: Prompt
    first: int
    stop: int
    begun: float
    key: _Key
    begun_at: int
    is_over: bool = False
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class PromiseWait:
    """For a promise to reach block `stop`; for `patience_s` seconds at the most. is_sooner: than
    computing the same, which takes `compute_s`, as far as is known."""

    promise: Promise
    stop: int
    patience_s: float
    is_sooner: bool = True
    compute_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.promise.is_over or self.promise.first >= self.stop


class Computing:
    """All promises. on_progress: called when a promise has come further that somebody waits for.

    prefill: what computing takes; each promise that is kept shows it. As long as no engine tells
    it, nobody waits.
    """

    def __init__(
        self,
        prefill: Prefill,
        on_progress: Callable[[], None],
        decisions: Decisions | None = None,
    ) -> None:
        self._prefill = prefill
        self._decisions = decisions or Decisions()
        self._on_progress = on_progress
        self._promises: dict[_Key, list[Promise]] = {}
        self._lost = 0  # waits in a row that came to nothing
        self._skip = 0  # chances to wait that are passed by because of them
        self._regret = Regret()
        self.num_promises = 0

    def promises(self) -> list[Promise]:
        return [promise for promises in self._promises.values() for promise in promises]

    def begin(self, node: TreeNode, first: int, prompt: Prompt, now: float) -> Promise | None:
        """A request starts to compute `prompt` from block `first` on, below `node`'s end; None if
        there is no full block to compute."""
        if first >= prompt.num_blocks:
            return None
        key = _key(node, first, prompt)
        promise = Promise(prompt, first, prompt.num_blocks, now, key, first)
        self._regret.allow(self._prefill.seconds((prompt.num_blocks - first) * prompt.block_size))
        self._promises.setdefault(key, []).append(promise)
        self.num_promises += 1
        return promise

    def advance(self, promise: Promise, node: TreeNode, first: int) -> None:
        """Its blocks up to `first` can be matched; `node` ends there."""
        if promise.is_over or first <= promise.first:
            return
        if first >= promise.stop:
            self._observe(promise)
            promise.first = first
            self.end(promise)
            return
        self._remove(promise)
        promise.first, promise.key = first, _key(node, first, promise.prompt)
        self._promises.setdefault(promise.key, []).append(promise)
        if promise.num_waiting:
            self._on_progress()

    def end(self, promise: Promise) -> None:
        """Its request computes no more of it, for whatever reason. Twice is as good as once."""
        if promise.is_over:
            return
        promise.is_over = True
        self._remove(promise)
        self.num_promises -= 1
        if promise.num_waiting:
            self._on_progress()

    def _observe(self, promise: Promise) -> None:
        """What it took shows how fast the engine is, if it was most of the prompt: the few tokens
        after a long match take as long as everything else that a request has to wait for."""
        num_blocks = promise.stop - promise.begun_at
        if 2 * num_blocks >= promise.stop:
            took_s = asyncio.get_running_loop().time() - promise.begun
            self._prefill.observe(num_blocks * promise.prompt.block_size, took_s)

    def _remove(self, promise: Promise) -> None:
        promises = self._promises[promise.key]
        promises.remove(promise)
        if not promises:
            del self._promises[promise.key]

    def find(self, match: Match, prompt: Prompt, stop: int) -> tuple[Promise, int] | None:
        """The promise that shares most of the prompt's blocks [match.num_blocks, stop), and up to
        which block it does; None if there is none."""
        at = match.num_blocks
        if not self._promises or at >= stop or match.node.end != at:
            return None
        best: tuple[Promise, int] | None = None
        for promise in self._promises.get(_key(match.node, at, prompt), ()):
            shared = at + _shared(promise, prompt, at, min(stop, promise.stop))
            if best is None or shared > best[1]:
                best = promise, shared
        return best

    def possible_wait(
        self, match: Match, prompt: Prompt, stop: int, now: float
    ) -> PromiseWait | None:
        """What could be waited for instead of computing it again. Changes nothing."""
        if not self._promises or not self._prefill.is_told:
            return None
        found = self.find(match, prompt, stop)
        if found is None:
            return None
        promise, shared = found
        size = prompt.block_size
        compute_s = self._prefill.seconds((shared - match.num_blocks) * size)
        expected_s = self._prefill.seconds((shared - promise.begun_at) * size)
        left_s = max(expected_s - (now - promise.begun), 0.0)
        patience_s = left_s + HEDGE * compute_s
        return PromiseWait(promise, shared, patience_s, left_s <= compute_s, compute_s)

    def is_worth_it(self, wait: PromiseWait) -> bool:
        """Whether it is better than to compute.

        A wait that comes to nothing costs what its owner was expected to need still, which is less
        than computing the same here, and HEDGE of the latter. After each such wait in a row twice
        as many chances are passed by, so that owners who never deliver cost ever less. Nobody waits
        while all that were lost have cost more than the others brought (see Regret).
        """
        return wait.is_sooner and not self._skip and self._regret.seconds > 0

    def passed_by(self, wait: PromiseWait) -> None:
        """A request has started without it."""
        self._skip -= bool(self._skip and wait.is_sooner)
        self._decisions.recompute_device += 1

    def waits(self) -> None:
        """A request waits from now on."""
        self._decisions.wait_device += 1

    def note_wait(self, wait: PromiseWait, waited_s: float, *, was_worth_it: bool) -> None:
        if was_worth_it:
            self._regret.add(max(wait.compute_s - waited_s, 0.0))
            self._lost = self._skip = 0
        else:
            self._regret.add(-waited_s)
            self._lost = min(self._lost + 1, _MAX_CAUTION)
            self._skip = (1 << self._lost) - 1

    def findings(self, num_running: int) -> list[str]:
        """What is wrong with the promises, in words."""
        promises = self.promises()
        wrong = []
        if len(promises) != self.num_promises:
            wrong.append(
                f"{self.num_promises} blocks' promises are counted, {len(promises)} are listed"
            )
        if len(promises) > num_running:
            wrong.append(
                f"{len(promises)} prompts are claimed as computing by {num_running} requests"
            )
        for key, listed in self._promises.items():
            wrong.extend(
                f"a promise of blocks {promise.first} to {promise.stop} is over but still listed"
                for promise in listed
                if promise.is_over
            )
            if any(promise.key != key for promise in listed):
                wrong.append("a promise is listed where it does not belong")
        return wrong


def _key(node: TreeNode, block: int, prompt: Prompt) -> _Key:
    return node.space.name, node.uid, prompt.extra(block), prompt.block(block)


def _shared(promise: Promise, prompt: Prompt, at: int, stop: int) -> int:
    """How many full blocks from `at` on are the same in both prompts, at most up to `stop`."""
    width = prompt.block_token_bytes
    start = at * width
    shared = common_blocks(promise.prompt.tokens, start, prompt.tokens, start, stop - at, width)
    if promise.prompt.extras or prompt.extras:
        for block in range(at, at + shared):
            if promise.prompt.extra(block) != prompt.extra(block):
                return block - at
    return shared
