"""Cost of the index per block of a prompt: match, allocate, insert, release, under eviction.

Measured against one `hashlib.sha256(previous digest + block)` call in the same run, which is what
any cache that keys blocks by digest pays at the least.

    python benchmarks/index.py [--quick] [--json] [--trace FILE]

FILE has one JSON object a line with `input_length` (tokens) and `hash_ids` (one id per 512 tokens;
equal ids mean equal tokens), as in the traces published with Mooncake (FAST'25). Without it a
synthetic conversation workload is used: many sessions that share system prompts and grow by turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.bench import Row, row, show
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Tier
from tierkv.cache.pool import BlockPool

_PIECE = 512  # tokens per hash id


def synthetic_requests(count: int, seed: int = 1) -> list[list[int]]:
    """Hash ids of `count` requests of growing sessions over a few system prompts."""
    rng = random.Random(seed)
    sessions: list[list[int]] = []
    next_id = 1000
    requests = []
    for _ in range(count):
        if not sessions or rng.random() < 0.3:
            sessions.append([rng.randrange(8) * 10 + i for i in range(rng.randrange(1, 4))])
        session = rng.choice(sessions[-200:])
        for _ in range(rng.randrange(1, 8)):
            session.append(next_id)
            next_id += 1
        requests.append(list(session[:64]))
    return requests


def tokens_of(hash_ids: Sequence[int]) -> bytes:
    """512 seeded tokens per hash id, packed."""
    pieces = [
        np.random.default_rng(one).integers(0, 100_000, _PIECE, dtype=np.int32).tobytes()
        for one in hash_ids
    ]
    return b"".join(pieces)


def run_index(prompts: Sequence[bytes], block_size: int, capacity: int) -> tuple[float, float]:
    """Seconds per block, and the share of blocks that were hits."""
    index, pool = Index(block_size), BlockPool("device", capacity)
    blocks = hits = 0
    started = time.perf_counter()
    for tokens in prompts:
        prompt = Prompt(tokens, block_size)
        match = index.match(prompt)
        lease = index.hold(match.node, match.num_blocks)
        needed = min(prompt.num_blocks, capacity) - match.num_blocks
        if needed > pool.num_free:
            for victim in index.order[Tier.DEVICE].victims(needed - pool.num_free):
                pool.release(index.drop(Tier.DEVICE, victim.node, victim.start, victim.stop))
        slots = pool.allocate(needed)
        lease, _ = index.insert(Tier.DEVICE, lease, prompt, match.num_blocks + needed, slots)
        index.release(lease)
        blocks += prompt.num_blocks
        hits += match.num_blocks
    return (time.perf_counter() - started) / blocks, hits / blocks


def run_sha256(prompts: Sequence[bytes], block_size: int) -> float:
    """Seconds per chained digest."""
    width = block_size * 4
    count, digest = 0, bytes(32)
    started = time.perf_counter()
    for tokens in prompts[:50]:
        for at in range(0, len(tokens), width):
            digest = hashlib.sha256(digest + tokens[at : at + width]).digest()
            count += 1
    return (time.perf_counter() - started) / count


def measure(requests: Sequence[Sequence[int]], repeats: int) -> list[Row]:
    prompts = [tokens_of(ids) for ids in requests]
    rows = []
    for block_size in (16, 64):
        capacity = 50_000 * 16 // block_size
        hashes: list[float] = []
        costs: list[float] = []
        share = 0.0
        for _ in range(repeats):  # interleaved, so that both see the same machine
            hashes.append(run_sha256(prompts, block_size) * 1e6)
            cost, share = run_index(prompts, block_size, capacity)
            costs.append(cost * 1e6)
        sha = row(f"sha256 of a block, {block_size} tokens", hashes, "us")
        rows += [
            sha,
            row(
                f"index per block, {block_size} tokens, {share:.0%} hits", costs, "us", against=sha
            ),
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--trace", type=Path, help="a trace instead of the synthetic workload")
    args = parser.parse_args(argv)
    limit = 300 if args.quick else 2000
    if args.trace:
        with args.trace.open() as lines:
            requests = [
                json.loads(line)["hash_ids"] for line, _ in zip(lines, range(limit), strict=False)
            ]
    else:
        requests = synthetic_requests(limit)
    show(measure(requests, 3 if args.quick else 5), as_json=args.json)


if __name__ == "__main__":
    main()
