"""Cost of the index: per block of a prompt, of one long match, of making room, and in memory.

Per block: match, allocate, commit and finish under eviction, planner included, against one
`hashlib.sha256(previous digest + block)` call in the same run, which is what any cache that keys
blocks by digest pays at the least. Each figure is printed beside its target. Rows *to that* are the
same figures as ratios to the call with the CPU's SHA instructions switched off (see index_sha256).
What reading the clock takes is subtracted, and the benchmark's own objects are kept from Python's
collector of cycles, as a node's are when it starts; the index's are not.
Rows *service* are what an engine calls, admit, commit and end, on the event loop (see
index_service).

    python benchmarks/index.py [--quick] [--json] [--trace FILE] [--policies]

`--policies` compares the hit ratios of all eviction policies instead, by capacity; it needs a
trace, which the environment variable TIERKV_TRACE can name as well. FILE has one JSON object a
line with `hash_ids` (one id per 512 tokens; equal ids mean equal tokens), as in the traces
published with Mooncake (FAST'25). Without it a synthetic conversation workload is used: many
sessions that share system prompts and grow by turns.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.bench import Row, row, show
from benchmarks.index_service import run_service
from benchmarks.index_sha256 import seconds_per_digest, without_instructions
from benchmarks.workload import Pieces, synthetic_requests, trace_requests
from tierkv.cache.eviction import EvictionKind, WritePolicy, WriteRule, make_policy
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt, Tokens
from tierkv.cache.node import BlockPool, Ids, Tier
from tierkv.sched.planner import plan_eviction

_DEVICE = Tier.DEVICE  # an attribute of an enum takes 0.1 us
_RULE = WriteRule(WritePolicy.SELECTIVE)
_FORMS = ("bytes", "list", "bytes, digests of new blocks")
_MOST = {  # the targets, as ratios to sha256, by block size
    16: {"bytes": 0.08, "list": 0.40, "bytes, digests of new blocks": 1.2},
    64: {"bytes": 0.22, "list": 1.4, "bytes, digests of new blocks": 2.3},
}


class Cache:
    """An index and its device pool, driven as the scheduler drives them."""

    def __init__(
        self, block_size: int, capacity: int, kind: EvictionKind = EvictionKind.LRU
    ) -> None:
        policies = make_policy(kind, capacity), make_policy(kind, 1)
        self.index = Index(block_size, b"root".ljust(32, b"\0"), policies)
        self.counts_hits = kind is not EvictionKind.LRU
        self.pool = BlockPool("device", capacity)
        self.host = BlockPool("host", 1)
        self.hit_blocks = 0
        self.blocks = 0

    def take(self, needed: int) -> Ids:
        """Slots, after evicting what must go for them; as Room.take does it."""
        return self.pool.exchange(self._freed(needed), needed)

    def evict(self, count: int) -> None:
        freed = self._freed(self.pool.num_free + count)
        self.pool.release(freed[0] if len(freed) == 1 else np.concatenate(freed))

    def _freed(self, needed: int) -> list[Ids]:
        """The slots of what had to go so that `needed` are free."""
        order = self.index.spaces.order[_DEVICE]
        freed: list[Ids] = []
        missing = needed - self.pool.num_free
        while missing > 0 and (leaf := order.leaf_to_go(missing, _RULE)) is not None:
            node, start, stop = leaf
            freed.append(self.index.drop(_DEVICE, node, start, stop))
            missing -= stop - start
        if missing <= 0:
            return freed
        steps = plan_eviction(order, _DEVICE, missing, _RULE)
        return freed + [self.index.drop(_DEVICE, *step.victim) for step in steps]

    def run(self, tokens: Tokens, *, digests: bool = False) -> None:
        """A request that is admitted, computes all it lacks, and ends."""
        index, pool = self.index, self.pool
        prompt = Prompt.of(tokens, index.block_size)
        match = index.match(prompt)
        lease = index.hold(match.node, match.num_blocks)
        if self.counts_hits:
            index.count_hit(lease)
        stop = min(prompt.num_blocks, pool.capacity)
        slots = self.take(stop - match.num_blocks)
        index.insert(_DEVICE, lease, prompt, stop, slots)
        if digests:
            index.digests(lease.node, lease.num_blocks, start=match.num_blocks)
        index.release(lease)
        self.blocks += prompt.num_blocks
        self.hit_blocks += match.num_blocks


def run_trace(requests: Sequence[Sequence[int]], pieces: Pieces, cache: Cache, form: str) -> float:
    """Seconds per block."""
    total = 0.0
    for packed in pieces.prompts(requests):
        tokens: Tokens = packed
        if form == "list":
            tokens = np.frombuffer(packed, np.int32).tolist()
        started = time.thread_time()
        cache.run(tokens, digests="digests" in form)
        total += time.thread_time() - started
    return (total - len(requests) * _clock_s()) / cache.blocks


def _clock_s() -> float:
    """What reading the clock adds to a sample: 0.7 us where it is a call of the system."""
    readings = [time.thread_time() for _ in range(2001)]
    return statistics.median(after - before for before, after in pairwise(readings))


def measure_service(requests: Sequence[Sequence[int]], repeats: int) -> list[Row]:
    """Beside the index: all that an engine calls, Service.admit, commit and end."""
    pieces, costs, whole = Pieces(), list[float](), list[float]()
    hashes = []
    sample = b"".join(pieces.prompts(requests[:100]))
    for _ in range(repeats):
        hashes.append(seconds_per_digest(sample, 16) * 1e6)
        a_block, a_request = run_service(requests, pieces, 16, 50_000)
        costs.append(a_block * 1e6)
        whole.append(a_request * 1e6)
    sha = row("sha256 of a block of 16 tokens", hashes, "us")
    return [
        row("a block of 16, 50,000 cached, service", costs, "us", against=sha),
        row("the same, a whole request", whole, "us"),
    ]


def measure_trace(requests: Sequence[Sequence[int]], repeats: int, block_size: int) -> list[Row]:
    pieces, rows = Pieces(), []
    sample = b"".join(pieces.prompts(requests[:100]))
    for _ in pieces.prompts(requests):
        pass  # all pieces are made now, not between the requests that are timed
    gc.collect()
    gc.freeze()
    for capacity in (50_000, 500_000):
        hashes, without = list[float](), list[float]()
        costs: dict[str, list[float]] = {form: [] for form in _FORMS}
        share = 0.0
        for _ in range(repeats):  # interleaved, so that all see the same machine
            for form in _FORMS:
                hashes.append(seconds_per_digest(sample, block_size) * 1e6)
                cache = Cache(block_size, capacity)
                costs[form].append(run_trace(requests, pieces, cache, form) * 1e6)
                share = cache.hit_blocks / cache.blocks
                if (seconds := without_instructions(block_size)) is not None:
                    without.append(seconds * 1e6)
        name = f"sha256 of a block of {block_size} tokens"
        sha = row(name, hashes, "us")
        rows.append(sha)
        what, most = f"a block of {block_size}, {capacity:,} cached", _MOST[block_size]
        rows += [
            row(f"{what}, {share:.1%} hits, from {f}", costs[f], "us", against=sha, most=most[f])
            for f in _FORMS
        ]
        if without:
            slow = row(f"{name}, SHA instructions off", without, "us")
            rows.append(slow)
            rows += [
                row(f"{what}, from {f}, to that", costs[f], "us", against=slow) for f in _FORMS
            ]
    return rows


def filled(capacity: int, *, prompt_blocks: int = 512, block_size: int = 16) -> Cache:
    """A full cache of prompts that share a first quarter by groups of eight."""
    cache = Cache(block_size, capacity)
    rng = np.random.default_rng(capacity)
    shared = b""
    for at in range(capacity // (prompt_blocks * 3 // 4) + 9):
        if at % 8 == 0:
            shared = _tokens(rng, prompt_blocks // 4 * block_size)
        cache.run(shared + _tokens(rng, prompt_blocks * 3 // 4 * block_size))
    return cache


def _tokens(rng: np.random.Generator, count: int) -> bytes:
    return rng.integers(0, 100_000, count, dtype=np.int32).tobytes()


def measure_policies(requests: Sequence[Sequence[int]]) -> list[Row]:
    """Share of the trace's pieces (512 tokens, one block here) that each policy finds again."""
    rows = []
    for capacity in (1_000, 3_000, 10_000, 30_000, 100_000):
        for kind in EvictionKind:
            cache = Cache(1, capacity, kind)
            for hash_ids in requests:
                cache.run(np.array(hash_ids[:capacity], np.int32).tobytes())
            share = 100 * cache.hit_blocks / cache.blocks
            rows.append(
                row(f"hits of {kind.value}, {capacity:,} blocks of 512 tokens", [share], "%")
            )
    return rows


