"""Attention of a transformers model over the planes of the device tier.

One forward pass computes tokens of several requests, side by side in one row:

    request    A A A A A B C          (a chunk of A's prompt, one token of B, one of C)
    position   0 1 2 3 4 9 7
                 |  projections and MLPs run over all tokens at once
                 v
    PlaneLayer.update      writes each token's K and V to its place in the planes
    paged_attention        attends for each request over its own blocks

The two seams are transformers' own: a cache layer, and a registered attention function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from tierkv.cache.layout import Layout
from tierkv.errors import LayoutError

ATTENTION = "tierkv_paged"
_MOST_GQA_DIM = 256  # of a head that kernels of grouped queries take


@dataclass(frozen=True, slots=True)
class TokenRun:
    """The tokens of one request in a step.

    Attributes:
        tokens: int32 [n], at positions start, start + 1, ...
        start: Number of tokens before them, with KV in the blocks.
        block_table: int [m], the blocks of tokens 0, 1, ...; those beyond the piece are ignored.
        wants_logits: True for the logits of the token after the last one.
    """

    tokens: npt.NDArray[np.int32]
    start: int
    block_table: npt.NDArray[np.integer]
    wants_logits: bool = True

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class PagedStep:
    """The pieces of one forward pass, and where their tokens lie.

    Args:
        pieces: The pieces, each of another request.
        block_size: Tokens per block.
        device: The device of the planes.
        before_layer: Called with the number of each layer before its planes are used.
    """

    def __init__(
        self,
        pieces: Sequence[TokenRun],
        block_size: int,
        device: torch.device,
        before_layer: Callable[[int], None],
    ) -> None:
        self.pieces = pieces
        self.before_layer = before_layer
        self._block_size = block_size
        self._device = device
        positions = np.concatenate([np.arange(one.start, one.stop) for one in pieces])
        blocks = np.concatenate(
            [one.block_table[np.arange(one.start, one.stop) // block_size] for one in pieces]
        )
        ends = np.cumsum([len(one.tokens) for one in pieces])
        wanted = [end - 1 for one, end in zip(pieces, ends, strict=True) if one.wants_logits]
        packed = np.concatenate(
            [
                *(one.tokens for one in pieces),
                positions,
                blocks,
                positions % block_size,
                np.array(wanted, np.int64),
            ]
        )
        total = len(positions)
        on_device = torch.from_numpy(packed.astype(np.int64)).to(device)  # one copy for all
        ids, places, self.blocks, self.offsets, self.wanted = on_device.split(
            [total, total, total, total, len(wanted)]
        )
        self.ids, self.positions = ids[None], places[None]
        self.cuts = [len(one.tokens) for one in pieces]
        self.lengths = [one.stop for one in pieces]
        self._tables = [self._table(one) for one in pieces]
        self._masks: dict[int, torch.Tensor] = {}

    def _table(self, piece: TokenRun) -> slice | torch.Tensor:
        """Return the blocks of a piece: a slice where they lie in a row, which needs no copy."""
        used = piece.block_table[: -(-piece.stop // self._block_size)].astype(np.int64)
        first = int(used[0])
        if len(used) == 1 or bool((np.diff(used) == 1).all()):
            return slice(first, first + len(used))
        return torch.from_numpy(used).to(self._device)

    def read(self, plane: torch.Tensor, number: int) -> torch.Tensor:
        """Return the tokens of a piece's request, up to the piece's last one.

        Args:
            plane: [num_blocks, block_size, heads, dim].
            number: The number of the piece.

        Returns:
            [1, heads, tokens, dim].
        """
        table = self._tables[number]
        blocks = plane[table] if isinstance(table, slice) else plane.index_select(0, table)
        return blocks.flatten(0, 1)[: self.lengths[number]].transpose(0, 1)[None]

    def mask(self, number: int) -> torch.Tensor:
        """Return bool [tokens, context] of a piece: True where a token sees another one."""
        if number not in self._masks:
            piece = self.pieces[number]
            seen = torch.ones(len(piece.tokens), piece.stop, dtype=torch.bool, device=self._device)
            self._masks[number] = seen.tril(piece.start)
        return self._masks[number]


class PlaneLayer(CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of one layer in the planes.

    Args:
        number: Number of the layer.
        pages: The pages of all layers.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, number: int, pages: Pages) -> None:
        super().__init__()
        self.is_initialized = True
        self._number = number
        self._pages = pages
        self.given: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the planes are there before."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's keys and values to their places.

        Returns:
            The new keys and values alone, where attention reads the planes itself; those of all
            pieces one after the other, where the model changes them first (latents of MLA).
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
            torch.cat([step.read(plane, number) for number in range(len(step.pieces))], dim=2)
            for plane in pages.of_layer(self._number)
        )
        self.given = keys
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes that no mask is made with: `paged_attention` has its own."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # as older versions call it
        return -1


class Pages:
    """The planes of a model as tensors, and the step that is computed now.

    Attributes:
        cache: The cache to pass to the model.
        returns_all: True where the cache returns the keys and values of whole requests, which the
            model changes before it attends; False where attention reads the planes.
        reads_planes: False once attention was given other keys than the cache had returned.

    Args:
        planes: uint8 [num_blocks, block_bytes] each, in the layout's order.
        layout: The layout.
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
    """Attend for each piece of the step over the keys and values of its request.

    Args:
        module: The attention layer.
        query: [1, heads, tokens, dim].
        key: [1, kv_heads, n, dim]; what `PlaneLayer.update` returned, or made of it.
        value: As `key`.
        attention_mask: None.
        dropout: Without effect.
        scaling: Factor of the scores.
        pages: The pages, passed through the model.
        others: Options of attention that the model asks for.

    Returns:
        [1, tokens, heads, dim], and None.

    Raises:
        LayoutError: The model asks for attention of another kind.
    """
    if pages is None or pages.step is None:
        raise LayoutError("the model does not pass its keyword arguments to its attention")
    asked = [name for name in _OTHER_ATTENTION if others.get(name) is not None]
    if asked:
        raise LayoutError(f"the model's attention has {asked[0]}, which cannot be served")
    step, number = pages.step, module.layer_idx
    pages.reads_planes &= key is pages.layers[number].given
    outputs, at = [], 0
    for piece, queries in enumerate(query.split(step.cuts, dim=2)):
        if pages.returns_all:
            stop = at + step.lengths[piece]
            keys, values, at = key[:, :, at:stop], value[:, :, at:stop], stop
        else:
            keys, values = (step.read(plane, piece) for plane in pages.of_layer(number))
        is_first = keys.shape[2] == queries.shape[2]
        mask = None if is_first or queries.shape[2] == 1 else step.mask(piece)
        outputs.append(_attend(queries, keys, values, scaling, mask))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return joined.transpose(1, 2).contiguous(), None


_OTHER_ATTENTION = ("softcap", "s_aux", "position_bias", "sliding_window")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of one piece, [1, heads, tokens, dim]; causal without a mask."""
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    if tokens == 1:  # the query heads of a KV head lie where queries do
        packed = query.reshape(1, key.shape[1], groups, query.shape[3])
        found = F.scaled_dot_product_attention(packed, key, value, scale=scaling)
        return found.reshape(1, -1, 1, value.shape[3])
    takes_groups = mask is None and key.shape[3] == value.shape[3] <= _MOST_GQA_DIM
    if groups > 1 and not takes_groups:
        key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=groups > 1 and takes_groups,
    )


AttentionInterface.register(ATTENTION, paged_attention)
