"""Slices of a block under tensor parallelism: each rank's heads, and how to assemble a slice.

    whole block, heads | 0 1 2 3 |
    2 ranks            | 0 1 | 2 3 |        stored as ...:0of2 and ...:1of2
    4 ranks            | 0 | 1 | 2 | 3 |    stored as ...:0of4 to ...:3of4

The names of all slices contain the fingerprint of the whole block's layout. A node with another
number of ranks than the writer can therefore find the slices, and assemble its own slices from
them.

A plane that is not split by heads (MLA's latent, an indexer) is the same on every rank. If there
are fewer heads than ranks, neighbouring ranks have the same head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from tierkv.cache.layout import Bytes1D, Layout, Plane
from tierkv.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """One tensor-parallel rank's share of the KV heads, stored as one slice of every block.

    Attributes:
        rank: number of the rank, from 0.
        size: number of ranks.
    """

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise LayoutError(f"there is no rank {self.rank} of {self.size}")

    @property
    def name(self) -> str:
        """The last part of the names of stored slices, such as "0of2"."""
        return f"{self.rank}of{self.size}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A strided copy from a stored slice to the slice of the reader: `count` rows of `width` bytes.

    Attributes:
        shard: the rank that has written the stored slice.
        source: offset of the first row in the stored slice, in bytes.
        source_pitch: bytes from one row to the next in the stored slice.
        target: offset of the first row in the reader's slice, in bytes.
        target_pitch: bytes from one row to the next in the reader's slice.
        width: bytes of a row.
        count: number of rows.
    """

    shard: Shard
    source: int
    source_pitch: int
    target: int
    target_pitch: int
    width: int
    count: int


