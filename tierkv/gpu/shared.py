"""Planes of another process on this machine: what names them, and reading blocks from them.

On a GPU that is CUDA IPC (gpu/ipc.py); on the CPU, the kernel's reading of another process.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from tierkv.gpu.protocol import Ids, Planes


class SharedPlane(msgspec.Struct, frozen=True):
    """A plane that another process may open: bytes `offset` into the memory of `handle`, block b
    at offset + b * stride."""

    handle: bytes
    offset: int
    stride: int


class SharedPlanes(msgspec.Struct, frozen=True, kw_only=True):
    """All that another process on this machine needs to open planes.

    owner: whose they are. name: another one whenever the owner has others in their place; handles
    and addresses come again. place: which GPU they lie on, by UUID, or "cpu".
    """

    owner: str
    name: str
    place: str
    num_blocks: int
    planes: tuple[SharedPlane, ...]


class PeerPlanes(Protocol):
    """Another process's planes, open here. For one thread at a time."""

    def copy(self, source_ids: Ids, target_ids: Ids) -> None:
        """Their blocks source_ids[i] to this node's target_ids[i], which are distinct. Blocks the
        thread until nothing of it moves any more.

        Raises TransferError if not all of it came; what lies in the targets then is anything.
        """

    def close(self) -> None:
        """Their memory can go. Nothing may be in flight."""


class Sharing(Protocol):
    """What a device can do with processes beside it. place: see SharedPlanes."""

    @property
    def place(self) -> str: ...

    def share(self, planes: Planes) -> tuple[SharedPlane, ...]:
        """Raises ConfigError if their memory is of a kind that no other process can open."""

    def open(self, own: Planes, shared: SharedPlanes) -> PeerPlanes:
        """Their planes, to be copied to `own`, which have the same layout.

        Raises ConfigError if nothing of that place can be read from here, TransferError if these
        planes cannot.
        """
