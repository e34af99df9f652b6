"""An engine as a process, to be killed: `engine_of_node.py NODE [RANKS]`.

With `--at-random SEED` for RANKS it does everything there is until then.

It plans to save a prompt, and prints the plan; then it waits. RANKS is the path of the socket for
its rank, which is to begin it. Without, it has a rank itself, and holds a promise of the prompt.
"""

from __future__ import annotations

import random
import sys

import msgspec
import numpy as np

from tests.embed.driver import Driver
from tests.embed.engine import until
from tests.embed.test_groups import MODELS, hybrid
from tests.latch import PATIENCE_S
from tests.world import BLOCK, GQA
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.embed import EngineCache, NodeHost, RankSocket, WorkerPlanes
from tierkv.gpu.cpu import CpuDevice
from tierkv.ranks.memory import EnginePlanes

MODEL = "indexer"  # of engines at random, which share their texts
BASES = [
    [random.Random(100 * base + at).randrange(1, 9_000) for at in range(40)] for base in range(4)
]


def at_random(node: str, seed: int) -> None:
    host = NodeHost(node, name=f"at random {seed}", deadline_s=PATIENCE_S)
    with hybrid(MODELS[MODEL], node=host) as on:
        driver = Driver(on, random.Random(seed), bases=BASES)
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        while True:
            driver.step(comes=True)


def main(node: str, ranks: str = "", seed: str = "") -> None:
    if seed:
        at_random(node, int(seed))
    arrays = [np.ones((16, plane.block_bytes), np.uint8) for plane in GQA.planes]
    planes = None if ranks else WorkerPlanes(CpuDevice(), EnginePlanes(GQA, arrays))
    cache = EngineCache(
        Fingerprint("model", GQA),
        [GQA],
        node=NodeHost(node, name="doomed"),
        planes=planes,
        ranks=RankSocket(ranks, [GQA]) if ranks else None,
    )
    cache.open()
    prompt = Prompt(pack(range(5000, 5000 + 2 * BLOCK)), BLOCK)
    plan = cache.save("a", prompt, [[0, 1]])
    assert plan is not None
    if planes is not None:
        planes.start_saves(plan)
        until(lambda: bool(cache.poll().stored))
        until(lambda: cache.lookup("b", prompt) is not None)
    sys.stdout.buffer.write(msgspec.json.encode(plan) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
