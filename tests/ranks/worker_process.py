"""A worker as a process: `worker_process.py PATH RANK FOLDER NUM_BLOCKS`; its planes are files."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.embed.planes import shard_planes
from tests.world import GQA
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import BlockCopy, Direction
from tierkv.ranks.memory import EnginePlanes
from tierkv.ranks.worker import Worker, serve_in_thread


def _fail_if_told(flag: Path, copy: BlockCopy) -> None:
    if flag.exists() and copy.direction is Direction.LOAD:
        flag.unlink()
        raise OSError("this rank was told to fail")


def main(path: str, rank: str, folder: str, num_blocks: str) -> None:
    planes = EnginePlanes(GQA, shard_planes(Path(folder), int(rank), int(num_blocks)))
    device = CpuDevice(before_copy=lambda copy: _fail_if_told(Path(folder, f"fail-{rank}"), copy))
    serve_in_thread(Worker(path, int(rank), device, planes)).join()
    device.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
