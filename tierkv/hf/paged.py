"""Attention of a transformers model over the planes of the device tier.

A plane is the array of one layer's keys, or of its values, for all blocks. One forward pass
computes tokens of several requests, side by side in one row:

    request    A A A A A B C          (a chunk of A's prompt, one token of B, one of C)
    position   0 1 2 3 4 9 7
                 |  projections and MLPs run over all tokens at once
                 v
    PlaneLayer.update      writes each token's K and V into the block of its request
    paged_attention        lets the tokens of each request attend to that request's blocks

Transformers calls `PlaneLayer.update` as the cache of a layer, and `paged_attention` as the model's
attention function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from transformers import AttentionInterface, Cache

from tierkv.adapters.transformers import OwnMemoryLayer
from tierkv.cache.layout import Layout
from tierkv.errors import LayoutError

ATTENTION = "tierkv_paged"
_MAX_GQA_DIM = 256  # largest head size that kernels for grouped queries accept


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of one request that a step computes.

    Attributes:
        tokens: int32 [n], at positions start, start + 1, ...
        start: Number of the request's earlier tokens; their KV is in the blocks already.
        block_table: int [m], the device blocks of the request in order of position; blocks after
            the last token are ignored.
        wants_logits: True to compute the logits after the last token, which choose the next one.
    """

    tokens: npt.NDArray[np.int32]
    start: int
    block_table: npt.NDArray[np.integer]
    wants_logits: bool = True

    @property
    def stop(self) -> int:
        """Position after the last token; also the number of keys that the last token attends to."""
        return self.start + len(self.tokens)


