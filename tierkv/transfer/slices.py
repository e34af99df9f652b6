"""Which values a block is in storage, and which bytes of which host slots each of them holds.

A node that is not split has one value per block, as large as its slot. One of n ranks has n, a
slice for each rank, and finds the blocks of nodes of other sizes under the names of their slices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierkv.cache.keys import KeyRun, Names, StoredKey
from tierkv.cache.layout import Bytes1D, Layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.errors import LayoutError
from tierkv.gpu.protocol import HostSlots
from tierkv.storage.codec import ValueIdentity


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank of this node holds of each block, and its host slots."""

    shard: Shard
    layout: Layout
    host: HostSlots

    def payload(self, slot: int, num_tokens: int) -> Bytes1D:
        """The slot's bytes that a value of `num_tokens` tokens lands in; for a tail, before its
        planes are put in their places."""
        payload: Bytes1D = self.host.array[slot][: self.layout.stored_bytes(num_tokens)]
        return payload


class Slices:
    """The slices of one node, of all its ranks: a block counts only when all of them are there.

    names: of the whole layout's fingerprint. scheme: how blocks are split; None if this node does
    not know, and then it finds only its own size's. peer_sizes: other sizes to look for.
    """

    def __init__(
        self,
        names: Names,
        parts: Sequence[Slice],
        scheme: ShardScheme | None = None,
        peer_sizes: Sequence[int] = (),
    ) -> None:
        self.names = names
        self.parts = tuple(parts)
        self.size = self.parts[0].shard.size
        self._scheme = scheme
        if len(self.parts) != self.size:
            raise LayoutError(f"{len(self.parts)} slices are not those of {self.size} ranks")
        others = [n for n in dict.fromkeys(peer_sizes) if n != self.size and self._can_be(n)]
        self.peer_sizes = tuple(others)
        self._names = {n: _names(names, n) for n in (self.size, *others)}
        self._layouts = {part.shard: part.layout for part in self.parts}
        self._digests: dict[Shard, bytes] = {}

    @classmethod
    def whole(cls, names: Names, layout: Layout, host: HostSlots) -> Slices:
        """One value per block, of a node whose blocks are not split."""
        return cls(names, [Slice(Shard(0, 1), layout, host)])

    def _can_be(self, size: int) -> bool:
        if self._scheme is None:
            return False
        try:
            self._scheme.layout(Shard(size - 1, size))
        except LayoutError:
            return False
        return True

    def names_of(self, key: StoredKey, size: int) -> list[str]:
        """The names of a block's values as a node of `size` ranks stores it."""
        return [names.name(key) for names in self._names[size]]

    def names_of_all(self, keys: Sequence[StoredKey], size: int) -> Sequence[str]:
        """`names_of` for each key, one after the other."""
        if size == 1 and isinstance(keys, KeyRun):
            return self._names[1][0].of_run(keys)
        per_rank = [names.all(keys) for names in self._names[size]]
        if size == 1:
            return per_rank[0]
        return [name for of_key in zip(*per_rank, strict=True) for name in of_key]

    def sources(self, size: int) -> tuple[Shard, ...]:
        """The slices of `size` ranks that together hold all that this node holds."""
        if size == self.size:
            return tuple(part.shard for part in self.parts)
        assert self._scheme is not None, "other sizes are looked for only with a scheme"
        needed = (s for part in self.parts for s in self._scheme.sources(part.shard, size))
        return tuple(sorted(set(needed)))

    def layout(self, shard: Shard) -> Layout:
        layout = self._layouts.get(shard)
        if layout is None:
            assert self._scheme is not None, "other sizes are looked for only with a scheme"
            layout = self._layouts[shard] = self._scheme.layout(shard)
        return layout

    def identity(self, key: StoredKey, shard: Shard) -> ValueIdentity:
        """What the value of a block's slice has to be, its rank included: two ranks' slices have
        the same sizes, and one must not pass for the other."""
        digest = self._digests.get(shard)
        if digest is None:
            digest = self._digests[shard] = slice_digest(self.layout(shard), shard)
        return ValueIdentity(digest, key.digest, key.num_tokens)

    def assemble(self, slot: int, payloads: dict[Shard, Bytes1D], num_tokens: int) -> None:
        """Put slices of another size together in `slot` of every rank."""
        assert self._scheme is not None, "other sizes are looked for only with a scheme"
        for part in self.parts:
            target = part.payload(slot, num_tokens)
            self._scheme.assemble(part.shard, payloads, target, num_tokens=num_tokens)


def slice_digest(layout: Layout, shard: Shard) -> bytes:
    """32 bytes: the layout's digest for a whole block; with the rank in it for a slice."""
    if shard.size == 1:
        return layout.digest
    return hashlib.sha256(b"tierkv slice v1" + layout.digest + shard.name.encode()).digest()


def _names(names: Names, size: int) -> list[Names]:
    return [replace(names, shard=Shard(rank, size).name) for rank in range(size)]
