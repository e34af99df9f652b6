"""Arguments that cannot be right are refused with nothing written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tests.refmodel.paged_run import NAN_BYTE, PagedRun, model, no_gate
from tierkv.errors import BadRequestError, LayoutError
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.model import ReferenceModel

Array = npt.NDArray[np.integer]


def refuse(
    run: PagedRun,
    error: type[Exception],
    *,
    tokens: Array | None = None,
    start: int = 0,
    block_table: Array | None = None,
    planes: Sequence[npt.NDArray[np.uint8]] | None = None,
) -> None:
    def never(layer: int) -> None:
        pytest.fail("a layer was started")

    with pytest.raises(error):
        run.model.forward(
            tokens=np.arange(20) if tokens is None else tokens,
            start=start,
            block_table=run.block_table if block_table is None else block_table,
            planes=run.planes if planes is None else planes,
            before_layer=never,
        )
    assert all((plane == NAN_BYTE).all() for plane in run.planes)


@pytest.fixture
def run() -> PagedRun:
    return PagedRun(model(), 64)


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([], np.int32),
        np.array([[1, 2]], np.int32),
        np.array([-1], np.int32),
        np.array([256], np.int32),
        np.array([1.0]),
    ],
    ids=["none", "2-d", "negative", "256", "float"],
)
def test_tokens_that_are_not_bytes_are_refused(run: PagedRun, tokens: Array) -> None:
    refuse(run, BadRequestError, tokens=tokens)


@pytest.mark.parametrize("start", [-1, 4096 - 19])
def test_positions_the_model_does_not_have_are_refused(run: PagedRun, start: int) -> None:
    refuse(run, BadRequestError, start=start, block_table=np.arange(300))


@pytest.mark.parametrize(
    "block_table",
    [
        np.array([0]),
        np.array([[0, 1]]),
        np.array([0, -1]),
        np.array([0, 7]),
        np.array([3, 3]),
        np.array([0.0, 1.0]),
    ],
    ids=["short", "2-d", "negative", "beyond", "twice", "float"],
)
def test_block_tables_that_cannot_hold_the_tokens_are_refused(
    run: PagedRun, block_table: Array
) -> None:
    refuse(run, BadRequestError, block_table=block_table)


def test_ids_after_those_needed_are_not_looked_at(run: PagedRun) -> None:
    run.model.forward(
        tokens=np.arange(20),
        start=0,
        block_table=np.array([1, 4, -1, 99]),
        planes=run.planes,
        before_layer=no_gate,
    )


def test_planes_that_are_not_the_layouts_are_refused(run: PagedRun) -> None:
    whole = run.planes
    refuse(run, LayoutError, planes=[])
    refuse(run, LayoutError, planes=whole[:-1])
    refuse(run, LayoutError, planes=[*whole[:-1], whole[-1][:-1]])
    refuse(run, LayoutError, planes=[*whole[:-1], whole[-1][:, :-1]])
    refuse(run, LayoutError, planes=[*whole[:-1], whole[-1].reshape(-1)])
    spread = np.full((len(whole[0]), 2 * whole[0].shape[1]), NAN_BYTE, np.uint8)[:, ::2]
    refuse(run, LayoutError, planes=[*whole[:-1], spread])


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_holds_at_least_one_token(block_size: int) -> None:
    with pytest.raises(LayoutError):
        ReferenceModel(ModelConfig(), block_size)
