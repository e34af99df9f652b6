"""A pool gives what it has, once, and takes back what it gave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.cache.node import BlockPool
from tierkv.errors import OutOfBlocksError, OwnershipError

CAPACITY = 9


@pytest.mark.promise("A pool refuses a double release, and a refused allocation takes nothing.")
class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool("device", CAPACITY)
        self.taken: set[int] = set()

    @rule(count=st.integers(0, CAPACITY + 2))
    def allocate(self, count: int) -> None:
        if count > CAPACITY - len(self.taken):
            with pytest.raises(OutOfBlocksError) as error:
                self.pool.allocate(count)
            assert error.value.needed == count
            assert error.value.available == CAPACITY - len(self.taken)
            return
        ids = self.pool.allocate(count).tolist()
        assert len(ids) == len(set(ids)) == count
        assert self.taken.isdisjoint(ids)
        assert set(ids) <= set(range(CAPACITY))
        self.taken |= set(ids)

    def some_taken(self, data: st.DataObject) -> list[int]:
        taken = st.lists(st.sampled_from(sorted(self.taken)), unique=True)
        return data.draw(taken) if self.taken else []

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = self.some_taken(data)
        self.pool.release(ids)
        self.taken -= set(ids)

    @rule(data=st.data(), stranger=st.integers(-3, CAPACITY + 3))
    def give_back_one_too_many(self, data: st.DataObject, stranger: int) -> None:
        if stranger in self.taken:
            return
        ids = [*self.some_taken(data), stranger]
        with pytest.raises(OwnershipError, match="device"):
            self.pool.release(ids)
        with pytest.raises(OwnershipError, match="device"):
            self.pool.exchange([np.array(ids, np.int32)], len(ids))

    @rule(data=st.data(), count=st.integers(0, CAPACITY + 2))
    def exchange(self, data: st.DataObject, count: int) -> None:
        """Who gives ids and takes others has as many as after a release and an allocation."""
        given = self.some_taken(data)
        cut = data.draw(st.integers(0, len(given)))
        parts = [np.array(part, np.int32) for part in (given[:cut], given[cut:]) if part]
        self.taken -= set(given)
        if count > CAPACITY - len(self.taken):
            with pytest.raises(OutOfBlocksError):
                self.pool.exchange(parts, count)
            return
        ids = self.pool.exchange(parts, count).tolist()
        assert len(ids) == len(set(ids)) == count
        assert self.taken.isdisjoint(ids)
        self.taken |= set(ids)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release_twice_in_one_call(self, data: st.DataObject) -> None:
        twice = data.draw(st.sampled_from(sorted(self.taken)))
        with pytest.raises(OwnershipError, match="twice"):
            self.pool.release([twice, twice])

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.findings(self.taken) == []
        assert self.pool.num_free == CAPACITY - len(self.taken)
        stats = self.pool.stats()
        assert (stats.capacity, stats.used) == (CAPACITY, len(self.taken))


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_findings_tell_of_lost_shared_and_invented_blocks() -> None:
    pool = BlockPool("device", 4)
    first, second = pool.allocate(2).tolist()
    pool.release([second])
    assert pool.findings([]) == [f"device: block {first} is taken but has no owner"]
    assert pool.findings([first, first]) == [f"device: block {first} has more than one owner"]
    wrong = pool.findings([first, second, 77])
    assert any("which does not exist" in text for text in wrong)
    assert f"device: block {second} is owned but counted as free" in wrong


@pytest.mark.parametrize("stranger", [-1, 4, 1 << 30])
def test_findings_tell_of_a_free_list_with_blocks_that_do_not_exist(stranger: int) -> None:
    pool = BlockPool("device", 4)
    pool._free[0] = stranger  # noqa: SLF001 - nothing else can break it
    assert pool.findings([]) == ["device: the free list names blocks that do not exist"]
