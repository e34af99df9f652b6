"""K and V are in the planes and nowhere else: what a call reads there, writes there, waits for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.refmodel.paged_run import PROSE, KVDtype, PagedRun, model
from tierkv.engine import Sampling
from tierkv.refmodel.model import sample

LATE = PROSE[-1:]


def after_prompt(kv_dtype: KVDtype = "float32") -> PagedRun:
    run = PagedRun(model(kv_dtype), 400)
    run.feed(PROSE[:-1])
    return run


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_zeroed", [1, 13])
def test_zeroing_the_last_tokens_changes_what_is_generated(
    num_zeroed: int, kv_dtype: KVDtype
) -> None:
    run = after_prompt(kv_dtype)
    expected = after_prompt(kv_dtype).generate(LATE, 24)
    run.overwrite(range(run.length - num_zeroed, run.length), 0)
    assert run.generate(LATE, 24) != expected


@pytest.mark.parametrize("block", range(4))
def test_zeroing_any_full_block_changes_the_logits(block: int) -> None:
    run = after_prompt()
    expected = after_prompt().feed(LATE)
    run.overwrite(range(block * 16, block * 16 + 16), 0)
    assert run.feed(LATE).tobytes() != expected.tobytes()


def test_nan_in_a_known_token_does_show_so_the_garbage_tests_can_fail() -> None:
    run = after_prompt()
    run.overwrite(range(3, 4), 0xFF)
    assert np.isnan(run.feed(LATE)).any()


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_a_call_writes_its_own_tokens_and_no_other_byte(block_size: int) -> None:
    run = PagedRun(model(block_size=block_size), 200)
    run.feed(PROSE[:50])
    before = [run.rows(index) for index in range(len(run.planes))]
    run.feed(PROSE[50:77])
    for index, old in enumerate(before):
        new = run.rows(index)
        changed = np.flatnonzero((new != old).any(axis=1))
        assert changed.tolist() == list(range(50, 77))


def test_each_layer_is_announced_once_in_order() -> None:
    announced: list[int] = []
    PagedRun(model(), 100).feed(PROSE[:50], before_layer=announced.append)
    assert announced == [0, 1, 2, 3]


def test_a_layer_may_arrive_as_late_as_its_announcement() -> None:
    source = after_prompt()
    expected = after_prompt().feed(LATE)
    run = PagedRun(model(), 400)
    run.length = source.length

    def arrive(layer: int) -> None:
        for index in run.model.layout.planes_of_layer[layer]:
            assert (run.planes[index] == 0xFF).all(), "the planes were touched before their layer"
            run.planes[index][run.block_table] = source.planes[index][source.block_table]

    assert run.feed(LATE, before_layer=arrive).tobytes() == expected.tobytes()


def test_what_the_hook_raises_passes_through_and_later_layers_are_untouched() -> None:
    run = PagedRun(model(), 100)

    def fail(layer: int) -> None:
        if layer == 2:
            raise TimeoutError("layer 2 did not arrive")

    with pytest.raises(TimeoutError, match="layer 2"):
        run.feed(PROSE[:20], before_layer=fail)
    for index in run.model.layout.planes_of_layer[2]:
        assert (run.planes[index] == 0xFF).all()


def test_only_printable_ascii_and_newline_are_generated() -> None:
    run = PagedRun(model(), 400)
    logits = run.feed(PROSE)
    finite = {chr(token) for token in np.flatnonzero(np.isfinite(logits))}
    assert finite == {chr(token) for token in range(0x20, 0x7F)} | {"\n"}
    for position in range(50):
        token = sample(logits, Sampling(temperature=5.0), position)
        assert chr(token) in finite
