"""Prompts for the benchmarks of the index: a published trace, or one made up in its likeness."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

PIECE = 512  # tokens per hash id


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


def trace_requests(path: Path, limit: int) -> list[list[int]]:
    """Hash ids of a trace's first `limit` requests: one JSON object a line with `hash_ids`."""
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(limit), strict=False)]


class Pieces:
    """Seeded tokens for hash ids, made when they are asked for."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    def piece(self, hash_id: int) -> bytes:
        found = self._known.get(hash_id)
        if found is None:
            rng = np.random.default_rng(hash_id)
            found = rng.integers(0, 100_000, PIECE, dtype=np.int32).tobytes()
            self._known[hash_id] = found
        return found

    def prompts(self, requests: Sequence[Sequence[int]]) -> Iterator[bytes]:
        """The packed tokens of each request."""
        for hash_ids in requests:
            yield b"".join([self.piece(one) for one in hash_ids])
