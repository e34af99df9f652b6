"""The layout of a block: its planes, in order, with their sizes in bytes.

One class describes all kinds of attention. The planes' order in the layout is the order of their
bytes in a host slot and in a stored value.

    host slot   | plane 0 | plane 1 | ... |  block_bytes, one contiguous range
    device      plane p is its own array, uint8 [num_blocks, planes[p].block_bytes]
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from tierkv.errors import LayoutError

Bytes1D = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of a block: one role of one layer, such as the keys of layer 3.

    Attributes:
        layer: 0-based index of the layer; speculative (MTP) layers follow the main model's.
        role: "key", "value", "latent", "scale", "indexer", or another name that the engine uses.
        dtype: name of the element type, such as "bfloat16". Copies do not convert elements.
        block_bytes: bytes of this plane in one block.
        token_bytes: bytes of one token, if token t is at bytes [t * token_bytes, (t + 1) *
            token_bytes) of the plane's part of the block. None if only the attention backend can
            find a token in these bytes.
        has_prefixes: True if a block can be reused for a prompt that shares only the block's first
            tokens, as attention's KV can. False for a recurrent state, which is valid only after
            all tokens of its block.
    """

    layer: int
    role: str
    dtype: str
    block_bytes: int
    token_bytes: int | None = None
    has_prefixes: bool = True

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise LayoutError(f"plane {self.role!r}: layer {self.layer} is negative")
        if self.block_bytes < 1:
            raise LayoutError(f"layer {self.layer} {self.role}: block_bytes must be at least 1")
        if not self.role or not self.dtype:
            raise LayoutError(f"layer {self.layer}: a plane needs a role and a dtype")


