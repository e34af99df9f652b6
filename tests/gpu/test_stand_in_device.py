"""The CUDA device on a stand-in for a GPU: order, errors and ends, where there is none."""

from __future__ import annotations

import pytest

from tests.gpu.cuda import run_program

SLOW = pytest.mark.slow


@pytest.mark.promise("No order of GPU work mixes old and new bytes in a block.")
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_no_order_in_which_a_gpu_may_work_tears_a_block(seed: int) -> None:
    run_program("random_copies", seed)


def test_a_copy_that_begins_as_rectangles_brings_every_block() -> None:
    run_program("copies_that_begin_as_rectangles", 1)


def test_tensors_in_allocations_of_their_own_are_moved_as_those_of_one_pool_are() -> None:
    run_program("tensors_in_allocations_of_their_own", 1)


def test_a_call_that_fails_hangs_nobody_and_everything_is_given_back() -> None:
    run_program("calls_that_fail", 1)


def test_memory_that_cannot_be_had_is_refused_with_the_remedy_and_given_back() -> None:
    run_program("memory_that_is_refused", 1)


def test_an_engine_s_host_slots_are_pinned_first_where_a_copy_waits_for_them() -> None:
    run_program("memory_of_an_engine_is_pinned_where_a_copy_waits", 1)


def test_host_slots_that_others_have_mapped_are_pinned_while_lanes_use_them() -> None:
    run_program("slots_that_others_have_mapped", 1)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW)])
def test_an_engine_s_own_tensors_are_saved_and_loaded_by_ranks(seed: int) -> None:
    run_program("an_engine_that_owns_its_blocks", seed)


def test_a_copy_of_closed_memory_fails_and_touches_nothing() -> None:
    run_program("memory_that_is_closed", 1)


def test_a_mistake_in_a_call_does_not_cost_the_gpu_and_a_broken_kernel_does() -> None:
    run_program("errors", 1)


def test_a_tensor_that_cannot_be_adopted_is_refused_with_what_to_do() -> None:
    run_program("tensors_that_do_not_fit", 1)


def test_a_doctor_tells_a_gpu_that_cannot_be_used_from_one_that_can() -> None:
    run_program("a_doctor", 1)
