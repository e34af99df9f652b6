"""A load that fails is named, block by block; only those blocks are computed again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.embed.engine import Engine, done, engine, until
from tests.latch import PATIENCE_S
from tierkv.cache.eviction import WritePolicy
from tierkv.embed import Answer, EmbedSettings, Until
from tierkv.errors import TransferError
from tierkv.gpu.protocol import Direction

PROMPT = list(range(30))
START = PROMPT[:8]  # two blocks, which the device keeps
OTHER = list(range(5000, 5080))  # needs all of the device


@pytest.fixture
def here() -> Iterator[Engine]:
    """The first two blocks of PROMPT are on the device, the others on the host only."""
    settings = EmbedSettings(load_timeout_s=1.0)
    with engine(
        device_blocks=20, host_blocks=64, host_write=WritePolicy.WRITE_THROUGH, settings=settings
    ) as here:
        here.run("first", PROMPT)
        here.run("second", OTHER)
        here.run("third", START)
        yield here
        assert here.findings() == []


def _finish(here: Engine, name: str, start: int) -> None:
    """The engine computes from `start` on; another request then finds all of it."""
    tokens = [*PROMPT, 77]
    found = here.cache.extend(name, 1).wait(PATIENCE_S)
    here.check(found, PROMPT, start)
    here.compute(found, tokens, start)
    here.cache.commit(name, tokens).wait(PATIENCE_S)
    here.cache.end(name).wait(PATIENCE_S)
    again = here.run("again", tokens)
    assert again.cached_tokens == len(tokens) - 1


@pytest.mark.parametrize("how", ["fails", "takes too long"])
def test_the_blocks_that_failed_are_named_and_the_others_stay(here: Engine, how: str) -> None:
    if how == "fails":
        here.latch.fail_next(Direction.LOAD)  # of all blocks, the partly matched one too
    else:
        here.latch.hold(Direction.LOAD)
    found = here.cache.admit("fourth", PROMPT, max_new_tokens=1).wait(PATIENCE_S)
    assert found.cached_tokens == len(START)
    assert found.failed_blocks == (2, 3, 4, 5, 6, 7)
    assert found.load_problem is not None
    assert ("caught fire" in found.load_problem) is (how == "fails")
    here.latch.release()
    _finish(here, "fourth", found.cached_tokens)


def test_an_engine_that_waits_by_layer_recovers_what_failed(here: Engine) -> None:
    here.latch.fail_next(Direction.LOAD)  # of all blocks, the partly matched one too
    call = here.cache.admit("fourth", PROMPT, max_new_tokens=1, until=Until.ADMITTED)
    gate = call.wait(PATIENCE_S).gate
    with pytest.raises(TransferError) as failed:
        gate.wait_on(here.cache.service.device.compute_stream, gate.num_layers - 1, PATIENCE_S)
    assert failed.value.blocks
    assert done(here.cache.commit("fourth", PROMPT)).answer is Answer.REFUSED
    found = here.cache.recover("fourth").wait(PATIENCE_S)
    assert (found.cached_tokens, found.failed_blocks) == (len(START), (2, 3, 4, 5, 6, 7))
    _finish(here, "fourth", found.cached_tokens)


def test_an_abort_in_the_middle_of_a_failing_load_leaves_nothing(here: Engine) -> None:
    here.latch.hold(Direction.LOAD)
    call = here.cache.admit("fourth", PROMPT, max_new_tokens=1)
    until(lambda: here.latch.num_held > 0)
    here.latch.fail_next(Direction.LOAD)
    here.cache.abort("fourth").wait(PATIENCE_S)
    here.latch.release()
    assert done(call).answer is Answer.REFUSED
