"""The steps of an engine that owns its device blocks, whatever its groups and its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tests.latch import PATIENCE_S
from tierkv.cache.groups import main_group
from tierkv.cache.keys import Prompt, pack
from tierkv.embed import EngineCache, Finished, WorkerPlanes
from tierkv.embed.engine_cache import Found, Polled
from tierkv.errors import TierKVError
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.handoff import Published
from tierkv.ranks.link import Kind, Plan
from tierkv.ranks.memory import EnginePlanes

T = TypeVar("T")


def ask(call: Callable[[], T | None]) -> T:
    """Ask again, as an engine does in each step, until there is an answer."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := call()) is None:
        assert time.monotonic() < deadline, "no answer"
        os.sched_yield()
    return found


def plan_of(number: int, kind: Kind, source: Sequence[int], target: Sequence[int]) -> Plan:
    packed = [np.array(ids, np.int32).tobytes() for ids in (source, target)]
    return Plan(number, kind, packed[0], packed[1])


@dataclass
class Steps:
    """seen: all that has ended in the engine's steps so far."""

    cache: EngineCache
    seen: Polled = field(default_factory=Polled, kw_only=True)

    def prompt(self, tokens: Sequence[int]) -> Prompt:
        groups = self.cache.groups
        return Prompt(pack(tokens), groups[main_group(groups)].block_size)

    def poll(self, finished: Sequence[Finished] = ()) -> None:
        polled = self.cache.poll(finished)
        self.seen.loaded += polled.loaded
        self.seen.saved += polled.saved
        self.seen.stored += polled.stored
        self.seen.published += polled.published

    def step(self) -> None:
        self.poll()

    def until(self, is_so: Callable[[], object]) -> None:
        def answer() -> bool | None:
            self.step()
            return True if is_so() else None

        ask(answer)

    def lookup(self, key: str, tokens: Sequence[int], have: int = 0, **more: Any) -> Found:
        prompt = self.prompt(tokens)
        return ask(lambda: self.cache.lookup(key, prompt, have, **more))

    def plan_to_save(
        self,
        key: str,
        tokens: Sequence[int],
        *ids: Sequence[int],
        first: Sequence[int] = (),
        **more: Any,
    ) -> Plan:
        """ids, first: of each group, as `EngineCache.save` takes them."""
        plan = self.cache.save(key, self.prompt(tokens), ids, first, **more)
        assert plan is not None
        return plan

    def plan_to_load(self, key: str, *ids: Sequence[int], first: Sequence[int] = ()) -> Plan:
        plan = self.cache.load(key, ids, first)
        assert plan is not None
        return plan

    def published(self, key: str) -> Published | TierKVError:
        self.until(lambda: key in dict(self.seen.published))
        return dict(self.seen.published)[key]

    def findings(self) -> list[str]:
        """What `verify` finds once everything has come to rest."""
        deadline = time.monotonic() + 5
        while (found := self.cache.verify().wait(PATIENCE_S)) and time.monotonic() < deadline:
            self.step()
        return found


@dataclass
class LocalRanks(Steps):
    """An engine of several ranks, here each in a thread of this process."""

    ranks: list[WorkerPlanes] = field(default_factory=list)

    def step(self) -> None:
        self.poll([report for rank in self.ranks for report in rank.finished()])

    def save(self, key: str, tokens: Sequence[int], *ids: Sequence[int], **more: Any) -> None:
        plan = self.plan_to_save(key, tokens, *ids, **more)
        for rank in self.ranks:
            rank.start_saves(plan)
        self.until(lambda: key in dict(self.seen.stored))

    def load(self, key: str, *ids: Sequence[int], first: Sequence[int] = ()) -> None:
        plan = self.plan_to_load(key, *ids, first=first)
        for rank in self.ranks:
            rank.start_loads(plan)
        self.until(lambda: (key, ()) in self.seen.loaded)


@contextmanager
def local_ranks(
    cache: EngineCache, path: str, planes: Sequence[Sequence[EnginePlanes]]
) -> Iterator[LocalRanks]:
    """planes: of each rank, those of each group."""
    with ExitStack() as stack:
        on = LocalRanks(stack.enter_context(cache))
        for number, mine in enumerate(planes):
            rank = WorkerPlanes(CpuDevice(), mine, rank=number)
            rank.connect(path, PATIENCE_S)
            stack.callback(rank.close)
            on.ranks.append(rank)
        yield on
        assert on.findings() == []
