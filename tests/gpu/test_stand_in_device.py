"""The CUDA device on a stand-in for a GPU: order, errors and ends, where there is none."""

from __future__ import annotations

import pytest

from tests.preloaded import output_of

SLOW = pytest.mark.slow


def run(program: str, seed: int) -> None:
    """Run a program of stand_in_programs.py, which says what it holds."""
    assert output_of("tests.gpu.stand_in_programs", program, str(seed)) == "as promised\n"


@pytest.mark.promise("No order of GPU work mixes old and new bytes in a block.")
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_no_order_in_which_a_gpu_may_work_tears_a_block(seed: int) -> None:
    run("random_copies", seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW)])
def test_an_engine_s_own_tensors_are_saved_and_loaded_by_ranks(seed: int) -> None:
    run("an_engine_that_owns_its_blocks", seed)


@pytest.mark.parametrize(
    "program",
    [
        "copies_that_begin_as_rectangles",
        "tensors_in_allocations_of_their_own",
        "calls_that_fail",
        "memory_that_is_refused",
        "memory_of_an_engine_is_pinned_where_a_copy_waits",
        "slots_that_others_have_mapped",
        "memory_that_is_closed",
        "errors",
        "what_cannot_be_opened",
        "hardware_queues",
        "a_doctor",
    ],
)
def test_a_program_on_the_stand_in_ends_as_promised(program: str) -> None:
    run(program, 1)
