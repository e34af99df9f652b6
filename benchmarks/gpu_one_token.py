"""The pass of one token through the decoder of gpu_decoder.py, as fast engines run it: five kernels
a layer (gpu_decoder.cu), which read weights at the speed of memory and K and V where their blocks
lie, and a CUDA graph per layer, since launching kernels one by one takes longer than running them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_decoder import (
    BLOCK_SIZE,
    DIM,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Decoder,
    Tensor,
)

cupy: ModuleType = importlib.import_module("cupy")
torch: ModuleType = importlib.import_module("torch")

Stream = Any  # cupy.cuda.Stream

SOURCE = Path(__file__).with_name("gpu_decoder.cu")
_KERNELS = ("embed", "project", "attend", "add_mixed", "gate", "add_gated", "choose")
_THREADS, _WARPS = 256, 8
_SPLIT, _MOST_SPLITS = 128, 33  # positions at least; 33 x 8 CTAs fill 132 multiprocessors once


class OneToken:
    """The pass of one token at position `start`, whose K and V go to the table's block.

    stream: CuPy's of PyTorch's current one, on which everything runs.
    x: [1, HIDDEN], what the last layer gave.
    """

    def __init__(self, decoder: Decoder, start: int, num_blocks: int, stream: Stream) -> None:
        self._decoder, self._start = decoder, start
        module = cupy.RawModule(code=SOURCE.read_text("utf-8"), options=("-std=c++17",))
        self._kernels = {name: module.get_function(name) for name in _KERNELS}
        self._splits = min(-(-(start + 1) // _SPLIT), _MOST_SPLITS)

        def zeros(*shape: int, dtype: object = torch.bfloat16) -> Tensor:
            return torch.zeros(*shape, device="cuda", dtype=dtype)

        self._inputs = zeros(1 + num_blocks, dtype=torch.int32)
        self._best = zeros(1, dtype=torch.int64)
        self.x, self._mixed, self._gated = zeros(1, HIDDEN), zeros(1, HIDDEN), zeros(1, FFN)
        self._qkv = zeros(1, (HEADS + 2 * KV_HEADS) * DIM)
        self._partial = zeros(HEADS * self._splits * (DIM + 2), dtype=torch.float32)
        self._arrived = zeros(KV_HEADS, dtype=torch.int32)
        # From pinned memory, up to 4 KiB go with the launches, and wait behind no load.
        self._pinned = torch.empty(1 + num_blocks, dtype=torch.int32, pin_memory=True)
        self._given = self._pinned.numpy()
        self._graphs = []
        with torch.no_grad(), stream:
            for layer in (0, LAYERS - 1):
                self._run_layer(layer)
            for layer in range(LAYERS):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph,
                    stream=torch.cuda.current_stream(),
                    capture_error_mode="thread_local",  # the cache's threads are at work
                ):
                    self._run_layer(layer)
                self._graphs.append(graph)

    def _run_layer(self, layer: int) -> None:
        """Layer 0 begins with the token's embedding, the last one ends with the next token."""
        decoder, x = self._decoder, self.x
        qkv, out, gate_up, down = decoder.layers[layer]
        planes = decoder.planes[2 * layer : 2 * layer + 2]
        turn = (decoder.cosines, decoder.sines, self._start)
        rest = (self._partial, self._arrived, self._mixed)
        token, table = self._inputs[:1], self._inputs[1:]
        if not layer:
            self._launch("embed", 1, decoder.embedding, token, x, self._best, threads=512)
        self._launch("project", len(qkv) // 2 // _WARPS, qkv, x, self._qkv)
        grid = (self._splits, KV_HEADS)
        self._launch("attend", grid, self._qkv, *planes, table, *turn, *rest)
        self._launch("add_mixed", len(out) // 2 // _WARPS, out, self._mixed, x)
        self._launch("gate", FFN // _WARPS, gate_up, x, self._gated)
        self._launch("add_gated", len(down) // 2 // _WARPS, down, self._gated, x)
        if layer == LAYERS - 1:
            matrix = decoder.unembedding
            self._launch("choose", len(matrix) // 2 // _WARPS, matrix, x, self._best)

    def _launch(
        self, name: str, grid: int | tuple[int, int], *given: Tensor | int, threads: int = _THREADS
    ) -> None:
        arguments = tuple(
            np.int32(one) if isinstance(one, int) else np.uint64(one.data_ptr()) for one in given
        )
        self._kernels[name](grid if isinstance(grid, tuple) else (grid,), (threads,), arguments)

    def forward(
        self, token: int, table: npt.NDArray[np.int32], before_layer: Callable[[int], None]
    ) -> int:
        """The token that follows `token`. See Decoder.forward."""
        self._given[0], self._given[1:] = token, table
        self._inputs.copy_(self._pinned, non_blocking=True)
        for layer, graph in enumerate(self._graphs):
            before_layer(layer)
            graph.replay()
        return ~int(self._best.item()) & 0xFFFF_FFFF

    def end_ms(self) -> float:
        """What the last layer and the next token's choice take on the idle GPU: no first token
        comes sooner after the last byte."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graphs[0].replay()  # so that the GPU is not idle when it begins
        self._graphs[-2].replay()
        began.record()
        self._graphs[-1].replay()
        ended.record()
        torch.cuda.synchronize()
        return float(began.elapsed_time(ended))


def check_one_token(decoder: Decoder, stream: Stream) -> float:
    """How far its layers, each given the same, are from PyTorch's, the worst of them; raises if
    that is more than rounding. Writes to the first blocks of the planes."""
    num_blocks, start = 9, 8 * BLOCK_SIZE + 3
    for plane in decoder.planes:
        plane[:num_blocks].normal_()
    table = torch.randperm(num_blocks, device="cuda")
    at = (table[start // BLOCK_SIZE], start % BLOCK_SIZE)
    for plane in decoder.planes:
        plane[at] = torch.nan  # what the pass must write itself
    one_token = OneToken(decoder, start, num_blocks, stream)
    before: list[Tensor] = []  # what each layer was given
    ids = table.cpu().numpy().astype(np.int32)
    chosen = one_token.forward(17, ids, lambda _: before.append(one_token.x.clone()))
    after = [*before[1:], one_token.x]
    written = [plane[at].clone() for plane in decoder.planes]
    errors = []
    with torch.no_grad():
        before[0] = decoder.embedding[17:18]
        for layer in range(LAYERS):
            expected = decoder.layer(layer, before[layer], start, table)
            errors.append(_error(after[layer] - before[layer], expected - before[layer]))
        errors += [
            _error(*pair) for pair in zip(written, [p[at] for p in decoder.planes], strict=True)
        ]
        logits = decoder.logits(one_token.x)[0]
    assert all(error < 0.05 for error in errors), f"a pass of one token is wrong: {errors}"
    assert logits[chosen] > logits.max() - 0.05, "the choice of the token is wrong"
    return max(errors)


def _error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float(((found - expected).norm() / expected.norm()).item())
