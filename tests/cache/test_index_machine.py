"""20,000 random steps against a naive model: tenants, faults, cancels, pins, resizes and all.

The model is one dict a tier: (tenant, all tokens up to the block's end) to slot and state, and for
each block when it was used, how often it was matched, whether it is pinned and believed stored. It
walks everything, the index walks nothing; both must agree at every step. Steps come from seeded
random numbers, ten times faster than drawing them, so that every run makes them all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from tierkv.cache import invariants
from tierkv.cache.eviction import (
    EvictionKind,
    EvictionOrder,
    Victim,
    WritePolicy,
    WriteRule,
    make_policy,
)
from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import MediaItem, Prompt, chain, unpack
from tierkv.cache.node import BlockPool, Change, CopyState, Space, Tier, TreeNode
from tierkv.errors import OwnershipError

SIZE = 2
STEPS = 3400
ROOTS = {"": b"own root".ljust(32, b"."), "acme": b"acme root".ljust(32, b".")}
ROOTS["guest"] = b"guest root".ljust(32, b".")
IMAGE = b"i" * 16
Block = tuple[str, tuple[int, ...], bool]  # tenant, tokens up to its end, with an image in front


@dataclass(eq=False)
class Held:
    lease: Lease
    blocks: list[Block]


@dataclass(eq=False)
class Moving:
    tier: Tier
    held: Held
    first: int
    slots: np.ndarray

    @property
    def blocks(self) -> list[Block]:
        return self.held.blocks[self.first :]


class Machine:
    def __init__(self, seed: int, kind: EvictionKind) -> None:
        self.rng = random.Random(seed)
        self.kind = kind
        self.tenants = ["", "", "acme"]
        self.pools = {Tier.DEVICE: BlockPool("device", 14), Tier.HOST: BlockPool("host", 10)}
        policies = (make_policy(kind, 14), make_policy(kind, 10))
        self.index = Index(SIZE, ROOTS[""], policies)
        self.index.spaces.open(Space("acme", ROOTS["acme"], quota=(5, 4)), (kind, kind))
        self.copies: dict[Tier, dict[Block, tuple[int, CopyState]]] = {t: {} for t in Tier}
        self.held: list[Held] = []
        self.moving: list[Moving] = []
        self.pinned: list[tuple[TreeNode, list[Block], int]] = []  # with the time of the pin
        self.time = self.uses = 0
        self.added: dict[Block, int] = {}
        self.used: dict[Block, int] = {}
        self.hits: dict[Block, int] = {}
        self.stored: set[Block] = set()

    # What the model knows

    def prompt(self) -> tuple[Prompt, tuple[int, ...], str, bool]:
        """Most are known, or go on from what is known; moving blocks are asked for most."""
        tokens = tuple(self.rng.randrange(2) for _ in range(self.rng.randrange(1, 10)))
        tenant = self.rng.choice(self.tenants)
        has_image = self.rng.random() < 0.2
        known = [block for tier in Tier for block in self.copies[tier]]
        known += [block for moving in self.moving for block in 3 * moving.blocks]
        if known and self.rng.random() < 0.6:
            tenant, path, has_image = self.rng.choice(known)
            tokens = path + tokens[: self.rng.choice([0, 0, 1, 4])]
        media = [MediaItem(0, 1, IMAGE)] if has_image else []
        return Prompt.of(tokens, SIZE, media, space=tenant), tokens, tenant, has_image

    def path(self, tokens: tuple[int, ...], tenant: str, has_image: bool) -> list[Block]:
        return [
            (tenant, tokens[: stop * SIZE], has_image) for stop in range(1, len(tokens) // SIZE + 1)
        ]

    def state(self, tier: Tier, block: Block) -> CopyState:
        return self.copies[tier].get(block, (0, CopyState.ABSENT))[1]

    def is_cached(self, block: Block) -> bool:
        return any(block in self.copies[tier] for tier in Tier)

    def matched(self, path: list[Block]) -> list[Block]:
        found = []
        for block in path:
            if not self.is_cached(block):
                break
            found.append(block)
        return found

    def leased(self) -> set[Block]:
        held = [*self.held, *(moving.held for moving in self.moving)]
        return {block for each in held for block in each.blocks}

    def pins(self) -> set[Block]:
        """Not those that came back after they had gone, pin and all."""
        pins = [(block, at) for _, blocks, at in self.pinned for block in blocks]
        return {block for block, at in pins if self.added[block] < at}

    def use(self, blocks: list[Block]) -> None:
        self.uses += 1
        self.used.update(dict.fromkeys(blocks, self.uses))

    def add(self, block: Block) -> None:
        if not self.is_cached(block):
            self.time += 1
            self.added[block], self.hits[block] = self.time, 0
            self.stored.discard(block)

    # Steps

    def step(self) -> None:
        steps = [
            self.match, self.insert, self.insert, self.insert, self.hold, self.release,
            self.release, self.begin_load, self.begin_offload, self.arrive, self.arrive,
            self.fail, self.evict, self.evict_leaves, self.evict_own, self.pin, self.resize,
            self.digest, self.quota, self.open_or_close, self.tell_storage,
        ]  # fmt: skip
        self.rng.choice(steps)()
        self.compare()

    def match(self) -> None:
        prompt, tokens, tenant, has_image = self.prompt()
        limit = self.rng.randrange(len(tokens) + 1)
        match = self.index.match(prompt, limit)
        expected = self.matched(self.path(tokens[:limit], tenant, has_image))
        states = [self.state(Tier.DEVICE, block) for block in expected]
        ready = 0
        while ready < len(states) and states[ready] is CopyState.READY:
            ready += 1
        present = sum(state is not CopyState.ABSENT for state in states)
        assert (match.num_blocks, match.device_blocks) == (len(expected), ready)
        assert (match.loading_blocks, match.host_blocks) == (
            present - ready,
            len(expected) - present,
        )
        for tier in Tier:
            slots = self.index.slots(tier, match.node, 0, match.num_blocks).tolist()
            for block, slot in zip(expected, slots, strict=True):
                assert self.copies[tier].get(block, (slot, None))[0] == slot
        shared = self.best_partial(tokens[:limit], len(expected) * SIZE, tenant, has_image)
        assert (match.partial.num_tokens if match.partial else 0) == shared

    def best_partial(
        self, tokens: tuple[int, ...], start: int, tenant: str, has_image: bool
    ) -> int:
        best = 0
        for tier in Tier:
            for other, cached, image in self.copies[tier]:
                if other != tenant or not start < len(cached) <= start + SIZE:
                    continue
                if image != has_image or cached[:start] != tokens[:start]:
                    continue
                shared = 0
                for ours, theirs in zip(tokens[start:], cached[start:], strict=False):
                    if ours != theirs:
                        break
                    shared += 1
                best = max(best, shared)
        return best

    def insert(self) -> None:
        prompt, tokens, tenant, has_image = self.prompt()
        tier = self.rng.choice(list(Tier))
        path = self.path(tokens, tenant, has_image)
        found = self.matched(path)
        if tier is Tier.DEVICE:
            while found and any(self.state(tier, b) is not CopyState.READY for b in found):
                found.pop()
        first = self.rng.randrange(len(found) + 1)
        if len(path) - first > self.pools[tier].num_free:
            return
        match = self.index.match(prompt)
        lease = self.index.hold(match.node, first)
        slots = self.pools[tier].allocate(len(path) - first)
        refused = self.index.insert(tier, lease, prompt, len(path), slots)
        reached = len(path)
        self.use(path[:first])
        for at, block in enumerate(path[first:]):
            state = self.state(tier, block)
            if state is CopyState.INCOMING and tier is Tier.DEVICE:
                reached = first + at
                break
            assert (at in refused) == (state is not CopyState.ABSENT)
            if state is CopyState.ABSENT:
                self.add(block)
                self.copies[tier][block] = (int(slots[at]), CopyState.READY)
        assert set(range(reached - first, len(slots))) <= set(refused)
        assert (lease.num_blocks, lease.node.end) == (reached, reached)
        assert sorted(set(refused)) == list(refused)
        self.pools[tier].release(slots[list(refused)])
        held = Held(lease, path[:reached])
        self.use(held.blocks)
        if reached == len(path) and prompt.tail_tokens and self.pools[tier].num_free:
            slot = self.pools[tier].allocate(1)
            tail = (tenant, tokens, has_image)
            is_new = self.state(tier, tail) is CopyState.ABSENT
            assert self.index.insert_tail(tier, lease, prompt, int(slot[0]))[1] == is_new
            if not self.is_cached(tail):
                self.add(tail)
                self.use([*path, tail])
            if is_new:
                self.copies[tier][tail] = (int(slot[0]), CopyState.READY)
            else:
                self.pools[tier].release(slot)
        self.keep_or_release(held)

    def hold(self) -> None:
        prompt, tokens, tenant, has_image = self.prompt()
        found = self.matched(self.path(tokens, tenant, has_image))
        count = self.rng.randrange(len(found) + 1)
        lease = self.index.hold(self.index.match(prompt).node, count)
        self.use(found[:count])
        if self.rng.random() < 0.3:
            self.index.count_hit(lease)
            for block in found[:count]:
                self.hits[block] += 1
        self.keep_or_release(Held(lease, found[:count]))

    def keep_or_release(self, held: Held) -> None:
        if held.blocks and len(self.held) < 3 and self.rng.random() < 0.5:
            self.held.append(held)
        else:
            self.index.release(held.lease)
            with pytest.raises(OwnershipError):
                self.index.release(held.lease)

    def release(self) -> None:
        if self.held:
            held = self.held.pop(self.rng.randrange(len(self.held)))
            self.index.release(held.lease)

    def begin_load(self) -> None:
        prompt, tokens, tenant, has_image = self.prompt()
        found = self.matched(self.path(tokens, tenant, has_image))
        match = self.index.match(prompt)
        if match.host_blocks and match.host_blocks <= self.pools[Tier.DEVICE].num_free:
            lease = self.index.hold(match.node, match.num_blocks)
            self.begin(Tier.DEVICE, Held(lease, found), match.num_blocks - match.host_blocks)

    def begin_offload(self) -> None:
        prompt, tokens, tenant, has_image = self.prompt()
        found = self.matched(self.path(tokens, tenant, has_image))
        first = 0
        while first < len(found) and not self.wants_host(found[first]):
            first += 1
        stop = first
        while stop < len(found) and self.wants_host(found[stop]):
            stop += 1
        if first < stop and stop - first <= self.pools[Tier.HOST].num_free:
            lease = self.index.hold(self.index.match(prompt).node, stop)
            self.begin(Tier.HOST, Held(lease, found[:stop]), first)

    def wants_host(self, block: Block) -> bool:
        on_device, on_host = self.state(Tier.DEVICE, block), self.state(Tier.HOST, block)
        return on_device is CopyState.READY and on_host is CopyState.ABSENT

    def begin(self, tier: Tier, held: Held, first: int) -> None:
        stop = len(held.blocks)
        slots = self.pools[tier].allocate(stop - first)
        self.use(held.blocks)
        node = held.lease.node
        self.index.change(tier, node, first, stop, Change.RESERVE, slots=slots)
        for block, slot in zip(held.blocks[first:], slots.tolist(), strict=True):
            self.copies[tier][block] = (slot, CopyState.INCOMING)
        self.moving.append(Moving(tier, held, first, slots))

    def arrive(self) -> None:
        if not self.moving:
            return
        moving = self.rng.choice(self.moving)
        above = moving.held.blocks[: moving.first]
        if moving.tier is Tier.DEVICE and any(
            self.state(Tier.DEVICE, block) is not CopyState.READY for block in above
        ):
            return  # the lane brings the blocks above first
        self.end(moving, Change.ARRIVE)
        for block in moving.blocks:
            self.copies[moving.tier][block] = (self.copies[moving.tier][block][0], CopyState.READY)

    def fail(self) -> None:
        if not self.moving:
            return
        moving = self.rng.choice(self.moving)
        if moving.tier is Tier.DEVICE and any(
            other is not moving
            and other.tier is Tier.DEVICE
            and moving.blocks[0] in other.held.blocks[: other.first]
            for other in self.moving
        ):
            return  # those that hang below fail first
        had = self.end(moving, Change.FAIL)
        assert had.tolist() == moving.slots.tolist()
        self.pools[moving.tier].release(had)
        for block in moving.blocks:
            del self.copies[moving.tier][block]

    def end(self, moving: Moving, change: Change) -> np.ndarray:
        first, stop = moving.first, len(moving.held.blocks)
        had = self.index.change(moving.tier, moving.held.lease.node, first, stop, change)
        self.moving.remove(moving)
        self.index.release(moving.held.lease)
        return had

    def evict(self) -> None:
        tier = self.rng.choice(list(Tier))
        self.evict_from(tier, self.index.spaces.order[tier], None)

    def evict_leaves(self) -> None:
        """One by one, without a plan: what a plan would let go first, and nothing is below it."""
        tier, count = self.rng.choice(list(Tier)), self.rng.randrange(1, 6)
        order, other = self.index.spaces.order[tier], Tier(1 - tier)
        assert order.leaf_to_go(count, WriteRule(WritePolicy.WRITE_BACK)) is None
        while count > 0:
            leaf = order.leaf_to_go(count, WriteRule(WritePolicy.WRITE_THROUGH))
            planned = order.victims(count)
            if leaf is None:
                run = planned[0].node if planned else self.index.spaces.root
                is_mixed = run.copies[tier].uniform is not CopyState.READY
                assert (
                    not planned
                    or order.policy.has_memory
                    or run.children
                    or run.copies[other].num_present
                    or is_mixed
                )
                return
            assert leaf == planned[0]
            blocks = blocks_of(*leaf)
            cached = [block for each in Tier for block in self.copies[each]]
            assert sorted(b for b in cached if is_below(b, blocks[0])) == sorted(blocks)
            assert not self.leased() & set(blocks)
            self.drop(tier, *leaf)
            count -= len(blocks)

    def evict_own(self) -> None:
        tier = self.rng.choice(list(Tier))
        space = self.index.spaces.root_named("acme").space
        order = self.index.spaces.own_order(space, tier)
        assert (order is None) == (not space.has_quota)
        if order is not None:
            self.evict_from(tier, order, "acme")

    def quota(self) -> None:
        """A tenant's quota comes, goes or changes, whatever blocks it has by then."""
        name = self.rng.choice(["acme", "acme", ""])
        given = self.rng.choice([(5, 4), (2, None), (None, 3), (None, None)])
        self.index.spaces.set_quota(
            self.index.spaces.root_named(name).space, given, (self.kind, self.kind)
        )

    def open_or_close(self) -> None:
        """A tenant that comes by name, and goes again once nobody holds anything of it."""
        if "guest" not in self.tenants:
            self.tenants.append("guest")
            self.index.spaces.open(Space("guest", ROOTS["guest"]), (self.kind, self.kind))
            return
        root = self.index.spaces.root_named("guest")
        if root.holders or any(b[0] == "guest" for m in self.moving for b in m.blocks):
            return
        for node in list(root.children.values()):
            freed = self.index.forget_below(node, 0)
            for each, slots in zip(Tier, freed, strict=True):
                self.pools[each].release(slots)
        for each in Tier:
            for block in [b for b in self.copies[each] if b[0] == "guest"]:
                del self.copies[each][block]
        self.pinned = [pin for pin in self.pinned if pin[0].space.name != "guest"]
        self.index.spaces.close("guest")
        self.tenants.remove("guest")

    def evict_from(self, tier: Tier, order: EvictionOrder, tenant: str | None) -> None:
        count = self.rng.randrange(1, 6)
        victims = order.victims(count)
        assert victims == order.victims(count), "asking changes nothing"
        listed = [block for v in victims for block in blocks_of(v.node, v.start, v.stop)]
        leased = self.leased()
        free = [block for block in self.copies[tier] if block not in leased]
        free = [block for block in free if tenant is None or block[0] == tenant]
        assert len(listed) == len(set(listed)) == min(count, len(free))
        for block in listed:
            assert self.state(tier, block) is CopyState.READY
            assert block not in leased
        self.check_order([block for victim in victims for block in last_first(victim)], free)
        gone: set[Block] = set()
        for victim in victims:
            gone |= set(blocks_of(victim.node, victim.start, victim.stop))
            for tenant_, tokens, image in self.copies[tier]:
                block = (tenant_, tokens, image)
                assert parent_of(block) not in gone or block in gone, "leaves first"
        for victim in victims:
            self.drop(tier, victim.node, victim.start, victim.stop)

    def check_order(self, listed: list[Block], free: list[Block]) -> None:
        """Pinned blocks go last; of the others, among leaves, those that the policy says."""
        is_lfu, pins = self.kind is EvictionKind.LFU, self.pins()
        by_use = is_lfu or self.kind is EvictionKind.LRU
        ranks = {
            block: (block in pins, is_lfu and self.hits[block], by_use and self.used[block])
            for block in free
        }
        for block in listed:
            parents = {parent_of(other) for other in ranks}
            assert ranks[block] == min(ranks[other] for other in ranks if other not in parents)
            del ranks[block]

    def drop(self, tier: Tier, node: TreeNode, start: int, stop: int) -> None:
        if node.num_blocks < stop or not node.copies[tier].num_present:
            return  # went with something above it
        blocks = blocks_of(node, start, stop)
        other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
        below = [b for t in Tier for b in self.copies[t] if is_below(b, blocks[0])]
        is_safe = all(self.state(other, block) is CopyState.READY for block in blocks)
        if is_safe or set(below) <= set(blocks):
            slots = self.index.drop(tier, node, start, stop)
            self.pools[tier].release(slots)
            assert slots.tolist() == [self.copies[tier].pop(block)[0] for block in blocks]
            return
        freed = self.index.forget_below(node, start)
        for each, slots in zip(Tier, freed, strict=True):
            self.pools[each].release(slots)
            went = [b for b in self.copies[each] if is_below(b, blocks[0])]
            assert sorted(slots.tolist()) == sorted(self.copies[each].pop(b)[0] for b in went)

    def pin(self) -> None:
        if self.pinned and self.rng.random() < 0.6:
            node, *_ = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            self.index.unpin_softly(node)
            return
        prompt, tokens, tenant, has_image = self.prompt()
        found = self.matched(self.path(tokens, tenant, has_image))
        if found:
            node = self.index.pin_softly(self.index.match(prompt).node, len(found))
            self.time += 1
            self.pinned.append((node, found, self.time))

    def tell_storage(self) -> None:
        prompt, tokens, tenant, has_image = self.prompt()
        found = self.matched(self.path(tokens, tenant, has_image))
        first = self.rng.randrange(len(found) + 1)
        node = self.index.match(prompt).node
        if self.rng.random() < 0.7:
            self.index.mark_stored(node, first, len(found))
            self.stored.update(found[first:])
        else:
            self.index.unmark_stored(node, first, len(found))
            self.stored.difference_update(found[first:])

    def resize(self) -> None:
        tier = self.rng.choice(list(Tier))
        pool = self.pools[tier]
        wanted = self.rng.randrange(6, 18)
        if wanted >= pool.capacity:
            pool.grow(wanted)
        elif len(pool.allocated_from(wanted)):
            with pytest.raises(OwnershipError):
                pool.shrink(wanted)
        else:
            pool.shrink(wanted)

    def digest(self) -> None:
        prompt, _, tenant, _ = self.prompt()
        match = self.index.match(prompt)
        start = self.rng.randrange(match.num_blocks + 1)
        part = self.index.digests(match.node, match.num_blocks, start=start)
        found = self.index.digests(match.node, match.num_blocks)
        assert part == found[start:]
        assert found == chain(ROOTS[tenant], prompt, 0, match.num_blocks)

    # After every step

    def compare(self) -> None:
        found: dict[Tier, dict[Block, tuple[int, CopyState]]] = {tier: {} for tier in Tier}
        leased, pins = self.leased(), self.pins()
        for node in self.index.spaces.nodes():
            blocks = blocks_of(node, 0, node.num_blocks)
            assert {block in leased for block in blocks} == {node.holders > 0}
            assert {block in pins for block in blocks} == {node.soft_pins > 0}
            self.compare_books(node, blocks)
            for tier in Tier:
                slots, states = node.copies[tier].slots.tolist(), node.copies[tier].states.tolist()
                for block, slot, state in zip(blocks, slots, states, strict=True):
                    if state != CopyState.ABSENT:
                        found[tier][block] = (slot, CopyState(state))
        assert found == self.copies
        nobody: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        assert invariants.findings(self.index, self.pools, nobody) == []
        assert self.index.num_held_leases == len(self.held) + len(self.moving)

    def compare_books(self, node: TreeNode, blocks: list[Block]) -> None:
        """What a run says of itself is true of each of its blocks."""
        assert {self.hits[block] for block in blocks} == {node.hits}
        told = node.stored_in(0, node.num_blocks).tolist()
        assert told == [block in self.stored for block in blocks]
        if not node.holders:
            assert {self.used[block] for block in blocks} == {node.last_used}

    def close(self) -> None:
        """With every lease gone and every movement ended, all can be evicted again."""
        for moving in sorted(self.moving, key=lambda one: -one.first):
            self.pools[moving.tier].release(self.end(moving, Change.FAIL))
            for block in moving.blocks:
                del self.copies[moving.tier][block]
        for held in self.held:
            self.index.release(held.lease)
        self.held.clear()
        for tier in Tier:
            while victims := self.index.spaces.order[tier].victims(3):
                for victim in victims:
                    self.drop(tier, victim.node, victim.start, victim.stop)
        self.compare()
        assert list(self.index.spaces.nodes()) == []


