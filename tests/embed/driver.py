"""An engine at random: at every step of it a request may look up, load, save, grow, be preempted,
be aborted or end, copies and the store may fail, and every byte that is loaded is looked at."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.embed.test_groups import Hybrid
from tests.latch import PATIENCE_S
from tierkv.cache.groups import NO_BLOCK, GroupKind, main_group
from tierkv.cache.keys import MediaItem, Prompt, prompt_extra
from tierkv.embed.engine_cache import Found
from tierkv.gpu.protocol import Direction
from tierkv.ranks.link import Plan

SALTS = [b"", b"", b"a salt"]
ADAPTERS = [b"", b"", b"a digest"]
MOST = 6  # requests at a time
NUM_BLOCKS = 100


class WrongBytesError(AssertionError):
    """What was loaded is not what the model computes."""


@dataclass(eq=False)
class Text:
    """A prompt that may grow, and what of it KV depends on."""

    tokens: list[int]
    salt: bytes
    adapter: bytes
    media: tuple[MediaItem, ...]

    def prompt(self, size: int) -> Prompt:
        extra = prompt_extra(salt=self.salt, adapter=self.adapter)
        return Prompt.of(self.tokens, size, self.media, extra=extra)

    @property
    def truth(self) -> list[int]:
        """Other numbers for tokens that another salt, adapter or image makes others."""
        whole = 10_000 * (1 + SALTS.index(self.salt)) * (10 if self.adapter else 1)
        starts = [(one.start, 1_000_000 * one.content_hash[0]) for one in self.media]
        return [
            token + whole + sum(more for start, more in starts if at >= start)
            for at, token in enumerate(self.tokens)
        ]


@dataclass(eq=False)
class Running:
    """blocks: by group, for each position the engine's block, or NO_BLOCK. have: so many tokens it
    computed itself, before it looked up. computed: so many are right in its blocks."""

    key: str
    text: Text
    have: int
    blocks: list[list[int]]
    ticket: str | None = None
    claims: str | None = None
    state: str = "waiting"
    computed: int = 0
    promised: Found | None = None
    num_grown: int = 0


@dataclass
class Driver:
    """faults: each makes something of the store worse, or well again, with its argument False.
    meddle: does to a plan, where it is carried out, what a faulty engine would. bases: what texts
    begin with; its own if there are none."""

    on: Hybrid
    rng: random.Random
    faults: Sequence[Callable[[bool], None]] = ()
    meddle: Callable[[Driver, Running, str, Plan], Plan] | None = None
    honours_fences: bool = True
    running: list[Running] = field(default_factory=list)
    mail: list[tuple[Running, str, Plan]] = field(default_factory=list)
    loading: set[str] = field(default_factory=set)
    tickets: dict[str, Text] = field(default_factory=dict)
    loaded_tokens: int = 0
    failed_loads: int = 0
    num_steps: int = 0
    bases: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups = self.on.cache.groups
        self.sizes = [group.block_size for group in groups]
        self.size = groups[main_group(groups)].block_size
        self.free: list[list[int]] = [list(range(1, NUM_BLOCKS)) for _ in groups]
        self.limbo: list[list[int]] = [[] for _ in groups]
        if not self.bases:
            self.bases = [[self.rng.randrange(1, 9_000) for _ in range(40)] for _ in range(4)]
        self.fault: Callable[[bool], None] | None = None
        self.quiet_at = 0

    # Steps

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step(comes=True)
        self.finish()

    def finish(self) -> None:
        """No more faults and no more requests: all ends, and all is given back."""
        if self.fault is not None:
            self.fault(False)
            self.fault = None
        self.on.latch.release()
        deadline = time.monotonic() + PATIENCE_S
        while self.running or self.mail or any(self.limbo):
            self.step(comes=False)
            assert time.monotonic() < deadline, f"{self.running} {self.mail} {self.limbo}"
        for group, free in enumerate(self.free):
            assert sorted(free) == list(range(1, NUM_BLOCKS)), f"blocks of group {group} are lost"
        self.on.until(lambda: self.on.cache.reset().wait(PATIENCE_S) == 0)  # nothing is held

    def step(self, *, comes: bool) -> None:
        self.num_steps += 1
        rng, busy = self.rng, False
        if comes:
            self._meddle_with_parts()
            if len(self.running) < MOST and rng.random() < 0.4:
                self._come()
        for one in list(self.running):
            if comes and rng.random() < 0.02:
                self._end(one)  # an abort
                continue
            busy = self._go_on(one) or busy
        late = []
        for one, kind, plan in self.mail:
            if comes and rng.random() < 0.2:
                late.append((one, kind, plan))
            else:
                self._carry_out(one, kind, plan)
        self.mail = late
        self._poll()
        self._reuse()
        if not busy:
            self.on.cache.wait(0.002)

    def _meddle_with_parts(self) -> None:
        rng, latch = self.rng, self.on.latch
        if self.faults and self.num_steps >= self.quiet_at:
            if self.fault is not None:
                self.fault(False)
                self.fault = None
            elif rng.random() < 0.1:
                self.fault = rng.choice(list(self.faults))
                self.fault(True)
            self.quiet_at = self.num_steps + rng.randrange(10, 40)
        chance = rng.random()
        if chance < 0.03:
            latch.fail_next(rng.choice(list(Direction)), rng.randrange(1, 3))
        elif chance < 0.06:
            latch.hold(rng.choice(list(Direction)))
        elif chance < 0.16:
            latch.release()
        elif chance < 0.17:
            self.on.cache.reset()
        if rng.random() < 0.02:
            self.on.cache.note_prefill(rng.randrange(1, 60), rng.random())

    # One request

    def _come(self) -> None:
        rng = self.rng
        if self.tickets and rng.random() < 0.2:
            ticket = rng.choice(list(self.tickets))
            text = self.tickets.pop(ticket)
            self._add(Running("", text, 0, [], claims=ticket))
            return
        base = rng.choice(self.bases)
        tokens = base[: rng.choice([1, 3, 4, 7, 8, 12, 16, 20, 29, 32, 40])]
        if rng.random() < 0.4:
            tokens = tokens + [rng.randrange(1, 9_000) for _ in range(rng.randrange(1, 9))]
        media: tuple[MediaItem, ...] = ()
        if len(tokens) > 4 and rng.random() < 0.2:
            start = rng.randrange(len(tokens) - 3)
            media = (MediaItem(start, 3, bytes([rng.randrange(1, 3)]) * 16),)
        text = Text(tokens, rng.choice(SALTS), rng.choice(ADAPTERS), media)
        have = 0
        if rng.random() < 0.3:
            have = rng.randrange(len(tokens) // self.size + 1) * self.size
        one = Running("", text, have, [])
        if rng.random() < 0.15:
            one.ticket = f"ticket {self.num_steps} {rng.random()}"
        self._add(one)

    def _add(self, one: Running) -> None:
        # A load is told by its key: who aborts one waits with the key until it is over.
        taken = {other.key for other in self.running} | self.loading
        one.key = self.rng.choice([key for key in "abcdefghijklmnopq" if key not in taken])
        one.blocks = [[] for _ in self.sizes]
        self.running.append(one)

    def _go_on(self, one: Running) -> bool:
        """Whether it came on."""
        if one.state == "waiting":
            return self._look_up(one)
        if one.state == "running":
            return self._compute(one)
        return False

    def _look_up(self, one: Running) -> bool:
        cache, rng = self.on.cache, self.rng
        if one.have and not one.computed and not self._write(one, 0, one.have):
            return False
        one.computed = one.have
        promise_ttl_s = 0.001 if rng.random() < 0.03 else None
        found = cache.lookup(
            one.key,
            one.text.prompt(self.size),
            one.have,
            ticket=one.claims,
            promise_ttl_s=promise_ttl_s,
        )
        if found is None:
            return False
        if not found.num_tokens or rng.random() < 0.05:
            one.state = "running"  # it may also compute all the same
            return True
        assert one.have + found.num_tokens == found.num_there <= len(one.text.tokens)
        return self._start_to_load(one, found)

    def _start_to_load(self, one: Running, found: Found) -> bool:
        ids = []
        for group, part in enumerate(found.blocks):
            for at in part:
                if not self._block(one, group, at):
                    return False  # asks again when there are blocks
            ids.append([one.blocks[group][at] for at in part])
        for group, part in enumerate(found.blocks):
            for at in part:
                if at * self.sizes[group] >= one.have:
                    self._spoil(group, one.blocks[group][at])
        plan = self.on.cache.load(one.key, ids, [part.start for part in found.blocks])
        if plan is None:  # the promise has expired
            return True
        if self.rng.random() < 0.05:
            self.on.cache.cancel(plan)
            return True
        one.promised, one.state = found, "loading"
        self.loading.add(one.key)
        self.mail.append((one, "load", plan))
        return True

    def _loaded(self, one: Running, failed: tuple[tuple[int, ...], ...]) -> None:
        found = one.promised
        assert found is not None, "it was loading"
        one.state = "running"
        if failed:
            self.failed_loads += 1
            parts = [tuple(part) for part in found.blocks]
            assert list(failed) == parts, f"{failed} failed of {parts}"
            return
        count = found.num_there
        truth = one.text.truth[:count]
        for group, part in enumerate(found.blocks):
            for at in part:
                if not self.on.holds(truth, group, at, one.blocks[group][at]):
                    raise WrongBytesError(f"{one.key}: block {at} of group {group}")
        for group, size in enumerate(self.sizes):
            at = one.have // size
            if one.have % size and at < found.blocks[group].start:
                self._leave(one, group, at)  # it is right for what it had alone
        one.computed = count
        self.loaded_tokens += found.num_tokens

    def _compute(self, one: Running) -> bool:
        rng, whole = self.rng, len(one.text.tokens)
        if one.computed < whole:
            stop = min(one.computed + rng.randrange(1, 16), whole)
            if not self._write(one, one.computed, stop):
                return False
            one.computed = stop
        is_all = one.computed == whole
        if is_all or rng.random() < 0.8:
            self._save(one, is_all=is_all)
        self._leave_window(one)
        if rng.random() < 0.05:
            self._preempt(one)
        elif is_all and rng.random() < 0.3 and one.num_grown < 3 and whole < 56:
            one.num_grown += 1
            one.text = Text(
                one.text.tokens + [rng.randrange(1, 9_000) for _ in range(rng.randrange(1, 6))],
                one.text.salt,
                one.text.adapter,
                one.text.media,
            )
            one.ticket = None
        elif is_all:
            self._end(one)
        return True

    def _save(self, one: Running, *, is_all: bool) -> None:
        stops = [
            -(-one.computed // size) if is_all else one.computed // size for size in self.sizes
        ]
        first = [0 for _ in stops]
        ids = [of_group[:stop] for of_group, stop in zip(one.blocks, stops, strict=True)]
        if self.rng.random() < 0.3 and min(map(len, ids)) > 1:
            kinds = [group.kind for group in self.on.cache.groups]
            first = [1 if kind is not GroupKind.FULL else 0 for kind in kinds]
            ids = [of_group[at:] for of_group, at in zip(ids, first, strict=True)]
        if not any(ids) and one.ticket is None:
            return
        prompt = one.text.prompt(self.size)
        more = {"ticket": one.ticket, "first_tokens": [7, 8]} if one.ticket is not None else {}
        plan = self.on.cache.save(
            one.key,
            prompt,
            ids,
            first,
            external_ids=self._names(one, ids, first),
            **more,  # type: ignore[arg-type]
        )
        if one.ticket is not None:
            self.tickets.setdefault(one.ticket, one.text)
        if plan is None:
            return
        if self.rng.random() < 0.03:
            self.on.cache.cancel(plan)
            return
        self.mail.append((one, "save", plan))

    def _names(
        self, one: Running, ids: Sequence[Sequence[int]], first: Sequence[int]
    ) -> list[list[str | None]]:
        """Return a name for each whole block, which says all that its bytes depend on."""
        truth = one.text.truth
        return [
            [
                str(truth[: at * size]) if at * size <= len(truth) else None
                for at in range(start + 1, start + 1 + len(of_group))
            ]
            for of_group, start, size in zip(ids, first or [0] * len(ids), self.sizes, strict=True)
        ]

    def _preempt(self, one: Running) -> None:
        self._give_back(one)
        one.have = one.computed = 0
        one.claims = None
        one.state = "waiting"

    def _end(self, one: Running) -> None:
        self.running.remove(one)
        self.on.cache.release(one.key)
        if self.rng.random() < 0.2:
            self.on.cache.release(one.key)
        for entry in list(self.mail):
            if entry[0] is one and self.rng.random() < 0.5:
                self.on.cache.cancel(entry[2])
                self.mail.remove(entry)
                self.loading.discard(one.key if entry[1] == "load" else "")
        self._give_back(one)

    # Blocks

    def _block(self, one: Running, group: int, position: int) -> bool:
        """Whether it has a block there now."""
        blocks = one.blocks[group]
        blocks += [NO_BLOCK] * (position + 1 - len(blocks))
        if blocks[position] == NO_BLOCK:
            if not self.free[group]:
                return False
            blocks[position] = self.free[group].pop(0)
        return True

    def _write(self, one: Running, start: int, stop: int) -> bool:
        """Compute tokens [start, stop); False if there is no block for them now."""
        truth, todo = one.text.truth, []
        for group, size in enumerate(self.sizes):
            for at in range(start // size, -(-stop // size)):
                if not self._block(one, group, at):
                    return False
                block = one.blocks[group][at]
                if self._is_state(group) and self.on.cache.fence([block], group):
                    return False  # it is saved as it was; it must not change yet
                todo.append((group, at, block))
        for group, at, block in todo:
            self.on.write(truth[:stop], group, at, block)
        return True

    def _leave_window(self, one: Running) -> None:
        for number, group in enumerate(self.on.cache.groups):
            if group.kind is GroupKind.WINDOW and self.rng.random() < 0.3:
                before = max(one.computed - group.window, 0) // group.block_size
                for at in range(min(before, len(one.blocks[number]))):
                    self._leave(one, number, at)

    def _leave(self, one: Running, group: int, position: int) -> None:
        block, one.blocks[group][position] = one.blocks[group][position], NO_BLOCK
        if block != NO_BLOCK:
            self.limbo[group].append(block)

    def _is_state(self, group: int) -> bool:
        return self.on.cache.groups[group].kind is GroupKind.STATE

    def _give_back(self, one: Running) -> None:
        for limbo, blocks in zip(self.limbo, one.blocks, strict=True):
            limbo += [block for block in blocks if block != NO_BLOCK]
        one.blocks = [[] for _ in self.sizes]

    def _reuse(self) -> None:
        """Blocks that no plan touches go to others, who write them at once."""
        for group, limbo in enumerate(self.limbo):
            busy = set(self.on.cache.fence(limbo, group)) if self.honours_fences else set()
            for block in [one for one in limbo if one not in busy]:
                self._spoil(group, block)
                self.free[group].append(block)
            self.limbo[group] = [one for one in limbo if one in busy]

    def _spoil(self, group: int, block: int) -> None:
        self.on.put(np.full_like(self.on.arrays[group][0][block], 0xEE), group, block)

    # Plans

    def _carry_out(self, one: Running, kind: str, plan: Plan) -> None:
        if self.meddle is not None:
            plan = self.meddle(self, one, kind, plan)
        if kind == "load":
            self.on.planes.start_loads(plan)
        else:
            self.on.planes.start_saves(plan)

    def _poll(self) -> None:
        by_key = {one.key: one for one in self.running if one.state == "loading"}
        for key, failed in self.on.cache.poll().loaded:
            self.loading.remove(key)
            if key in by_key:
                self._loaded(by_key[key], failed)
