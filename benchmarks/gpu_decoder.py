"""A decoder of 8 billion parameters in PyTorch that keeps its K and V in tierkv's planes.

Random weights, bf16; 32 layers, hidden 4096, 32 query heads and 8 KV heads of 128, SwiGLU of 14336.
Attention is PyTorch's flash kernel; K and V are written to and gathered from the blocks of a table.
For passes of one token see gpu_one_token.py.
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
EPSILON = 1e-5  # of the norms


class Decoder:
    """planes: CuPy uint8 arrays in the layout's order, key then value of each layer. Everything
    runs on PyTorch's current stream.

    layers: qkv, out, gate_up and down of each. cosines, sines: [positions, 1, DIM / 2].
    """

    def __init__(self, planes: Sequence[object]) -> None:
        functional = torch.nn.functional
        self._linear, self._silu = functional.linear, functional.silu
        self.planes = [
            torch.from_dlpack(plane).view(torch.bfloat16).view(-1, BLOCK_SIZE, KV_HEADS, DIM)
            for plane in planes
        ]
        generator = torch.Generator("cuda").manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            made = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
            return made.normal_(0, columns**-0.5, generator=generator)

        self.layers = [
            (
                weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                weight(HIDDEN, HEADS * DIM),
                weight(2 * FFN, HIDDEN),
                weight(HIDDEN, FFN),
            )
            for _ in range(LAYERS)
        ]
        self.embedding, self.unembedding = weight(VOCAB, HIDDEN), weight(VOCAB, HIDDEN)
        frequencies = 500_000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
        angles = torch.arange(1 << 17, device="cuda")[:, None] * frequencies
        self.cosines = angles.cos().to(torch.bfloat16)[:, None]
        self.sines = angles.sin().to(torch.bfloat16)[:, None]

    @property
    def num_parameters(self) -> int:
        of_layers = sum(one.numel() for layer in self.layers for one in layer)
        return int(of_layers + self.embedding.numel() + self.unembedding.numel())

    def forward(
        self, tokens: Tensor, start: int, table: Tensor, before_layer: Callable[[int], None]
    ) -> int:
        """The token that follows `tokens`, whose positions begin at `start`; their K and V are in
        the blocks of `table` then. Blocks the caller until it is known."""
        with torch.no_grad():
            x: Tensor = None
            for first in range(0, len(tokens), CHUNK):
                x = self.embedding[tokens[first : first + CHUNK]]
                for layer in range(LAYERS):
                    if not first:
                        before_layer(layer)
                    x = self.layer(layer, x, start + first, table)
            return int(self.logits(x[-1:]).argmax().item())

    def logits(self, x: Tensor) -> Tensor:
        """Of the tokens that follow, for what the last layer gave."""
        return self._linear(self._norm(x), self.unembedding)

    def _norm(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), eps=EPSILON)

    def layer(self, layer: int, x: Tensor, start: int, table: Tensor) -> Tensor:
        qkv, out, gate_up, down = self.layers[layer]
        n, end = len(x), start + len(x)
        heads = self._linear(self._norm(x), qkv).view(n, HEADS + 2 * KV_HEADS, DIM)
        turned = self._turn(heads[:, : HEADS + KV_HEADS], start)
        keys, values = self.planes[2 * layer], self.planes[2 * layer + 1]
        positions = torch.arange(start, end, device="cuda")
        blocks, rows = table[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        keys[blocks, rows] = turned[:, HEADS:]
        values[blocks, rows] = heads[:, HEADS + KV_HEADS :]
        used = table[: -(-end // BLOCK_SIZE)]
        k = keys[used].view(-1, KV_HEADS, DIM)[:end]
        v = values[used].view(-1, KV_HEADS, DIM)[:end]
        mixed = attend(turned[:, :HEADS], k, v)
        y = x + self._linear(mixed.reshape(n, HEADS * DIM), out)
        gate, up = self._linear(self._norm(y), gate_up).chunk(2, dim=1)
        return y + self._linear(self._silu(gate) * up, down)

    def _turn(self, heads: Tensor, start: int) -> Tensor:
        cos, sin = (t[start : start + len(heads)] for t in (self.cosines, self.sines))
        left, right = heads.chunk(2, dim=2)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=2)


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
