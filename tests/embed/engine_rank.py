"""A rank of an engine as a process: `engine_rank.py PATH RANK FOLDER NUM_BLOCKS`.

Its planes are files. It reads a `StepMessage` a line, and answers each with what has finished.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec

from tests.embed.planes import shard_planes
from tests.latch import PATIENCE_S, CopyLatch, ManualEvent
from tests.world import GQA
from tierkv.embed import Finished, WorkerPlanes
from tierkv.gpu.cpu import CpuDevice
from tierkv.ranks.link import Plan
from tierkv.ranks.memory import EnginePlanes


class StepMessage(msgspec.Struct, kw_only=True):
    """after: the event, by name, that this step's kernels end with; none has ended already. ended:
    events that end now. holds: whether copies wait from now on."""

    saves: list[Plan] = []
    loads: list[Plan] = []
    after: str | None = None
    ended: list[str] = []
    holds: bool | None = None
    closes: bool = False


def main(path: str, rank: str, folder: str, num_blocks: str) -> None:
    logging.basicConfig()
    latch, events = CopyLatch(), dict[str, ManualEvent]()
    arrays = shard_planes(Path(folder), int(rank), int(num_blocks))
    planes = WorkerPlanes(CpuDevice(before_copy=latch), EnginePlanes(GQA, arrays), rank=int(rank))
    planes.connect(path, PATIENCE_S)
    for line in sys.stdin.buffer:
        step = msgspec.json.decode(line, type=StepMessage)
        if step.holds is not None:
            (latch.hold if step.holds else latch.release)()
        after = [] if step.after is None else [events.setdefault(step.after, ManualEvent())]
        for plan in step.loads:
            planes.start_loads(plan, after)
        for plan in step.saves:
            planes.start_saves(plan, after)
        for name in step.ended:
            events[name].finish()
        if step.closes:
            planes.close()
        answer: list[Finished] = planes.finished()
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
