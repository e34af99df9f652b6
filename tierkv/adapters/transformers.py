"""Copies between a Hugging Face transformers cache and tierkv's paged planes, byte for byte.

transformers keeps the KV of a layer as one tensor [batch, heads, tokens, dim] that grows; tierkv as
blocks of tokens, [block_size, heads, dim] each, wherever the block table says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from tierkv.cache.keys import Fingerprint
from tierkv.cache.layout import Layout, Plane
from tierkv.errors import LayoutError

Planes = Sequence[npt.NDArray[np.uint8]]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Shape:
    """One of the two tensors of a layer, for one token: [heads, dim]."""

    role: str
    heads: int
    dim: int


class PagedCache:
    """How the caches of one model lie in blocks of `block_size` tokens.

    dtype: of the cached tensors, usually the model's. Raises LayoutError if not all layers of the
    model keep keys and values of every token (sliding windows, linear attention).
    """

    def __init__(self, config: PretrainedConfig, *, block_size: int, dtype: torch.dtype) -> None:
        self._config = config.get_text_config(decoder=True)
        self._shapes = _shapes(self._config)
        self.dtype = dtype
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        if kinds != {DynamicLayer}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise LayoutError(f"only full attention can be cut into blocks of tokens, not {names}")
        self.layout = Layout(
            block_size,
            tuple(
                Plane(layer, shape.role, _name(dtype), width * block_size, width)
                for layer in range(self._config.num_hidden_layers)
                for shape in self._shapes
                for width in (shape.heads * shape.dim * dtype.itemsize,)
            ),
        )

    def fingerprint(self, model: str, *, revision: str = "", tenant: str = "") -> Fingerprint:
        """model, revision: which weights; bytes are shared by those who name the same ones."""
        return Fingerprint(
            model, self.layout, revision=revision, weight_dtype=_name(self.dtype), tenant=tenant
        )

    def load(self, planes: Planes, block_table: Ids, num_tokens: int) -> DynamicCache:
        """A cache of batch size 1 with the first `num_tokens` tokens of the blocks; a copy."""
        cache = DynamicCache(config=self._config)
        if not num_tokens:
            return cache
        rows = self._rows(block_table, 0, num_tokens)
        for layer in range(self._config.num_hidden_layers):
            pair = []
            for at, shape in enumerate(self._shapes, start=layer * len(self._shapes)):
                found = torch.from_numpy(self._by_token(planes, at)[rows])
                states = found.view(self.dtype).reshape(num_tokens, shape.heads, shape.dim)
                pair.append(states.transpose(0, 1).unsqueeze(0).contiguous())
            cache.update(*pair, layer)
        return cache

    def store(
        self, cache: DynamicCache, planes: Planes, block_table: Ids, start: int, stop: int
    ) -> None:
        """Copy tokens [start, stop) of the cache, of batch size 1, into their blocks.

        Raises LayoutError, with nothing copied, if the cache is not of this model or dtype, or has
        fewer tokens.
        """
        sources = [self._bytes(cache, at, start, stop) for at in range(len(self.layout.planes))]
        rows = self._rows(block_table, start, stop)
        for at, source in enumerate(sources):
            self._by_token(planes, at)[rows] = source

    def _bytes(
        self, cache: DynamicCache, plane: int, start: int, stop: int
    ) -> npt.NDArray[np.uint8]:
        """uint8 [stop - start, token_bytes] of one plane."""
        layer, which = divmod(plane, len(self._shapes))
        shape = self._shapes[which]
        states = _states(cache, layer)[which]
        expected = (1, shape.heads, states.shape[2], shape.dim)
        if tuple(states.shape) != expected or states.dtype != self.dtype:
            raise LayoutError(
                f"layer {layer} {shape.role}: {tuple(states.shape)} of {_name(states.dtype)} where "
                f"{expected} of {_name(self.dtype)} belongs"
            )
        if not 0 <= start <= stop <= states.shape[2]:
            raise LayoutError(f"the cache has {states.shape[2]} tokens, not {start} to {stop}")
        tokens = states[0, :, start:stop].detach().transpose(0, 1).cpu().contiguous()
        flat: npt.NDArray[np.uint8] = (
            tokens.reshape(stop - start, shape.heads * shape.dim).view(torch.uint8).numpy()
        )
        return flat

    def _rows(self, block_table: Ids, start: int, stop: int) -> tuple[Ids, npt.NDArray[np.int64]]:
        """For each token its block and its place in it."""
        blocks, places = np.divmod(np.arange(start, stop), self.layout.block_size)
        return block_table[blocks], places

    def _by_token(self, planes: Planes, plane: int) -> npt.NDArray[np.uint8]:
        """A view of the plane, uint8 [num_blocks, block_size, token_bytes]."""
        array = planes[plane]
        return array.reshape(array.shape[0], self.layout.block_size, -1)


def _shapes(config: PretrainedConfig) -> tuple[_Shape, _Shape]:
    """What the cache keeps per token. For multi-head latent attention transformers 5 keeps the
    latent as the key and the rotary part as the value; `store` refuses what lies otherwise."""
    if getattr(config, "kv_lora_rank", None):
        return _Shape("key", 1, config.kv_lora_rank), _Shape("value", 1, config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _Shape("key", heads, dim), _Shape("value", heads, dim)


def _states(cache: DynamicCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    if layer >= len(cache.layers) or not cache.layers[layer].is_initialized:
        raise LayoutError(f"the cache has nothing of layer {layer}")
    return cache.layers[layer].keys, cache.layers[layer].values


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