def measure_long(capacity: int, repeats: int) -> list[Row]:
    """A 128k-token prompt of which 90 % are shared, in a cache of `capacity` blocks."""
    cache = filled(capacity)
    rng = np.random.default_rng(7)
    shared = _tokens(rng, 115_200)
    cache.run(shared + _tokens(rng, 12_800))
    prompts = [shared + _tokens(rng, 12_800) for _ in range(20)]
    from_bytes, from_list = [], []
    for at in range(repeats):
        packed = prompts[at % len(prompts)]
        prompt = Prompt.of(packed, 16)
        started = time.thread_time()
        match = cache.index.match(prompt)
        from_bytes.append((time.thread_time() - started) * 1e3)
        assert match.num_blocks == 7200, "nine tenths are cached"
    for at in range(max(repeats // 20, 5)):
        tokens = np.frombuffer(prompts[at % len(prompts)], np.int32).tolist()
        started = time.thread_time()
        cache.index.match(Prompt.of(tokens, 16))
        from_list.append((time.thread_time() - started) * 1e3)
    freed = []
    for at in range(repeats):
        started = time.thread_time()
        cache.evict(128)
        freed.append((time.thread_time() - started) * 1e6)
        if at % 4 == 3:
            cache.run(_tokens(rng, 512 * 16))
    where = f"in {capacity:,} blocks"
    return [
        row(f"match of 128k tokens {where}, p99", [_p99(from_bytes)], "ms", most=0.3),
        row(f"match of 128k tokens {where}, median", from_bytes, "ms"),
        row("the same from a list, p99", [_p99(from_list)], "ms", most=4.0),
        row(f"free 128 blocks {where}", freed, "us", most=60.0),
    ]


def _p99(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=100)[98] if len(samples) > 1 else samples[0]


def measure_flat(repeats: int) -> list[Row]:
    """The same requests against a small and a big cache."""
    rows: list[Row] = []
    for capacity in (10_000, 100_000, 1_000_000):
        cache = filled(capacity)
        rng = np.random.default_rng(3)
        costs = []
        for _ in range(repeats):
            prompts = [_tokens(rng, 512 * 16) for _ in range(100)]
            started = time.thread_time()
            for packed in prompts:
                cache.run(packed)
            costs.append((time.thread_time() - started) / (100 * 512) * 1e6)
        base = rows[0] if rows else None
        most = 1.5 if rows else None
        rows.append(
            row(f"a block of 16, full cache of {capacity:,}", costs, "us", against=base, most=most)
        )
    return rows


def measure_memory(requests: Sequence[Sequence[int]]) -> list[Row]:
    """Bytes per cached block of 16 tokens, its tokens not counted; no eviction."""
    pieces = Pieces()
    capacity = sum(map(len, requests)) * 32
    prompts = list(pieces.prompts(requests))
    del pieces
    rows = []
    for digests, most in ((False, 40.0), (True, 130.0)):
        pool = BlockPool("device", capacity)
        gc.collect()
        tracemalloc.start()
        index = Index(16, b"root".ljust(32, b"\0"))
        cached = 0
        for packed in prompts:
            prompt = Prompt.of(bytes(bytearray(packed)), 16)  # a copy, so that it is counted
            match = index.match(prompt)
            lease = index.hold(match.node, match.num_blocks)
            slots = pool.allocate(prompt.num_blocks - match.num_blocks)
            index.insert(_DEVICE, lease, prompt, prompt.num_blocks, slots)
            if digests:
                index.digests(lease.node, lease.num_blocks)
            index.release(lease)
            cached += len(slots)
        prompt = Prompt.of(b"", 16)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # 12: the pool's three int32 of each slot, allocated before.
        what = "with digests" if digests else "without digests"
        tokens = sum(node.token_bytes for node in index.spaces.nodes())
        rows.append(
            row(
                f"memory of a block, {what}",
                [(size - tokens) / cached + 12],
                "B",
                most=most,
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--trace",
        type=Path,
        default=os.environ.get("TIERKV_TRACE"),
        help="a trace instead of the synthetic workload",
    )
    parser.add_argument("--policies", action="store_true", help="hit ratios of eviction policies")
    args = parser.parse_args(argv)
    limit = 1500 if args.quick else 100_000
    if args.policies:
        if not args.trace:
            parser.error("--policies needs a trace: --trace or TIERKV_TRACE")
        show(measure_policies(trace_requests(Path(args.trace), limit)), as_json=args.json)
        return
    if args.trace:
        requests = trace_requests(Path(args.trace), limit)
    else:
        requests = synthetic_requests(min(limit, 6000))
    repeats = 3
    rows = []
    for block_size in (16, 64):
        rows += measure_trace(requests, repeats, block_size)
    rows += measure_service(requests[:3000], repeats)
    rows += measure_long(100_000 if args.quick else 1_000_000, 200 if args.quick else 1000)
    rows += measure_flat(3 if args.quick else 10)
    rows += measure_memory(requests[:1000])
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
