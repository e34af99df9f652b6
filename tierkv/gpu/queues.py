"""A GPU's hardware queues, each of which has a kernel before a lane is opened.

Streams share a few queues of the hardware (8, or CUDA_DEVICE_MAX_CONNECTIONS). Where two lanes were
opened after the first kernels of an engine, as is usual, the copies of one of them went at 50.5
GB/s instead of 54.2 beside compute on one stream, those of the other beside compute on another, the
legacy default stream among them: in each of 18 processes, for the rest of its life. After a kernel
on each of 8 or 16 streams, on an idle GPU, before or after the lanes were opened, no pair was slow,
in 4 processes; 2 streams did not do it, nor did events, nor streams that were only made, nor 32
connections. Lanes opened before an engine's first kernel were never slow, in 8 (H200, driver 580,
2026-11-21). As it is now, two or four lanes were never slow in 5 more (2026-11-22). It looks as if
the driver set up a queue when a kernel first comes to it.
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
    Blocks until what the GPU has to do now, and the kernels, are done."""
    gpu.synchronize()
    streams = tuple(new_stream(gpu, is_urgent=True) for _ in range(num_queues()))
    for stream in streams:
        launch_nothing(gpu, stream)
    for stream in streams:
        stream.synchronize()
    return streams