class _Part:
    """The requests whose attention is computed in one call.

    A call has one request, or several requests with one token each, padded to the same length. The
    tokens of one request are called a run (`TokenRun`).

    Attributes:
        num_tokens: Number of tokens of all runs.
        length: Number of keys of each run, padding included.
        num_rows: Number of keys of all runs together, padding included.
        mask: bool, broadcast to [runs, heads, tokens, keys]: True if a token sees a key. None for a
            single run with plain causal attention, or with one token.

    Args:
        runs: The runs of the call.
        block_size: Number of tokens of a block.
        device: The device of the planes.
    """

    def __init__(self, runs: Sequence[TokenRun], block_size: int, device: torch.device) -> None:
        self.num_tokens = sum(len(one.tokens) for one in runs)
        self._num_runs = len(runs)
        used = [one.block_table[: -(-one.stop // block_size)].astype(np.int64) for one in runs]
        self.mask: torch.Tensor | None = None
        self._table: slice | torch.Tensor
        if len(runs) > 1:
            most = max(map(len, used))
            table = np.zeros((len(runs), most), np.int64)
            for row, blocks in zip(table, used, strict=True):
                row[: len(blocks)] = blocks
            self._table = torch.from_numpy(table.ravel()).to(device)
            self.length = most * block_size
            stops = torch.tensor([one.stop for one in runs], device=device)
            seen = torch.arange(self.length, device=device) < stops[:, None]
            self.mask = seen[:, None, None]
        else:
            first, self.length = int(used[0][0]), runs[0].stop
            if bool((np.diff(used[0]) == 1).all()):  # consecutive blocks need no copy
                self._table = slice(first, first + len(used[0]))
            else:
                self._table = torch.from_numpy(used[0]).to(device)
            if runs[0].start and self.num_tokens > 1:
                size = (self.num_tokens, self.length)
                seen = torch.ones(size, dtype=torch.bool, device=device)
                self.mask = seen.tril(runs[0].start)
        self.num_rows = self._num_runs * self.length

    def read(self, plane: torch.Tensor) -> torch.Tensor:
        """Gather the keys or values of all sequences of this call from a layer's blocks.

        `plane` has the shape [num_blocks, block_size, heads, dim]; the result [sequences, heads,
        length, dim].
        """
        if isinstance(self._table, slice):
            blocks = plane[self._table]
        else:
            blocks = plane.index_select(0, self._table)
        by_run = blocks.unflatten(0, (self._num_runs, -1)).flatten(1, 2)
        return by_run[:, : self.length].transpose(1, 2)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Return the attention output of several sequences' tokens, [1, heads, tokens, dim].

        `query` has the tokens of all sequences, [1, heads, tokens, dim]; `key` and `value` are
        [sequences, kv_heads, length, dim]. `scaling` is None for 1 / sqrt(dim).
        """
        runs, groups = self._num_runs, query.shape[1] // key.shape[1]
        if self.num_tokens == runs:  # treat the query heads of a KV head as its queries
            packed = query[0].transpose(0, 1).reshape(runs, key.shape[1], groups, -1)
            found = F.scaled_dot_product_attention(
                packed, key, value, attn_mask=self.mask, scale=scaling
            )
            return found.reshape(1, runs, query.shape[1], -1).transpose(1, 2)
        takes_groups = self.mask is None and key.shape[3] == value.shape[3] <= _MAX_GQA_DIM
        if groups > 1 and not takes_groups:
            key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scaling,
            enable_gqa=groups > 1 and takes_groups,
        )


class PagedStep:
    """The input of one forward pass: tokens of several requests, and where their KV is written.

    Attributes:
        ids, positions: int64 [1, tokens], the tokens of all requests, and their positions.
        blocks, offsets: int64 [tokens], the device block of each token, and the token's index
            within the block.
        wanted: int64 [n], indices into `ids` of the tokens whose logits are wanted.
        parts: the requests in order, divided into parts; the attention function is called once for
            each part.

    Args:
        runs: For each request, its consecutive tokens to compute; no request appears twice.
        block_size: Number of tokens of a block.
        device: The device of the planes.
        before_layer: Called with the number of each layer before the layer's planes are used.
        pads: True to put all requests at the start of `runs` that compute one token into one part,
            padded to the length of the longest. False for one request per part.
    """

    def __init__(
        self,
        runs: Sequence[TokenRun],
        block_size: int,
        device: torch.device,
        before_layer: Callable[[int], None],
        *,
        pads: bool,
    ) -> None:
        self.before_layer = before_layer
        positions = np.concatenate([np.arange(one.start, one.stop) for one in runs])
        blocks = np.concatenate(
            [one.block_table[np.arange(one.start, one.stop) // block_size] for one in runs]
        )
        ends = np.cumsum([len(one.tokens) for one in runs])
        wanted = [end - 1 for one, end in zip(runs, ends, strict=True) if one.wants_logits]
        packed = np.concatenate(
            [
                *(one.tokens for one in runs),
                positions,
                blocks,
                positions % block_size,
                np.array(wanted, np.int64),
            ]
        )
        total = len(positions)
        # One copy to the device for all of them.
        on_device = torch.from_numpy(packed.astype(np.int64)).to(device)
        ids, places, self.blocks, self.offsets, self.wanted = on_device.split(
            [total, total, total, total, len(wanted)]
        )
        self.ids, self.positions = ids[None], places[None]
        singles = [len(one.tokens) == 1 for one in runs]
        padded = (singles.index(False) if False in singles else len(runs)) if pads else 0
        groups = [runs[:padded]] if padded else []
        groups += [[one] for one in runs[padded:]]
        self.parts = [_Part(group, block_size, device) for group in groups]


class PlaneLayer(OwnMemoryLayer):
    """The cache of one layer as transformers sees it; the keys and values are in the planes.

    Attributes:
        given: The keys that `update` returned last, to find out if the model changes them before it
            attends.

    Args:
        number: Number of the layer.
        pages: The planes of all layers.
    """

    def __init__(self, number: int, pages: Pages) -> None:
        super().__init__()
        self._number = number
        self._pages = pages
        self.given: torch.Tensor | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of this step's tokens into the layer's planes.

        Args:
            key_states: [1, kv_heads, tokens, dim], the keys of the step's tokens.
            value_states: [1, kv_heads, tokens, dim], the values of the step's tokens.

        Returns:
            The keys and values to pass to the attention function. If that function reads earlier
                tokens from the planes, these are the arguments, unchanged. For models with MLA,
                which transform keys and values before attention, these are the keys and values of
                all tokens so far, one request after another, [1, kv_heads, sum of the requests'
                lengths, dim] each.
        """
        pages = self._pages
        step = pages.step
        assert step is not None, "a model is called with a step"
        step.before_layer(self._number)
        for plane, states in zip(
            pages.of_layer(self._number), (key_states, value_states), strict=True
        ):
            plane[step.blocks, step.offsets] = states[0].transpose(0, 1)
        if not pages.returns_all:
            self.given = key_states
            return key_states, value_states
        keys, values = (
            torch.cat([_in_one_row(part.read(plane)) for part in step.parts], dim=2)
            for plane in pages.of_layer(self._number)
        )
        self.given = keys
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes that have no effect, since `paged_attention` makes masks of its own."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class Pages:
    """The planes of a model as tensors, and the step that is being computed.

    Attributes:
        cache: The cache object to pass to the model.
        layers: One `PlaneLayer` for each layer.
        step: The step that is being computed; None between steps.
        returns_all: True if `PlaneLayer.update` returns the keys and values of whole requests,
            because the model changes them before it attends; False if attention reads the planes.
        reads_planes: False once attention has received other keys than `PlaneLayer.update`
            returned. The model then changes keys, and attention cannot read them in the planes.

    Args:
        planes: uint8 [num_blocks, block_bytes] each, in the layout's order.
        layout: The block size, and the planes of each layer.
        shapes: (heads, dim) of each plane.
        dtype: The type of keys and values.
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        layout: Layout,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        self._planes = [
            plane.view(dtype).unflatten(1, (layout.block_size, *shape))
            for plane, shape in zip(planes, shapes, strict=True)
        ]
        self._pairs = [(self._planes[a], self._planes[b]) for a, b in layout.planes_of_layer]
        self.layers = [PlaneLayer(number, self) for number in range(layout.num_layers)]
        self.cache = Cache(layers=self.layers)
        self.step: PagedStep | None = None
        self.returns_all = True
        self.reads_planes = True

    def of_layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer, [num_blocks, block_size, heads, dim] each."""
        return self._pairs[number]


def paged_attention(  # noqa: PLR0913, PLR0917 - transformers' own signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - there is none
    dropout: float = 0.0,  # noqa: ARG001 - a served model drops nothing
    scaling: float | None = None,
    *,
    pages: Pages | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer; the tokens of each request attend to its own KV only.

    The function is registered in transformers under the name `ATTENTION`.

    Args:
        module: The attention layer; its number is read.
        query: [1, heads, tokens, dim], of the tokens of all requests in the step.
        key: [1, kv_heads, n, dim], as `PlaneLayer.update` returned them or as the model changed
            them.
        value: [1, kv_heads, n, dim], the values of the same tokens.
        attention_mask: Ignored; the step has its own masks.
        dropout: Ignored, as the model is in evaluation mode.
        scaling: Factor of the scores before the softmax; None for 1 / sqrt(dim).
        pages: The planes, which the model passes on from its own keyword arguments.
        others: Further options of attention that the model asks for.

    Returns:
        [1, tokens, heads, dim], and None for the attention weights.

    Raises:
        LayoutError: `pages` did not arrive, or the model asks for an unsupported option.
    """
    if pages is None or pages.step is None:
        raise LayoutError(
            "the model does not pass its keyword arguments to its attention: use another model"
        )
    asked = [name for name in _OTHER_ATTENTION if others.get(name) is not None]
    if asked:
        raise LayoutError(
            f"the model's attention has {asked[0]}, which cannot be served: use another model"
        )
    step, number = pages.step, module.layer_idx
    pages.reads_planes &= key is pages.layers[number].given
    outputs = []
    parts, cuts = step.parts, [part.num_tokens for part in step.parts]
    if pages.returns_all:
        rows = [part.num_rows for part in parts]
        pairs = [
            tuple(one.unflatten(2, (-1, part.length))[0].transpose(0, 1) for one in pair)
            for part, *pair in zip(
                parts, key.split(rows, dim=2), value.split(rows, dim=2), strict=True
            )
        ]
    else:
        pairs = [tuple(part.read(plane) for plane in pages.of_layer(number)) for part in parts]
    for part, queries, (keys, values) in zip(parts, query.split(cuts, dim=2), pairs, strict=True):
        outputs.append(part.attend(queries, keys, values, scaling))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2).contiguous(), None


_OTHER_ATTENTION = ("softcap", "s_aux", "position_bias", "sliding_window")


def _in_one_row(states: torch.Tensor) -> torch.Tensor:
    """Return [runs, heads, tokens, dim] as [1, heads, runs * tokens, dim]."""
    return states.transpose(0, 1).flatten(1, 2)[None]


AttentionInterface.register(ATTENTION, paged_attention)