def blocks_of(node: TreeNode, start: int, stop: int) -> list[Block]:
    path = list(node.path())[::-1]
    packed = b"".join(part.tokens for part in path)
    tokens = tuple(unpack(packed).tolist())
    name, image = node.space.name, bool(path[0].extra(0))
    ends = range(node.start + start + 1, node.start + stop + 1)
    return [(name, tokens[: end * SIZE], image) for end in ends]


def last_first(victim: Victim) -> list[Block]:
    return blocks_of(*victim)[::-1]


def parent_of(block: Block) -> Block:
    tenant, tokens, has_image = block
    return tenant, tokens[: (len(tokens) - 1) // SIZE * SIZE], has_image


def is_below(block: Block, top: Block) -> bool:
    """Whether `block` is `top`, or hangs below it. Nothing hangs below a tail."""
    if block == top:
        return True
    is_longer = not len(top[1]) % SIZE and block[1][: len(top[1])] == top[1]
    return block[0] == top[0] and block[2] == top[2] and is_longer


def run(seed: int, kind: EvictionKind, steps: int) -> None:
    machine = Machine(seed, kind)
    for _ in range(steps):
        machine.step()
    machine.close()


@pytest.mark.promise("The index equals a naive model at every step.")
@pytest.mark.promise("Every eviction policy evicts leaves before parents.")
@pytest.mark.parametrize("kind", EvictionKind)
def test_the_index_tells_what_a_naive_model_tells_at_every_step(kind: EvictionKind) -> None:
    run(8, kind, STEPS // 5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EvictionKind)
@pytest.mark.parametrize("seed", range(2))
def test_and_so_in_twenty_thousand_steps(seed: int, kind: EvictionKind) -> None:
    assert STEPS * 2 * len(EvictionKind) >= 20_000
    run(seed, kind, STEPS)