@dataclass(frozen=True)
class Layout:
    """The planes of a block of `block_size` tokens, ordered by layer.

    Attributes:
        block_size: number of tokens of a block.
        planes: the planes, in the order of their bytes in a host slot.

    Raises:
        LayoutError: `block_size` is below 1; or there is no plane; or the planes are not ordered by
            layer, skip a layer, or repeat a (layer, role); or a plane's `token_bytes` times
            `block_size` is not its `block_bytes`.
    """

    block_size: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise LayoutError(f"block_size must be at least 1, not {self.block_size}")
        if not self.planes:
            raise LayoutError("a layout needs at least one plane")
        layers = [plane.layer for plane in self.planes]
        if layers != sorted(layers) or set(layers) != set(range(layers[-1] + 1)):
            raise LayoutError("planes must be ordered by layer, with no layer missing")
        if len({(plane.layer, plane.role) for plane in self.planes}) != len(self.planes):
            raise LayoutError("a layer has two planes of the same role")
        for plane in self.planes:
            if (
                plane.token_bytes is not None
                and plane.token_bytes * self.block_size != plane.block_bytes
            ):
                raise LayoutError(
                    f"layer {plane.layer} {plane.role}: {self.block_size} tokens of "
                    f"{plane.token_bytes} bytes do not make {plane.block_bytes} bytes"
                )

    @cached_property
    def num_layers(self) -> int:
        return self.planes[-1].layer + 1

    @cached_property
    def block_bytes(self) -> int:
        return sum(plane.block_bytes for plane in self.planes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each plane in a host slot, in bytes."""
        return tuple(accumulate((plane.block_bytes for plane in self.planes[:-1]), initial=0))

    @cached_property
    def planes_of_layer(self) -> tuple[range, ...]:
        """One range for each layer: the indices of the layer's planes in `planes`."""
        counts = Counter(plane.layer for plane in self.planes)
        stops = accumulate(counts[layer] for layer in range(self.num_layers))
        return tuple(range(start, stop) for start, stop in pairwise((0, *stops)))

    @cached_property
    def has_token_bytes(self) -> bool:
        """True if every plane stores each token in a byte range of its own (`Plane.token_bytes`).

        Only the used bytes of a tail are then stored.
        """
        return all(plane.token_bytes is not None for plane in self.planes)

    @cached_property
    def has_prefixes(self) -> bool:
        """True if a block can be reused for a prompt that shares only the block's first tokens."""
        return all(plane.has_prefixes for plane in self.planes)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 digest of the block size and all planes, 32 bytes."""
        h = hashlib.sha256(b"tierkv layout v1")
        h.update(self.block_size.to_bytes(8, "little"))
        for plane in self.planes:
            for number in (plane.layer, plane.block_bytes, (plane.token_bytes or 0)):
                h.update(number.to_bytes(8, "little"))
            texts = (plane.role, plane.dtype)
            for text in texts if plane.has_prefixes else (*texts, "whole"):
                encoded = text.encode()
                h.update(len(encoded).to_bytes(8, "little"))
                h.update(encoded)
        return h.digest()

    def stored_bytes(self, num_tokens: int) -> int:
        """Return the number of bytes of a stored block or tail, without the value's header.

        Args:
            num_tokens: number of tokens of the block or tail, from 1 to `block_size`.

        Returns:
            The number of bytes. A tail has as many bytes as a full block if a plane has no
                `token_bytes`.

        Raises:
            LayoutError: `num_tokens` is outside its range.
        """
        if not 0 < num_tokens <= self.block_size:
            raise LayoutError(f"a block holds 1 to {self.block_size} tokens, not {num_tokens}")
        if num_tokens == self.block_size or not self.has_token_bytes:
            return self.block_bytes
        return sum((plane.token_bytes or 0) * num_tokens for plane in self.planes)

    def cut_tail(self, slot: Bytes1D, num_tokens: int) -> Bytes1D:
        """Return the bytes of the first tokens in a host slot, as one contiguous array.

        The result has no bytes of the slot's later tokens. If a plane has no `token_bytes`, the
        result is the whole slot.

        Args:
            slot: uint8 [block_bytes].
            num_tokens: number of first tokens, from 1 to `block_size`.

        Returns:
            uint8 [stored_bytes(num_tokens)]; a copy, or `slot` itself if all of its bytes are
                needed.

        Raises:
            LayoutError: `num_tokens` is outside its range.
        """
        if self.stored_bytes(num_tokens) == self.block_bytes:
            return slot
        return np.concatenate(
            [
                slot[start : start + (plane.token_bytes or 0) * num_tokens]
                for plane, start in zip(self.planes, self.offsets, strict=True)
            ]
        )

    def paste_tail(self, payload: Bytes1D, slot: Bytes1D, num_tokens: int) -> None:
        """Write the result of `cut_tail` into a host slot, and set the slot's other bytes to zero.

        Args:
            payload: uint8 [stored_bytes(num_tokens)], the result of `cut_tail`.
            slot: uint8 [block_bytes], the slot to write.
            num_tokens: number of tokens in `payload`, from 1 to `block_size`.

        Raises:
            LayoutError: `payload` or `slot` has a wrong length, or `num_tokens` is outside its
                range; nothing was written.
        """
        if len(payload) != self.stored_bytes(num_tokens) or len(slot) != self.block_bytes:
            raise LayoutError(
                f"a tail of {num_tokens} tokens is {self.stored_bytes(num_tokens)} bytes, "
                f"not {len(payload)}, and a slot {self.block_bytes}, not {len(slot)}"
            )
        if len(payload) == self.block_bytes:
            slot[:] = payload
            return
        slot[:] = 0
        at = 0
        for plane, start in zip(self.planes, self.offsets, strict=True):
            length = (plane.token_bytes or 0) * num_tokens
            slot[start : start + length] = payload[at : at + length]
            at += length


def attention_layout(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    item_bytes: int,
    block_size: int,
) -> Layout:
    """Return the layout of multi-head or grouped-query attention.

    Each layer has a key plane and a value plane. Within a block, a plane is ordered by token:
    [block_size, num_kv_heads, head_dim].

    Args:
        num_layers: number of layers.
        num_kv_heads: number of key and value heads of a layer.
        head_dim: number of elements of a head for one token.
        dtype: name of the element type, such as "bfloat16".
        item_bytes: bytes of one element.
        block_size: number of tokens of a block.
    """
    token_bytes = num_kv_heads * head_dim * item_bytes
    roles = [(role, dtype, token_bytes) for role in ("key", "value")]
    return layered(block_size, roles, num_layers)


def layered(block_size: int, roles: Sequence[tuple[str, str, int]], num_layers: int) -> Layout:
    """Return a layout in which all layers have the same planes.

    Examples of `roles`:

        MLA                       [("latent", "bfloat16", 1152)]
        sparse attention          [("latent", "bfloat16", 1152), ("indexer", "uint8", 132)]

    Block-wise fp8 needs one more plane for the scales, of role "scale" and dtype "float32".

    Args:
        block_size: number of tokens of a block.
        roles: role, dtype and bytes per token of each plane of a layer, in order.
        num_layers: number of layers.
    """
    return Layout(
        block_size=block_size,
        planes=tuple(
            Plane(layer, role, dtype, token_bytes * block_size, token_bytes)
            for layer in range(num_layers)
            for role, dtype, token_bytes in roles
        ),
    )
