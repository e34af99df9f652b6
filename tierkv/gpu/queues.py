"""A GPU's hardware queues, each of which has a kernel before a lane is opened.

Streams share a few queues of the hardware (8, or CUDA_DEVICE_MAX_CONNECTIONS). Where lanes were
opened after the first kernels of an engine, as is usual, the copies of one lane or the other went
at 50.5 GB/s instead of 54.2 beside compute on some streams, the legacy default stream among them,
for the rest of the process; in every process, whenever streams were made (H200, driver 580,
2026-11-21). One kernel on each of 8 or 16 streams, before or after the lanes are opened, ends that;
on 2 streams it does not, nor do events, nor streams that are only made. The driver seems to set up
a queue when a kernel first comes to it.
"""

from __future__ import annotations

import os

from tierkv.gpu.cuda import Gpu
from tierkv.gpu.cuda_streams import CudaStream, new_stream
from tierkv.gpu.kernels import launch_nothing

_DEFAULT, _MOST = 8, 32  # CUDA's


def num_queues() -> int:
    """As the environment tells the driver."""
    told = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(max(int(told), 1), _MOST) if told.isdecimal() else _DEFAULT


def used_queues(gpu: Gpu) -> tuple[CudaStream, ...]:
    """A stream for each queue, which has had a kernel; to be kept for as long as there are lanes.
    Blocks until the kernels have run."""
    streams = tuple(new_stream(gpu, is_urgent=True) for _ in range(num_queues()))
    for stream in streams:
        launch_nothing(gpu, stream)
    for stream in streams:
        stream.synchronize()
    return streams
