"""The addresses of planes on a GPU, and which planes the copy engine can move in one command.

    in a slot   | key 0 | value 0 | key 1 | value 1 | ...
    on the GPU  key 0 ...   value 0 ...   key 1 ...   value 1 ...

The copy engine can move one block of several planes in one command, as a rectangle with one row for
each plane. The rows, such as all keys, must be at equal distances in the slot and on the GPU, and
the planes must be in one allocation. Often each tensor of an engine is an allocation of its own;
then there are no rectangles of several planes. This module does not use a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tierkv.cache.layout import Layout, Plane

_MAX_PITCH = 1 << 31  # upper limit of a copy engine
_MAX_RECTANGLES = 4  # for one block, since each needs a call


@dataclass(frozen=True, slots=True)
class PlaneMemory:
    """The addresses of a plane on its GPU: block b begins at address + b * stride.

    Attributes:
        address: address of block 0.
        stride: bytes from one block to the next.
        allocation: addresses of the allocation that contains the plane; empty if the driver does
            not report one.
    """

    address: int
    stride: int
    allocation: range

    def of_block(self, block: int) -> int:
        """Return the address of block `block` in this plane."""
        return self.address + block * self.stride


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Planes at equal distances; the copy engine moves one block of all of them in one command.

    Attributes:
        memory: addresses of the first plane.
        pitch: bytes from one plane to the next on the GPU.
        block_byte: offset of the first plane in a host slot, in bytes.
        slot_pitch: bytes from one plane to the next in a host slot.
        row_bytes: bytes of one block in each plane.
        rows: number of planes.
    """

    memory: PlaneMemory
    pitch: int
    block_byte: int
    slot_pitch: int
    row_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Place:
    plane: Plane
    memory: PlaneMemory
    block_byte: int


def rectangles_of(
    layout: Layout, memory: Sequence[PlaneMemory], num_blocks: int
) -> tuple[Rectangle, ...]:
    """Return up to four rectangles that together contain all planes.

    A rectangle is a number of planes at equal distances within one allocation, so that one command
    of the copy engine moves one block of all of them.

    Args:
        layout: layout of a block.
        memory: addresses of each plane.
        num_blocks: number of blocks.

    Returns:
        The rectangles; () if four rectangles are not enough, or some planes form none.
    """
    places = [
        _Place(plane, where, start)
        for plane, where, start in zip(layout.planes, memory, layout.offsets, strict=True)
    ]
    kinds: tuple[Callable[[_Place], tuple[Hashable, ...]], ...] = (
        lambda place: (place.plane.block_bytes, place.memory.stride),
        lambda place: (place.plane.block_bytes, place.memory.stride, place.plane.role),
        lambda place: (place.plane.block_bytes, place.memory.stride, place.memory.allocation),
    )
    for kind in kinds:
        groups: dict[Hashable, list[_Place]] = {}
        for place in places:
            groups.setdefault(kind(place), []).append(place)
        found = [_rectangle(group, num_blocks) for group in groups.values()]
        whole = tuple(one for one in found if one is not None)
        if len(whole) == len(found) <= _MAX_RECTANGLES:
            return whole
    return ()


def _rectangle(places: Sequence[_Place], num_blocks: int) -> Rectangle | None:
    first, width = places[0], places[0].plane.block_bytes
    pitch = slot_pitch = width
    if len(places) > 1:
        pitch = places[1].memory.address - first.memory.address
        slot_pitch = places[1].block_byte - first.block_byte
    if not (width <= pitch < _MAX_PITCH and slot_pitch < _MAX_PITCH):
        return None
    for row, place in enumerate(places):
        if place.memory.address != first.memory.address + row * pitch:
            return None
        if place.block_byte != first.block_byte + row * slot_pitch:
            return None
    num_bytes = (len(places) - 1) * pitch + (num_blocks - 1) * first.memory.stride + width
    start, allocation = first.memory.address, first.memory.allocation
    if start not in allocation or start + num_bytes > allocation.stop:
        return None
    return Rectangle(first.memory, pitch, first.block_byte, slot_pitch, width, len(places))
