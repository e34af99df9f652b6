"""What tierkv uses of Mooncake's Python package, which brings no types. Every call blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Config(Protocol):
    replica_num: int
    soft_pin_action: object


class Client(Protocol):
    """`mooncake.store.MooncakeDistributedStore`."""

    def setup(  # noqa: PLR0913, PLR0917 - theirs
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...

    def close(self) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def unregister_buffer(self, buffer_ptr: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: Config
    ) -> list[int]: ...

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]: ...

    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...

    def put(self, key: str, value: bytes, config: Config) -> int: ...
    def upsert(self, key: str, value: bytes, config: Config) -> int: ...

    def get(self, key: str) -> bytes: ...

    def get_size(self, key: str) -> int: ...

    def batch_get_replica_desc(self, keys: list[str]) -> Mapping[str, Sequence[Replica]]: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...  # noqa: FBT001


class Package(Protocol):
    def MooncakeDistributedStore(self) -> Client: ...  # noqa: N802

    def ReplicateConfig(self) -> Config: ...  # noqa: N802

    @property
    def SoftPinAction(self) -> SoftPin: ...  # noqa: N802


class SoftPin(Protocol):
    @property
    def ENABLE(self) -> object: ...  # noqa: N802


class Replica(Protocol):
    def is_memory_replica(self) -> bool: ...

    def get_memory_descriptor(self) -> MemoryDescriptor: ...


class MemoryDescriptor(Protocol):
    @property
    def buffer_descriptor(self) -> BufferDescriptor: ...


class BufferDescriptor(Protocol):
    @property
    def transport_endpoint(self) -> str: ...

    @property
    def buffer_address(self) -> int: ...

    @property
    def size(self) -> int: ...


class Engine(Protocol):
    """`mooncake.engine.TransferEngine`."""

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int: ...

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int: ...

    def send_probe(self, peer_server_name: str) -> int: ...

    def transfer_check_status(self, batch_id: int) -> int: ...


class EnginePackage(Protocol):
    def TransferEngine(self) -> Engine: ...  # noqa: N802
