"""Many threads at once, cancels and aborts at random: every call is answered, nothing leaks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.embed.engine import Engine, done, engine
from tests.latch import PATIENCE_S
from tierkv.cache.eviction import WritePolicy
from tierkv.embed import AbortedError, Answer, Call
from tierkv.errors import OwnershipError

NUM_THREADS = 6
PER_THREAD = 40


def _run_in_threads(work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in pool.map(work, range(NUM_THREADS), timeout=90):
            pass


def test_requests_of_many_threads_get_their_own_bytes_and_end() -> None:
    with engine(device_blocks=24, host_blocks=24, host_write=WritePolicy.WRITE_THROUGH) as here:

        def work(number: int) -> None:
            rng = random.Random(number)
            for turn in range(PER_THREAD):
                start = rng.randrange(3) * 1000
                tokens = list(range(start, start + rng.randrange(1, 24)))
                here.run(f"{number}-{turn}", tokens)

        _run_in_threads(work)
        assert here.findings() == []
        here.cache.poll()
        assert here.cache.calls.num_open == 0


@pytest.mark.promise("Random cancels and aborts of threads leak nothing.")
@pytest.mark.parametrize("seed", range(3))
def test_cancels_and_aborts_at_random_leave_nothing(seed: int) -> None:
    with engine(device_blocks=24, host_blocks=24, host_write=WritePolicy.WRITE_THROUGH) as here:

        def work(number: int) -> None:
            rng = random.Random(seed * 100 + number)
            for turn in range(PER_THREAD):
                _meddle(here, rng, f"{number}-{turn}")

        _run_in_threads(work)
        assert here.findings() == []
        stats = here.cache.stats().wait(PATIENCE_S)
        assert (stats.running_requests, stats.waiting_requests) == (0, 0)


def _meddle(here: Engine, rng: random.Random, name: str) -> None:
    start = rng.randrange(3) * 1000
    tokens = list(range(start, start + rng.randrange(1, 40)))
    call = here.cache.admit(name, tokens, max_new_tokens=rng.randrange(8))
    fate = rng.random()
    if fate < 0.4:
        if rng.random() < 0.5:
            threading.Event().wait(rng.random() * 0.002)
        call.cancel()
        if done(call).answer is Answer.REFUSED:
            assert isinstance(call.error, AbortedError)
            assert isinstance(done(here.cache.end(name)).error, OwnershipError)
            return
    elif fate < 0.7:
        here.cache.abort(name).wait(PATIENCE_S)
        assert done(call).is_done
        assert isinstance(done(here.cache.end(name)).error, OwnershipError)
        return
    found = call.wait(PATIENCE_S)
    here.compute(found, tokens, found.cached_tokens)
    later: list[Call[Any]] = [here.cache.commit(name, tokens), here.cache.preempt(name)]
    if rng.random() < 0.5:
        later.append(here.cache.abort(name))
    else:
        here.cache.resume(name, max_new_tokens=0).wait(PATIENCE_S)
        later.append(here.cache.end(name))
    for one in later:
        done(one)
