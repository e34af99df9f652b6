"""Plans mean the same in every process, and a damaged or foreign one is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.errors import OwnershipError, StoreCorruptError
from tierkv.sched.plan_wire import (
    MAGIC,
    BatchPlan,
    MatchResult,
    Moves,
    RequestPlan,
    decode,
    encode,
    merge,
)
from tierkv.wire import seal, unseal

slots = st.integers(0, 40) | st.integers(0, 2**31 - 1)
ids = st.lists(slots, max_size=8).map(lambda x: np.array(x, np.int32))
moves = st.builds(
    lambda kind, pairs: Moves.of(kind, pairs, pairs[::-1]),
    st.sampled_from(["load", "offload", "copy"]),
    ids,
)
requests = st.builds(
    lambda name, table, cached, computed, movements: RequestPlan(
        name, table.astype("<i4").tobytes(), cached, computed, tuple(movements)
    ),
    st.text(st.characters(codec="utf-8"), max_size=5),
    ids,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.lists(moves, max_size=3),
)


@given(requests)
def test_a_request_plan_comes_back_as_it_was(plan: RequestPlan) -> None:
    assert decode(encode(plan)) == plan


@given(st.integers(0, 2**60), st.lists(requests, max_size=3), st.lists(moves, max_size=3))
def test_a_batch_comes_back_as_it_was(
    number: int, plans: list[RequestPlan], movements: list[Moves]
) -> None:
    batch = BatchPlan(number, tuple(plans), tuple(movements))
    assert decode(encode(batch)) == batch


def test_a_match_result_comes_back_as_it_was() -> None:
    result = MatchResult.of(Index(4).match(Prompt.of([1, 2, 3], 4)))
    assert decode(encode(result)) == result == MatchResult(0, 0, 0, 0)
    partial = MatchResult(3, 2, 1, 0, 3, 2)
    assert decode(encode(partial)) == partial


def test_another_process_reads_it() -> None:
    batch = merge(7, [_plan("a", "load", [1, 2], [3, 4])])
    code = (
        "import sys; from tierkv.sched.plan_wire import decode; "
        "batch = decode(sys.stdin.buffer.read()); "
        "print(batch.number, batch.moves[0].kind, batch.moves[0].slots()[1].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=encode(batch),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.decode().strip() == "7 load [3, 4]"


def test_the_bytes_of_version_1_stay() -> None:
    """Pinned: a worker of another release reads this plan."""
    plan = RequestPlan("r", b"\x01\0\0\0", 5, 2, (Moves("load", b"\x02\0\0\0", b"\x01\0\0\0"),))
    assert encode(plan)[:6].hex() == "544b504c0100"
    assert decode(encode(plan)) == plan


def test_a_damaged_plan_or_one_of_another_version_is_refused() -> None:
    value = bytearray(encode(_plan("a", "load", [1], [2])))
    value[-1] ^= 1
    with pytest.raises(StoreCorruptError):
        decode(bytes(value))
    with pytest.raises(StoreCorruptError, match="version"):
        decode(seal(MAGIC, 2, {"kind": "match", "body": {}}))
    with pytest.raises(StoreCorruptError, match="kind"):
        decode(seal(MAGIC, 1, {"kind": "else", "body": {}}))
    with pytest.raises(StoreCorruptError):
        decode(seal(MAGIC, 1, {"kind": "match", "body": {"num_blocks": "x"}}))
    uneven = {"kind": "load", "source": b"1234", "target": b""}
    body = {"number": 1, "requests": [], "moves": [uneven]}
    with pytest.raises(StoreCorruptError):
        decode(seal(MAGIC, 1, {"kind": "batch", "body": body}))


def _plan(name: str, kind: str, source: list[int], target: list[int]) -> RequestPlan:
    move = Moves.of(kind, np.array(source, np.int32), np.array(target, np.int32))
    return RequestPlan(name, b"", 0, 0, (move,))


def test_a_batch_has_one_list_a_kind_and_every_copy_once() -> None:
    plans = [
        _plan("a", "load", [1, 2], [10, 11]),
        _plan("b", "load", [2, 3], [11, 12]),  # waits for a's block too
        _plan("c", "offload", [20], [5]),
        _plan("d", "copy", [30], [31]),
    ]
    batch = merge(1, plans)
    found = {move.kind: [ids.tolist() for ids in move.slots()] for move in batch.moves}
    assert found == {
        "copy": [[30], [31]],
        "load": [[1, 2, 3], [10, 11, 12]],
        "offload": [[20], [5]],
    }
    assert [plan.request_id for plan in batch.requests] == ["a", "b", "c", "d"]
    assert not any(plan.moves for plan in batch.requests)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("load", [1], [10]), ("load", [2], [10])),
        (("copy", [1], [10]), ("load", [1], [10])),
        (("load", [7], [10]), ("copy", [10], [11])),  # of which bytes?
        (("offload", [10], [3]), ("load", [9], [10])),
        (("offload", [5], [10]), ("load", [10], [6])),
    ],
)
def test_a_batch_whose_copies_depend_on_their_order_is_refused(
    first: tuple[str, list[int], list[int]], second: tuple[str, list[int], list[int]]
) -> None:
    plans = [_plan("a", *first), _plan("b", *second)]
    for order in (plans, plans[::-1]):
        with pytest.raises(OwnershipError, match="slot 10"):
            merge(1, order)


@given(st.lists(requests, max_size=4))
def test_a_merged_batch_leaves_what_the_plans_one_after_another_leave(
    plans: list[RequestPlan],
) -> None:
    def after(moves: Iterable[Moves]) -> dict[tuple[str, int], tuple[str, int]]:
        holds: dict[tuple[str, int], tuple[str, int]] = {}
        for move in moves:
            source_tier = "host" if move.kind == "load" else "device"
            target_tier = "host" if move.kind == "offload" else "device"
            for source, target in zip(*(ids.tolist() for ids in move.slots()), strict=True):
                come = holds.get((source_tier, source), (source_tier, source))
                holds[target_tier, target] = come
        return holds

    try:
        batch = merge(3, plans)
    except OwnershipError:
        return
    assert after(batch.moves) == after(move for plan in plans for move in plan.moves)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("block_table", b"abc", "whole numbers"),
        ("block_table", b"\0\0\0\0\xff\xff\xff\xff", "below 0"),
        ("moves", [{"kind": "copy", "source": b"\0\0\0\x80", "target": b"\0" * 4}], "below 0"),
        ("cached_tokens", -1, "fewer than 0"),
        ("num_computed", -1, "fewer than 0"),
        ("block_table", 7, "cannot be read"),
        ("block_table", "AAAAAAAAAAAAAAAA", "cannot be read"),
        ("moves", [{"kind": "copy", "source": "AAAAAAAAAAAAAAAA", "target": b"\0" * 12}], "read"),
        ("cached_tokens", 2**63, "more than"),
        ("num_computed", 2**64 - 1, "more than"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_when_it_is_read(
    field: str, value: object, words: str
) -> None:
    body = {"request_id": "r", "block_table": b"", "cached_tokens": 0, "num_computed": 0}
    record = {"kind": "request", "body": body | {field: value}}
    with pytest.raises(StoreCorruptError, match=words):
        decode(seal(MAGIC, 1, record))


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "batch", "body": {"number": -1, "requests": [], "moves": []}},
        {"kind": "match", "body": dict.fromkeys(MatchResult.__struct_fields__, -1)},
        {"kind": "match", "body": dict.fromkeys(MatchResult.__struct_fields__[:5], 0)},
        {"kind": "match", "body": dict.fromkeys(MatchResult.__struct_fields__[:4], 1)},
    ],
)
def test_numbers_that_cannot_be_are_refused_when_they_are_read(record: dict[str, object]) -> None:
    with pytest.raises(StoreCorruptError):
        decode(seal(MAGIC, 1, record))


@pytest.mark.parametrize("number", [2**31, 2**32 + 1, -1, 1.5])
def test_a_slot_that_cannot_be_becomes_no_other_slot(number: float) -> None:
    with pytest.raises(StoreCorruptError, match="slot"):
        Moves.of("load", np.array([number]), np.array([1], np.int32))


def test_fields_that_are_not_known_are_passed_over() -> None:
    body = dict.fromkeys(MatchResult.__struct_fields__[:4], 0) | {"more": "words"}
    record = {"kind": "match", "body": body, "from": "elsewhere"}
    assert decode(seal(MAGIC, 1, record)) == MatchResult(0, 0, 0, 0)


def test_text_is_not_taken_for_bytes_in_any_record() -> None:
    class Named(msgspec.Struct):
        digest: bytes

    for digest in (b"AAAA", "AAAA"):
        value = seal(b"TEST", 1, {"digest": digest})
        if isinstance(digest, bytes):
            assert unseal(b"TEST", 1, value, Named) == Named(digest)
        else:
            with pytest.raises(StoreCorruptError, match="cannot be read"):
                unseal(b"TEST", 1, value, Named)


def test_a_block_table_is_read_as_the_slots_it_was_made_of() -> None:
    plan = RequestPlan("r", np.array([5, 0, 2**31 - 1], "<i4").tobytes(), 8, 4)
    found = decode(encode(plan))
    assert isinstance(found, RequestPlan)
    assert found.table().tolist() == [5, 0, 2**31 - 1]
