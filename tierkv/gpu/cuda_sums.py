"""Where a CUDA lane's kernels add up the checksums of the copy on its way, and where it tells them.

    kernel stream   zero parts | gather or scatter, unit by unit: adds to parts | tell_sums

One copy after the other, in the order of the lane's kernel stream, so that one array of parts is
enough, and nothing is left in it by a copy that broke.
"""

from __future__ import annotations

import numpy as np

from tierkv.gpu.cuda import Gpu
from tierkv.gpu.cuda_memory import DeviceMemory, pinned_words
from tierkv.gpu.cuda_streams import Argument, CudaStream, Kernel
from tierkv.gpu.protocol import Ids
from tierkv.gpu.units import MAX_BLOCKS

_NUM_THREADS = 512
_TOLD = np.dtype(
    [("sums", "<u8"), ("told", "<u8"), ("num_blocks", "<u4"), ("places", "<i4", MAX_BLOCKS)],
    align=True,
)


class LaneSums:
    """told: see SummingLane.sums. The rest is for one thread at a time, which has the GPU bound.

    num_targets: slots or blocks that a copy may write, and so how many it has at most.
    """

    def __init__(self, gpu: Gpu, num_targets: int) -> None:
        self.told = pinned_words(gpu, num_targets)
        self._parts = DeviceMemory(gpu, 8 * num_targets)
        self._kernel = Kernel(gpu, "tell_sums", takes_sums=True)
        self._argument = Argument(np.zeros((), _TOLD))
        self._argument.values["told"] = self.told.ctypes.data
        self._places: Ids = np.empty(0, np.int32)

    def begin(self, places: Ids, stream: CudaStream) -> None:
        """A copy comes next; the sum of its block i is to be told as told[places[i]]."""
        self._places = places
        self._parts.zero(8 * len(places), stream)

    def address(self, row: int) -> int:
        """Where block `row` of the copy is summed up."""
        return self._parts.address + 8 * row

    def whole_up_to(self, row: int, stream: CudaStream) -> None:
        """What is submitted so far sums up all bytes of the blocks before `row`; if those are all,
        they are told."""
        if row < len(self._places):
            return
        values = self._argument.values
        for start in range(0, row, MAX_BLOCKS):
            part = self._places[start : start + MAX_BLOCKS]
            values["sums"], values["num_blocks"] = self.address(start), len(part)
            values["places"][: len(part)] = part
            num_ctas = -(-len(part) // _NUM_THREADS)
            self._kernel.launch(
                self._argument, num_ctas=num_ctas, num_threads=_NUM_THREADS, stream=stream
            )
