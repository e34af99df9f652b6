"""Arguments that cannot be right are refused with nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.refmodel.paged_run import NAN_BYTE, PagedRun, model, no_gate
from tierkv.errors import BadRequestError, LayoutError
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import ReferenceModel


def refuse(run: PagedRun, error: type[Exception], **given: Any) -> None:
    def never(layer: int) -> None:
        pytest.fail("a layer was started")

    right = {"tokens": np.arange(20), "start": 0, "block_table": run.block_table}
    with pytest.raises(error):
        run.model.forward(**{**right, "planes": run.planes, **given}, before_layer=never)
    assert all((plane == NAN_BYTE).all() for plane in run.planes)


@pytest.fixture
def run() -> PagedRun:
    return PagedRun(model(), 64)


WRONG: dict[str, dict[str, Any]] = {
    "no token": {"tokens": np.array([], np.int32)},
    "tokens in rows": {"tokens": np.array([[1, 2]], np.int32)},
    "a negative token": {"tokens": np.array([-1], np.int32)},
    "a token that is no byte": {"tokens": np.array([256], np.int32)},
    "fractional tokens": {"tokens": np.array([1.0])},
    "a negative position": {"start": -1, "block_table": np.arange(300)},
    "a position behind the last": {"start": 4096 - 19, "block_table": np.arange(300)},
    "too few blocks": {"block_table": np.array([0])},
    "blocks in rows": {"block_table": np.array([[0, 1]])},
    "a negative block": {"block_table": np.array([0, -1])},
    "a block behind the last": {"block_table": np.array([0, 7])},
    "a block twice": {"block_table": np.array([3, 3])},
    "fractional blocks": {"block_table": np.array([0.0, 1.0])},
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_tokens_positions_and_blocks_that_cannot_be_are_refused(
    run: PagedRun, given: dict[str, Any]
) -> None:
    refuse(run, BadRequestError, **given)


def test_ids_after_those_needed_are_not_looked_at(run: PagedRun) -> None:
    run.block_table = np.array([1, 4, -1, 99])
    run.feed(range(20), no_gate)


def test_planes_that_are_not_the_layouts_are_refused(run: PagedRun) -> None:
    *others, last = run.planes
    spread = np.full((len(last), 2 * last.shape[1]), NAN_BYTE, np.uint8)[:, ::2]
    refuse(run, LayoutError, planes=[])
    refuse(run, LayoutError, planes=others)
    for wrong in (last[:-1], last[:, :-1], last.reshape(-1), spread):
        refuse(run, LayoutError, planes=[*others, wrong])


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_holds_at_least_one_token(block_size: int) -> None:
    with pytest.raises(LayoutError):
        ReferenceModel(ModelConfig(), block_size)