@dataclass(frozen=True)
class ShardScheme:
    """The division of a block's heads over ranks.

    Args:
        whole: layout of a block with all heads.
        heads: number of heads by the role of a plane, for roles that are split. Planes with other
            roles are whole on every rank. The bytes of a head are consecutive: within each token if
            the plane has `token_bytes`, otherwise within the block.

    Raises:
        LayoutError: the bytes of a plane are not a whole number of equal heads.
    """

    whole: Layout
    heads: Mapping[str, int]

    def __post_init__(self) -> None:
        for plane in self.whole.planes:
            count = self.heads.get(plane.role)
            if count is None:
                continue
            if count < 1 or _bytes_of_heads(plane) % count:
                of = "the block" if plane.token_bytes is None else "a token"
                raise LayoutError(
                    f"layer {plane.layer} {plane.role}: {_bytes_of_heads(plane)} bytes of {of} are "
                    f"not {count} equal heads"
                )

    def layout(self, shard: Shard) -> Layout:
        """Return the layout of one rank's slice of a block.

        Raises:
            LayoutError: the heads cannot be divided over this number of ranks.
        """
        planes = []
        for plane in self.whole.planes:
            if plane.role not in self.heads:
                planes.append(plane)
                continue
            start, stop = self._range(plane, shard)
            if plane.token_bytes is None:
                planes.append(replace(plane, block_bytes=stop - start))
            else:
                block_bytes = (stop - start) * self.whole.block_size
                planes.append(replace(plane, token_bytes=stop - start, block_bytes=block_bytes))
        return Layout(self.whole.block_size, tuple(planes))

    def sources(self, reader: Shard, writers: int) -> tuple[Shard, ...]:
        """Return the fewest stored slices that together contain a reader's slice.

        Args:
            reader: the rank that reads.
            writers: number of ranks that have written slices.

        Raises:
            LayoutError: the heads cannot be divided over one of the numbers of ranks.
        """
        return tuple(dict.fromkeys(piece.shard for piece in self.pieces(reader, writers)))

    def pieces(
        self, reader: Shard, writers: int, *, num_tokens: int | None = None
    ) -> tuple[Piece, ...]:
        """Return the copies that build a reader's slice from stored slices.

        Each byte is written once.

        Args:
            reader: the rank that reads.
            writers: number of ranks that have written slices.
            num_tokens: number of tokens of a partial block; None for a full block.

        Returns:
            The copies, in the order of the bytes that they write.

        Raises:
            LayoutError: the heads cannot be divided over one of the numbers of ranks.
        """
        tokens = self.whole.block_size if num_tokens is None else num_tokens
        return tuple(self._pieces(reader, writers, tokens))

    def assemble(
        self,
        reader: Shard,
        payloads: Mapping[Shard, Bytes1D],
        target: Bytes1D,
        *,
        num_tokens: int | None = None,
    ) -> None:
        """Fill `target`, a rank's slice of one block, from the slices that other ranks have stored.

        Args:
            reader: the rank whose slice is filled.
            payloads: bytes of each stored slice by the rank that has written it, uint8 [stored
                bytes]. Together the slices contain all of the reader's slice. All writing ranks
                belong to the same number of ranks (`Shard.size`).
            target: uint8 [stored bytes of the reader's slice], written.
            num_tokens: number of tokens of a partial block; None for a full block.

        Raises:
            LayoutError: a slice is missing or has a wrong length, or the slices differ in
                `Shard.size`; the content of `target` is then undefined.
        """
        sizes = {shard.size for shard in payloads}
        if len(sizes) != 1:
            raise LayoutError(f"slices of {len(sizes)} sizes do not make a block")
        tokens = self.whole.block_size if num_tokens is None else num_tokens
        for shard, payload in (*payloads.items(), (reader, target)):
            expected = self.layout(shard).stored_bytes(tokens)
            if len(payload) != expected:
                raise LayoutError(f"slice {shard.name} has {len(payload)} bytes, not {expected}")
        for piece in self.pieces(reader, sizes.pop(), num_tokens=tokens):
            if piece.shard not in payloads:
                raise LayoutError(f"slice {piece.shard.name} is missing")
            source = payloads[piece.shard]
            _runs(target, piece.target, piece.target_pitch, piece)[:] = _runs(
                source, piece.source, piece.source_pitch, piece
            )

    def _pieces(self, reader: Shard, writers: int, tokens: int) -> Iterator[Piece]:
        lengths, offsets = _places(self.layout(reader), tokens)
        writing = [Shard(rank, writers) for rank in range(writers)]
        theirs = {shard: _places(self.layout(shard), tokens)[1] for shard in writing}
        nearest = writing[reader.rank * writers // reader.size]
        for index, plane in enumerate(self.whole.planes):
            if plane.role not in self.heads:
                yield Piece(
                    nearest, theirs[nearest][index], 0, offsets[index], 0, lengths[index], 1
                )
                continue
            at, stop = start, _ = self._range(plane, reader)
            while at < stop:
                shard, first, last = self._holder(plane, at, (nearest, *writing))
                width = min(last, stop) - at
                yield Piece(
                    shard,
                    theirs[shard][index] + at - first,
                    last - first,
                    offsets[index] + at - start,
                    stop - start,
                    width,
                    1 if plane.token_bytes is None else tokens,
                )
                at += width

    def _range(self, plane: Plane, shard: Shard) -> tuple[int, int]:
        """Return the range (start, stop) of a rank's heads in the bytes of a plane's heads."""
        heads = self.heads[plane.role]
        head_bytes = _bytes_of_heads(plane) // heads
        if shard.size <= heads:
            if heads % shard.size:
                raise LayoutError(f"{heads} heads cannot be split over {shard.size} ranks")
            per_rank = heads // shard.size
            return shard.rank * per_rank * head_bytes, (shard.rank + 1) * per_rank * head_bytes
        if shard.size % heads:
            raise LayoutError(f"{heads} heads cannot be spread over {shard.size} ranks")
        head = shard.rank * heads // shard.size
        return head * head_bytes, (head + 1) * head_bytes

    def _holder(self, plane: Plane, at: int, shards: Sequence[Shard]) -> tuple[Shard, int, int]:
        """Return the first shard that has byte `at` of the plane, and the shard's byte range.

        `at` and the range count the bytes of all heads of one token.
        """
        for shard in shards:
            start, stop = self._range(plane, shard)
            if start <= at < stop:
                return shard, start, stop
        raise AssertionError("the shards of a plane cover it")


def _bytes_of_heads(plane: Plane) -> int:
    return plane.block_bytes if plane.token_bytes is None else plane.token_bytes


def _places(layout: Layout, tokens: int) -> tuple[list[int], list[int]]:
    """Return the bytes of each plane in a stored slice of `tokens` tokens, and its offset."""
    is_whole = layout.stored_bytes(tokens) == layout.block_bytes
    lengths = [
        plane.block_bytes if is_whole else (plane.token_bytes or 0) * tokens
        for plane in layout.planes
    ]
    return lengths, [0, *accumulate(lengths)]


def _runs(payload: Bytes1D, start: int, pitch: int, piece: Piece) -> Bytes1D:
    """Return a view of `piece` in `payload`, uint8 [piece.count, piece.width].

    Row i begins at byte start + i * pitch.
    """
    if piece.count == 1:
        return payload[start : start + piece.width].reshape(1, piece.width)
    begin = payload[start : start + (piece.count - 1) * pitch + piece.width]
    return np.lib.stride_tricks.as_strided(begin, (piece.count, piece.width), (pitch, 1))
