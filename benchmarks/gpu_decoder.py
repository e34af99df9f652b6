"""A decoder of 8 billion parameters in PyTorch that keeps its K and V in tierkv's planes.

Random weights, bf16; 32 layers, hidden 4096, 32 query heads and 8 KV heads of 128, SwiGLU of 14336.
Attention is PyTorch's flash kernel; K and V are written to and gathered from the blocks of a table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

torch: ModuleType = importlib.import_module("torch")

Tensor = Any  # torch.Tensor

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 32, 4096, 14336, 32, 8, 128, 128_256
BLOCK_SIZE = 64
CHUNK = 16_384  # tokens of a prefill per pass through the layers


class Decoder:
    """planes: CuPy uint8 arrays in the layout's order, key then value of each layer. Everything
    runs on PyTorch's current stream."""

    def __init__(self, planes: Sequence[object]) -> None:
        functional = torch.nn.functional
        self._linear, self._norm = functional.linear, functional.rms_norm
        self._silu = functional.silu
        self._planes = [
            torch.from_dlpack(plane).view(torch.bfloat16).view(-1, BLOCK_SIZE, KV_HEADS, DIM)
            for plane in planes
        ]
        generator = torch.Generator("cuda").manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            made = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
            return made.normal_(0, columns**-0.5, generator=generator)

        self._layers = [
            (
                weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                weight(HIDDEN, HEADS * DIM),
                weight(2 * FFN, HIDDEN),
                weight(HIDDEN, FFN),
            )
            for _ in range(LAYERS)
        ]
        self._embedding, self._unembedding = weight(VOCAB, HIDDEN), weight(VOCAB, HIDDEN)
        frequencies = 500_000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
        angles = torch.arange(1 << 17, device="cuda")[:, None] * frequencies
        self._cos = angles.cos().to(torch.bfloat16)[:, None]
        self._sin = angles.sin().to(torch.bfloat16)[:, None]

    @property
    def num_parameters(self) -> int:
        of_layers = sum(one.numel() for layer in self._layers for one in layer)
        return int(of_layers + self._embedding.numel() + self._unembedding.numel())

    def forward(
        self, tokens: Tensor, start: int, table: Tensor, before_layer: Callable[[int], None]
    ) -> int:
        """The token that follows `tokens`, whose positions begin at `start`; their K and V are in
        the blocks of `table` then. Blocks the caller until it is known."""
        with torch.no_grad():
            x = None
            for first in range(0, len(tokens), CHUNK):
                x = self._embedding[tokens[first : first + CHUNK]]
                for layer in range(LAYERS):
                    if not first:
                        before_layer(layer)
                    x = self._layer(layer, x, start + first, table)
            return self._sampled(x)

    def _sampled(self, x: Tensor) -> int:
        logits = self._linear(self._norm(x[-1:], (HIDDEN,)), self._unembedding)
        return int(logits.argmax().item())

    def _layer(self, layer: int, x: Tensor, start: int, table: Tensor) -> Tensor:
        qkv, out, gate_up, down = self._layers[layer]
        n, end = len(x), start + len(x)
        heads = self._linear(self._norm(x, (HIDDEN,)), qkv).view(n, HEADS + 2 * KV_HEADS, DIM)
        turned = self._turn(heads[:, : HEADS + KV_HEADS], start)
        keys, values = self._planes[2 * layer], self._planes[2 * layer + 1]
        positions = torch.arange(start, end, device="cuda")
        blocks, rows = table[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        keys[blocks, rows] = turned[:, HEADS:]
        values[blocks, rows] = heads[:, HEADS + KV_HEADS :]
        used = table[: -(-end // BLOCK_SIZE)]
        k = keys[used].view(-1, KV_HEADS, DIM)[:end]
        v = values[used].view(-1, KV_HEADS, DIM)[:end]
        mixed = attend(turned[:, :HEADS], k, v)
        y = x + self._linear(mixed.reshape(n, HEADS * DIM), out)
        gate, up = self._linear(self._norm(y, (HIDDEN,)), gate_up).chunk(2, dim=1)
        return y + self._linear(self._silu(gate) * up, down)

    def _turn(self, heads: Tensor, start: int) -> Tensor:
        cos, sin = (t[start : start + len(heads)] for t in (self._cos, self._sin))
        left, right = heads.chunk(2, dim=2)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=2)


class OneToken:
    """The pass of one token at position `start`, a CUDA graph per layer: what engines do, since
    launching its kernels one by one takes longer than running them."""

    def __init__(self, decoder: Decoder, start: int, num_blocks: int) -> None:
        self._decoder = decoder
        self._table = torch.arange(num_blocks, device="cuda")
        self._token = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._x = torch.zeros(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self._graphs = []
        with torch.no_grad():
            for _ in range(2):
                self._run_layer(0, start)
            for layer in range(LAYERS):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                    self._run_layer(layer, start)
                self._graphs.append(graph)

    def _run_layer(self, layer: int, start: int) -> None:
        if not layer:
            _set(self._x, self._decoder._embedding[self._token])  # noqa: SLF001 - of one house
        _set(self._x, self._decoder._layer(layer, self._x, start, self._table))  # noqa: SLF001

    def forward(self, token: Tensor, table: Tensor, before_layer: Callable[[int], None]) -> int:
        """See Decoder.forward."""
        with torch.no_grad():
            _set(self._token, token)
            _set(self._table, table)
            for layer, graph in enumerate(self._graphs):
                before_layer(layer)
                graph.replay()
            return self._decoder._sampled(self._x)  # noqa: SLF001


def _set(target: Tensor, value: Tensor) -> None:
    """By a kernel: `copy_` may take the copy engine, and wait there behind what is being loaded."""
    torch.add(value, 0, out=target)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [n, HEADS, DIM], the last n positions of k, v: [m, KV_HEADS, DIM]. As q."""
    n, group = len(q), HEADS // KV_HEADS
    attention = torch.nn.functional.scaled_dot_product_attention
    if n == 1:  # the heads of a group as queries of one KV head: K and V are read once
        k, v = (one.transpose(0, 1)[None] for one in (k, v))
        return attention(q.view(1, KV_HEADS, group, DIM), k, v).reshape(1, HEADS, DIM)
    k, v = (one.repeat_interleave(group, dim=1) for one in (k, v))
    q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
    mask = importlib.import_module("torch.nn.attention.bias").causal_lower_right(n, k.shape[2])
    return attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


def check_attention() -> None:
    """Against the plain formula in float32, on both of the ways it goes."""
    torch.manual_seed(1)
    k, v = (torch.randn(200, KV_HEADS, DIM, device="cuda") for _ in range(2))
    for n in (1, 77):
        q = torch.randn(n, HEADS, DIM, device="cuda")
        wide = [one.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for one in (k, v)]
        scores = q.transpose(0, 1) @ wide[0].transpose(1, 2) * DIM**-0.5
        later = (
            torch.arange(200, device="cuda")[None]
            > torch.arange(200 - n, 200, device="cuda")[:, None]
        )
        expected = (scores.masked_fill(later, -torch.inf).softmax(dim=2) @ wide[1]).transpose(0, 1)
        found = attend(*(one.to(torch.bfloat16) for one in (q, k, v))).float()
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < 0.02, f"attention is wrong by {error:.3f} for {n} queries"
