"""Planes that processes of one machine show each other: this node's own, and those of others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from tierkv.errors import TransferError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Device, Ids, Planes
from tierkv.gpu.shared import PeerPlanes, SharedPlane, SharedPlanes, Sharing
from tierkv.pd.direct import memory
from tierkv.pd.direct.memory import Piece

CPU = "cpu"


def sharing_of(device: Device) -> Sharing | None:
    """What this device can do with processes beside it; None if nothing."""
    if isinstance(device, CpuDevice):
        return CpuSharing() if memory.is_possible() else None
    try:
        from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - CuPy may be missing
        from tierkv.gpu.ipc import CudaSharing  # noqa: PLC0415
    except ImportError:
        return None
    return CudaSharing(device) if isinstance(device, CudaDevice) else None


class CpuSharing:
    """On the CPU planes are memory of the process, which the kernel copies to another's."""

    place = CPU

    def share(self, planes: Planes) -> tuple[SharedPlane, ...]:
        owner = str(os.getpid()).encode()
        return tuple(
            SharedPlane(owner, int(array.ctypes.data), int(array.strides[0]))
            for array in planes.arrays
        )

    def open(self, own: Planes, shared: SharedPlanes) -> PeerPlanes:
        if shared.place != self.place or len(shared.planes) != len(own.layout.planes):
            raise TransferError("these are not planes like this node's")
        return _CpuPeer(own, shared)


class _CpuPeer:
    def __init__(self, own: Planes, shared: SharedPlanes) -> None:
        self._own = own
        self._shared = shared

    def copy(self, source_ids: Ids, target_ids: Ids) -> None:
        pairs = list(zip(source_ids.tolist(), target_ids.tolist(), strict=True))
        pieces = []
        for theirs, ours in zip(self._shared.planes, self._own.arrays, strict=True):
            start, stride, num_bytes = int(ours.ctypes.data), int(ours.strides[0]), ours.shape[1]
            pieces += [
                Piece(theirs.offset + source * theirs.stride, start + target * stride, num_bytes)
                for source, target in pairs
            ]
        memory.read(int(self._shared.planes[0].handle), pieces)

    def close(self) -> None:
        pass


class ShownPlanes:
    """This node's planes as others may open them, described once for as long as they are there."""

    def __init__(self, sharing: Sharing, planes: Callable[[], Planes]) -> None:
        """planes: those of now."""
        self._sharing = sharing
        self._planes = planes
        self._owner = uuid4().hex
        self._described: tuple[Planes, SharedPlanes] | None = None

    def describe(self) -> SharedPlanes:
        """Raises ConfigError if no other process can open them."""
        planes = self._planes()
        if self._described is None or self._described[0] is not planes:
            shared = SharedPlanes(
                owner=self._owner,
                name=uuid4().hex,
                place=self._sharing.place,
                num_blocks=planes.num_blocks,
                planes=self._sharing.share(planes),
            )
            self._described = (planes, shared)
        return self._described[1]


@dataclass(slots=True)
class _Open:
    name: str
    own: Planes
    peer: PeerPlanes
    used_at: float


class OpenPlanes:
    """Others' planes that are open here, one set of each owner. For one thread.

    What is open keeps the owner's memory from being freed, also when it is dead or asleep.
    """

    def __init__(self, sharing: Sharing, planes: Callable[[], Planes]) -> None:
        """planes: this node's, of now."""
        self._sharing = sharing
        self._planes = planes
        self._of: dict[str, _Open] = {}

    def copy(self, shared: SharedPlanes, source_ids: Ids, target_ids: Ids) -> None:
        """See PeerPlanes.copy. Raises what it and Sharing.open raise."""
        self._opened(shared).copy(source_ids, target_ids)

    def _opened(self, shared: SharedPlanes) -> PeerPlanes:
        own = self._planes()
        found = self._of.get(shared.owner)
        if found is not None and (found.name != shared.name or found.own is not own):
            self.close(shared.owner)  # first: the new ones may have the handles of the old
            found = None
        if found is None:
            found = _Open(shared.name, own, self._sharing.open(own, shared), 0.0)
            self._of[shared.owner] = found
        found.used_at = time.monotonic()
        return found.peer

    @property
    def num_open(self) -> int:
        return len(self._of)

    def close(self, owner: str) -> None:
        found = self._of.pop(owner, None)
        if found is not None:
            found.peer.close()

    def close_unused(self, unused_s: float) -> None:
        """Close those that were not read from for so long."""
        before = time.monotonic() - unused_s
        for owner in [owner for owner, one in self._of.items() if one.used_at <= before]:
            self.close(owner)
