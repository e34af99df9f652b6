"""Mooncake's Python package: what is used of it (it brings no types), and its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tierkv.config import Fixed, all_above_zero, all_at_least_one
from tierkv.errors import ConfigError


class Config(Protocol):
    replica_num: int
    soft_pin_action: object


class MooncakeClient(Protocol):
    """`mooncake.store.MooncakeDistributedStore`. Every call blocks."""

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

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        config: Config,
    ) -> list[int]: ...

    def put(self, key: str, value: bytes, config: Config) -> int: ...
    def upsert(self, key: str, value: bytes, config: Config) -> int: ...

    def get(self, key: str) -> bytes: ...

    def get_size(self, key: str) -> int: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...  # noqa: FBT001


class Package(Protocol):
    def MooncakeDistributedStore(self) -> MooncakeClient: ...  # noqa: N802

    def ReplicateConfig(self) -> Config: ...  # noqa: N802

    @property
    def SoftPinAction(self) -> SoftPin: ...  # noqa: N802


class SoftPin(Protocol):
    @property
    def ENABLE(self) -> object: ...  # noqa: N802


# Pieces of all calls together, and of them times the halt below in seconds. A call ends after 60 s,
# whatever its pieces may still do. Of a provider that was frozen, with halts of 2 s, 16 pieces kept
# it for 2 s, 64 for 11, 128 for 19; 192 for 60, and when the provider went on 47 of them landed in
# buffers that the caller had back (16 connections, loopback, package 0.3.13).
_MAX_PIECES = 128
_MAX_PIECES_AND_HALTS = 256
_LEAST_PIECES = 2  # of one call: a header and a payload
# Without a byte, on a connection to a provider. A call ends after 60 s whatever may still come, and
# what a frozen provider sent later went into buffers that were somebody else's by then.
_LONGEST_HALT_S = 10.0


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """local_host: the address that providers reach this node at.
    num_threads: calls that read at a time, and as many that write. A call waits for its bytes
        without a pause and has a core to itself. 1 to 32, to 6 with long timeouts: see max_pieces.
    replicas: copies of each value. connect_timeout_s: for the master, to be reached and to answer,
        and for a provider to move a byte (whole seconds, 10 at most); the package takes it from
        the environment, once (MC_RPC_TIMEOUT_MS, 30 s without; MC_TCP_PROGRESS_TIMEOUT_SEC).
    protocol: tcp or rdma; rdma_devices: for the latter, by commas.
    """

    local_host: str = "127.0.0.1"
    num_threads: Fixed[int] = 1
    replicas: int = 1
    connect_timeout_s: Fixed[float] = 2.0
    protocol: str = "tcp"
    rdma_devices: str = ""

    def __post_init__(self) -> None:
        all_at_least_one("", self, "num_threads", "replicas")
        all_above_zero("", self, "connect_timeout_s")
        if self.protocol not in {"tcp", "rdma"}:
            raise ConfigError(f"Mooncake's protocol is tcp or rdma, not {self.protocol!r}")
        if self.max_pieces < _LEAST_PIECES:
            raise ConfigError(
                f"{self.num_threads} threads that each wait {self.halt_s} s for a frozen provider "
                "outlast Mooncake's calls: set fewer num_threads, or a shorter connect_timeout_s"
            )

    @property
    def halt_s(self) -> int:
        """How long a provider may move no byte."""
        return math.ceil(min(self.connect_timeout_s, _LONGEST_HALT_S))

    @property
    def is_rdma(self) -> bool:
        """A network card moves bytes of no memory that the client was not told of. Over TCP it is
        told of none: whoever reaches the ports it listens on can read and write what it knows."""
        return self.protocol == "rdma"

    @property
    def max_pieces(self) -> int:
        """Of the values of one call of the client: see _MAX_PIECES."""
        in_flight = min(_MAX_PIECES, _MAX_PIECES_AND_HALTS // self.halt_s)
        return in_flight // (2 * self.num_threads)


def environment(settings: MooncakeSettings) -> dict[str, str]:
    """What the package reads there when a client is made. What the user has set stays."""
    limit_s = settings.connect_timeout_s
    halt_s = str(settings.halt_s)
    return {
        "GLOG_minloglevel": "2",  # it logs each miss otherwise
        "MC_RPC_TIMEOUT_MS": str(math.ceil(limit_s * 1000)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(math.ceil(limit_s * 1000)),
        # Each waits for the master once more: 42 s for a frozen one, with the package's own 20.
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "MC_TCP_STATUS_TIMEOUT_SEC": halt_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": halt_s,
        # Connections to a provider, of which each has one piece on its way: a header keeps one from
        # payloads for a round trip. Of the client with its own 4, put and get came at 0.78 and 0.80
        # with 4, 0.80 and 0.90 with 8, 0.90 to 0.98 and 0.89 to 0.90 with 16, the most it takes
        # (8 values of 2 MiB, loopback, 2 cores, package 0.3.13).
        "MC_TCP_LANES_PER_PEER": "16",
    }
