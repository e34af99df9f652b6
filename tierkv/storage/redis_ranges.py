"""A value that is read in ranges: how long they are, and one digest of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.storage.protocol import Digest

# What is longer than LONGEST_WHOLE is read in ranges of about _RANGE_BYTES: half a MiB, a header.
# The server copies each answer twice, and the second time from its processor's cache if it is not
# longer: 2 MiB take it 0.33 to 0.38 ms, and 0.52 in one piece. GET of 2 MiB at 1.3 to 1.55 of the
# rate in one piece, of 8 MiB at 1.6 of that in ranges of 2 MiB; 512 KiB in halves came to 0.5 to
# 0.8 (loopback, Redis 7.0, 1 MiB of cache for each of 2 cores, 2026-11-23).
_RANGE_BYTES = 520 << 10
LONGEST_WHOLE = 768 << 10


def range_sizes(num_bytes: int) -> list[int]:
    num_ranges = -(-num_bytes // _RANGE_BYTES)
    least, longer = divmod(num_bytes, num_ranges)
    return [least + (index < longer) for index in range(num_ranges)]


class RangesDigest:
    """The digest of a value whose ranges land in any order: what lands before its turn is read
    again, from memory, when that comes."""

    def __init__(self, digest: Digest, ranges: Sequence[tuple[memoryview, ...]]) -> None:
        self.digest = digest
        self._ranges = ranges
        self._left = [sum(map(len, views)) for views in ranges]  # bytes to come of each
        self._next = 0  # which the digest is given now
        self._is_void = False

    @property
    def is_complete(self) -> bool:
        return self._next == len(self._ranges) and not self._is_void

    def part(self, index: int) -> RangeDigest:
        """What takes one of the ranges as it lands. Once more, of one that has begun to: then there
        is no digest of all."""
        self._is_void |= self._left[index] < sum(map(len, self._ranges[index]))
        return RangeDigest(self, index)

    def landed(self, index: int, piece: memoryview) -> None:
        self._left[index] -= len(piece)
        if index != self._next:
            return
        self.digest.update(piece)
        while self._left[self._next] == 0:
            self._next += 1
            if self._next == len(self._ranges):
                return
            self._catch_up(self._ranges[self._next], self._left[self._next])

    def _catch_up(self, views: Sequence[memoryview], left: int) -> None:
        num_landed = sum(map(len, views)) - left
        for view in views:
            if num_landed > 0:
                self.digest.update(view[:num_landed])
            num_landed -= len(view)


class RangeDigest:
    """A `Digest` of one range, for `whole`."""

    __slots__ = ("_index", "whole")

    def __init__(self, whole: RangesDigest, index: int) -> None:
        self.whole = whole
        self._index = index

    def update(self, piece: memoryview, /) -> None:
        self.whole.landed(self._index, piece)
