"""Whatever happens to an index and its pools, it tells the same as a naive model of it.

The model knows cached prefixes: a block or tail is the tuple of all tokens up to its end. For each
tier it keeps a slot and a state for every prefix, and a list of leases. It walks everything; the
index walks nothing. After every step both are compared, and `invariants.findings` must be empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.cache import invariants
from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt, pack, unpack
from tierkv.cache.node import BlockPool, Change, CopyState, Tier, TreeNode

SIZE = 2
Prefix = tuple[int, ...]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@dataclass
class Copy:
    slot: int
    state: CopyState


@dataclass(eq=False)
class Held:
    """A lease and the prefix it protects at least."""

    lease: Lease
    prefix: Prefix


@dataclass(eq=False)
class Moving:
    """A copy towards a tier: the prefixes it brings, in path order."""

    tier: Tier
    lease: Lease
    first: int
    prefixes: list[Prefix]
    slots: np.ndarray


def blocks_of(tokens: Prefix) -> list[Prefix]:
    """The prefixes of all full blocks."""
    return [tokens[: stop * SIZE] for stop in range(1, len(tokens) // SIZE + 1)]


def parent_of(prefix: Prefix) -> Prefix:
    return prefix[: (len(prefix) - 1) // SIZE * SIZE]


def is_on_path(prefix: Prefix, end: Prefix) -> bool:
    """Whether block `prefix` is the block that ends with `end` or one above it. A tail has no
    blocks below it, though longer prompts may start with its tokens."""
    return prefix == end or (not len(prefix) % SIZE and end[: len(prefix)] == prefix)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index(SIZE)
        self.pools = {Tier.DEVICE: BlockPool("device", 12), Tier.HOST: BlockPool("host", 10)}
        self.copies: dict[Tier, dict[Prefix, Copy]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self.held: list[Held] = []
        self.moving: list[Moving] = []

    # What the model knows

    @property
    def cached(self) -> set[Prefix]:
        return set(self.copies[Tier.DEVICE]) | set(self.copies[Tier.HOST])

    def state(self, tier: Tier, prefix: Prefix) -> CopyState:
        copy = self.copies[tier].get(prefix)
        return CopyState.ABSENT if copy is None else copy.state

    def matched(self, tokens: Prefix, limit: int) -> list[Prefix]:
        found = []
        for prefix in blocks_of(tokens[:limit]):
            if prefix not in self.cached:
                break
            found.append(prefix)
        return found

    def leading_ready(self, prefixes: list[Prefix]) -> int:
        count = 0
        while count < len(prefixes) and (
            self.state(Tier.DEVICE, prefixes[count]) is CopyState.READY
        ):
            count += 1
        return count

    def is_held(self, prefix: Prefix) -> bool:
        leases = [*self.held, *(Held(m.lease, m.prefixes[-1]) for m in self.moving)]
        return any(is_on_path(prefix, lease.prefix) for lease in leases)

    # Looking

    @rule(tokens=prompts, data=st.data())
    def match(self, tokens: Prefix, data: st.DataObject) -> None:
        limit = data.draw(st.integers(0, len(tokens)))
        match = self.index.match(Prompt.of(tokens, SIZE), limit)
        expected = self.matched(tokens, limit)
        states = [self.state(Tier.DEVICE, prefix) for prefix in expected]
        ready = self.leading_ready(expected)
        present = sum(state is not CopyState.ABSENT for state in states)
        assert match.num_blocks == len(expected)
        assert (match.device_blocks, match.loading_blocks) == (ready, present - ready)
        assert match.host_blocks == len(expected) - present
        for tier in Tier:
            found = self.index.slots(tier, match.node, 0, match.num_blocks).tolist()
            for prefix, slot in zip(expected, found, strict=True):
                copy = self.copies[tier].get(prefix)
                assert copy is None or copy.slot == slot  # in order, whatever the tier: fault 2
        self._check_partial(tokens[:limit], len(expected) * SIZE)

    def _check_partial(self, tokens: Prefix, start: int) -> None:
        match = self.index.match(Prompt.of(tokens, SIZE)) if tokens else None
        best = 0
        for prefix in self.cached:
            if start < len(prefix) <= start + SIZE and prefix[:start] == tokens[:start]:
                shared = 0
                for ours, theirs in zip(tokens[start:], prefix[start:], strict=False):
                    if ours != theirs:
                        break
                    shared += 1
                best = max(best, shared)
        partial = match.partial if match else None
        assert (partial.num_tokens if partial else 0) == best
        if partial is not None:
            found = path_tokens(partial.node, partial.block)
            assert found[: start + best] == tokens[: start + best]
            assert partial.block * SIZE == start

    # Growing

    @rule(tokens=prompts, tier=st.sampled_from(Tier), data=st.data())
    def insert(self, tokens: Prefix, tier: Tier, data: st.DataObject) -> None:
        prompt = Prompt.of(tokens, SIZE)
        found = self.matched(tokens, len(tokens))
        if tier is Tier.DEVICE:
            found = found[: self.leading_ready(found)]
        first = data.draw(st.integers(0, len(found)))
        stop = prompt.num_blocks
        if stop - first > self.pools[tier].num_free:
            return
        match = self.index.match(prompt)
        lease = self.index.hold(match.node, first)
        slots = self.pools[tier].allocate(stop - first)
        refused = self.index.insert(tier, lease, prompt, stop, slots)
        reached = stop
        for at, prefix in enumerate(blocks_of(tokens)[first:]):
            state = self.state(tier, prefix)
            if state is CopyState.INCOMING and tier is Tier.DEVICE:
                reached = first + at
                break
            assert (at in refused) == (state is not CopyState.ABSENT)
            if state is CopyState.ABSENT:
                self.copies[tier][prefix] = Copy(int(slots[at]), CopyState.READY)
        assert set(range(reached - first, len(slots))) <= set(refused)
        assert (lease.num_blocks, lease.node.end) == (reached, reached)
        assert sorted(set(refused)) == list(refused)
        self.pools[tier].release(slots[list(refused)])
        held = Held(lease, tokens[: reached * SIZE])
        if reached == stop and prompt.tail_tokens and data.draw(st.booleans()):
            self._insert_tail(held, prompt, tokens, tier)
        self._keep_or_release(held, data)

    def _insert_tail(self, held: Held, prompt: Prompt, tokens: Prefix, tier: Tier) -> None:
        if not self.pools[tier].num_free:
            return
        slot = self.pools[tier].allocate(1)
        tail, is_adopted = self.index.insert_tail(tier, held.lease, prompt, int(slot[0]))
        is_new = self.state(tier, tokens) is CopyState.ABSENT
        assert is_adopted == is_new
        assert (tail.start, tail.end) == (prompt.num_blocks, prompt.num_blocks + 1)
        if is_new:
            self.copies[tier][tokens] = Copy(int(slot[0]), CopyState.READY)
        else:
            self.pools[tier].release(slot)

    def _keep_or_release(self, held: Held, data: st.DataObject) -> None:
        keeps: bool = data.draw(st.booleans())
        if held.prefix and keeps:
            self.held.append(held)
        else:
            self.index.release(held.lease)

    # Leases

    @rule(tokens=prompts, data=st.data())
    def hold(self, tokens: Prefix, data: st.DataObject) -> None:
        found = self.matched(tokens, len(tokens))
        count = data.draw(st.integers(0, len(found)))
        match = self.index.match(Prompt.of(tokens, SIZE))
        lease = self.index.hold(match.node, count)
        assert lease.num_blocks == count
        self._keep_or_release(Held(lease, tokens[: count * SIZE]), data)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.index.release(held.lease)

    # Movements

    @rule(tokens=prompts)
    def begin_load(self, tokens: Prefix) -> None:
        found = self.matched(tokens, len(tokens))
        match = self.index.match(Prompt.of(tokens, SIZE))
        if not match.host_blocks or match.host_blocks > self.pools[Tier.DEVICE].num_free:
            return
        lease = self.index.hold(match.node, match.num_blocks)
        self._begin(Tier.DEVICE, lease, match.num_blocks - match.host_blocks, found)

    @rule(tokens=prompts)
    def begin_offload(self, tokens: Prefix) -> None:
        found = self.matched(tokens, len(tokens))
        wanted = [
            at
            for at, prefix in enumerate(found)
            if self.state(Tier.DEVICE, prefix) is CopyState.READY
            and self.state(Tier.HOST, prefix) is CopyState.ABSENT
        ]
        if not wanted:
            return
        first = stop = wanted[0]
        while stop in wanted:
            stop += 1
        if stop - first > self.pools[Tier.HOST].num_free:
            return
        match = self.index.match(Prompt.of(tokens, SIZE))
        lease = self.index.hold(match.node, stop)
        self._begin(Tier.HOST, lease, first, found[:stop])

    def _begin(self, tier: Tier, lease: Lease, first: int, path: list[Prefix]) -> None:
        slots = self.pools[tier].allocate(len(path) - first)
        self.index.change(tier, lease.node, first, len(path), Change.RESERVE, slots=slots)
        for prefix, slot in zip(path[first:], slots.tolist(), strict=True):
            self.copies[tier][prefix] = Copy(slot, CopyState.INCOMING)
        self.moving.append(Moving(tier, lease, first, path[first:], slots))

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        movement = data.draw(st.sampled_from(self.moving))
        if movement.tier is Tier.DEVICE and any(
            self.state(Tier.DEVICE, prefix) is not CopyState.READY
            for prefix in blocks_of(movement.prefixes[-1])[: movement.first]
        ):
            return  # the lane brings the blocks above first
        self._end(movement, Change.ARRIVE)
        for prefix in movement.prefixes:
            self.copies[movement.tier][prefix].state = CopyState.READY

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        movement = data.draw(st.sampled_from(self.moving))
        top = movement.prefixes[0]
        if movement.tier is Tier.DEVICE and any(
            other is not movement
            and other.tier is Tier.DEVICE
            and is_on_path(top, other.prefixes[0])
            for other in self.moving
        ):
            return  # those that hang below fail first
        had = self._end(movement, Change.FAIL)
        assert had.tolist() == movement.slots.tolist()
        self.pools[movement.tier].release(had)
        for prefix in movement.prefixes:
            del self.copies[movement.tier][prefix]

    def _end(self, movement: Moving, change: Change) -> np.ndarray:
        first, stop = movement.first, movement.first + len(movement.prefixes)
        had = self.index.change(movement.tier, movement.lease.node, first, stop, change)
        self.moving.remove(movement)
        self.index.release(movement.lease)
        return had

    # Evicting

    @rule(tier=st.sampled_from(Tier), count=st.integers(1, 6))
    def evict(self, tier: Tier, count: int) -> None:
        order = self.index.spaces.order[tier]
        evictable = order.num_unheld
        before = {prefix: self.state(tier, prefix) for prefix in self.copies[tier]}
        victims = order.victims(count)
        listed = [prefix for victim in victims for prefix in victim_prefixes(victim)]
        assert len(listed) == len(set(listed)) == min(count, evictable)
        gone: set[Prefix] = set()
        for prefix in listed:
            assert before[prefix] is CopyState.READY  # never one in flight: fault 4
            assert not self.is_held(prefix)
        for victim in victims:
            prefixes = victim_prefixes(victim)
            gone |= set(prefixes)
            for prefix in prefixes:  # leaves first: fault 1
                assert all(other in gone for other in before if parent_of(other) == prefix), (
                    "a block went before its child on the same tier"
                )
        for victim in victims:
            self._drop(tier, victim.node, victim.start, victim.stop)

    def _drop(self, tier: Tier, node: TreeNode, start: int, stop: int) -> None:
        if node.num_blocks < stop or not node.copies[tier].num_present:
            return  # went with something above it
        prefixes = [path_tokens(node, node.start + at) for at in range(start, stop)]
        other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
        orphans = any(
            is_on_path(prefixes[0], prefix) and prefix not in prefixes for prefix in self.cached
        )
        is_safe = all(self.state(other, prefix) is CopyState.READY for prefix in prefixes)
        if is_safe or not orphans:
            slots = self.index.drop(tier, node, start, stop)
            self.pools[tier].release(slots)
            assert slots.tolist() == [self.copies[tier].pop(prefix).slot for prefix in prefixes]
            return
        freed = self.index.forget_below(node, start)
        for each, slots in zip(Tier, freed, strict=True):
            self.pools[each].release(slots)
            below = [p for p in self.copies[each] if is_on_path(prefixes[0], p)]
            assert sorted(slots.tolist()) == sorted(self.copies[each].pop(p).slot for p in below)

    # After every step

    @invariant()
    def the_books_are_right(self) -> None:
        assert invariants.findings(self.index, self.pools, {tier: [] for tier in Tier}) == []

    @invariant()
    def the_index_holds_what_the_model_holds(self) -> None:
        found: dict[Tier, dict[Prefix, Copy]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        for node in self.index.spaces.nodes():
            for at in range(node.num_blocks):
                prefix = path_tokens(node, node.start + at)
                for tier in Tier:
                    state = CopyState(node.copies[tier].states[at])
                    if state is not CopyState.ABSENT:
                        found[tier][prefix] = Copy(int(node.copies[tier].slots[at]), state)
        assert found == self.copies
        for tier in Tier:
            assert self.pools[tier].stats().used == len(self.copies[tier])

    @invariant()
    def leases_are_counted(self) -> None:
        assert self.index.num_held_leases == len(self.held) + len(self.moving)

    def teardown(self) -> None:
        """With every lease gone and every movement ended, all can be evicted again: fault 3."""
        while self.moving:
            deepest = max(self.moving, key=lambda movement: len(movement.prefixes[0]))
            self.moving.remove(deepest)
            self.pools[deepest.tier].release(
                self.index.change(
                    deepest.tier,
                    deepest.lease.node,
                    deepest.first,
                    deepest.first + len(deepest.prefixes),
                    Change.FAIL,
                )
            )
            for prefix in deepest.prefixes:
                del self.copies[deepest.tier][prefix]
            self.index.release(deepest.lease)
        for held in self.held:
            self.index.release(held.lease)
        self.held.clear()
        for tier in Tier:
            assert self.index.spaces.order[tier].num_unheld == len(self.copies[tier])
            while victims := self.index.spaces.order[tier].victims(3):
                for victim in victims:
                    self._drop(tier, victim.node, victim.start, victim.stop)
        assert self.cached == set()
        assert list(self.index.spaces.nodes()) == []
        self.the_books_are_right()


def path_tokens(node: TreeNode, block: int) -> Prefix:
    """Tokens from the prompt's start to the end of `block`, which lies on the path to `node`."""
    packed = b"".join(part.tokens for part in list(node.path())[::-1])
    return tuple(unpack(packed)[: (block + 1) * SIZE].tolist())


def victim_prefixes(victim: object) -> list[Prefix]:
    node, start, stop = victim.node, victim.start, victim.stop  # type: ignore[attr-defined]
    return [path_tokens(node, node.start + at) for at in range(start, stop)]


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_the_packed_form_used_here_is_the_products() -> None:
    assert unpack(pack([1, 2, 3])).tolist() == [1, 2, 3]
