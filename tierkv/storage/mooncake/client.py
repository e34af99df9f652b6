"""Types for the parts of Mooncake's Python package that tierkv uses, and the store's settings.

The package itself has no type hints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tierkv.config import Fixed, all_above_zero, all_at_least_one
from tierkv.errors import ConfigError


class Config(Protocol):
    """The type of `mooncake.store.ReplicateConfig`: options for storing a value.

    Attributes:
        replica_num: number of copies.
        soft_pin_action: a member of `SoftPinAction`; ENABLE lets Mooncake evict the value last.
    """

    replica_num: int
    soft_pin_action: object


class MooncakeClient(Protocol):
    """The type of `mooncake.store.MooncakeDistributedStore`. Every call blocks.

    A returned integer is a length in bytes or 0 for success; a negative one is an error number.
    """

    def setup(  # noqa: PLR0913, PLR0917 - theirs
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        """Connect to the master; return 0 or an error number.

        Args:
            local_hostname: address at which providers (nodes that lend memory) reach this client.
            metadata_server: URL of a metadata server; "P2PHANDSHAKE" for none.
            global_segment_size: bytes of memory that this client lends to the cluster.
            local_buffer_size: bytes of the client's own buffer.
            protocol: "tcp" or "rdma".
            rdma_devices: network devices for RDMA, separated by commas.
            master_server_addr: "host:port" of the master.
        """

    def close(self) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory with the network card; return 0 or an error number.

        Args:
            buffer_ptr: address of the memory.
            size: bytes of the memory.
        """

    def unregister_buffer(self, buffer_ptr: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return for each key 1 if it has a value, 0 if it has none, or an error number."""

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        """Read each value into its buffers; return for each its length or an error number.

        Args:
            keys: names of the values.
            all_buffer_ptrs: addresses of the buffers of each value.
            all_sizes: bytes of these buffers; their sum is the length of the value.
        """

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        config: Config,
    ) -> list[int]:
        """Write values from their buffers, and leave existing values as they are.

        Args:
            keys: names of the values.
            all_buffer_ptrs: addresses of the buffers of each value.
            all_sizes: bytes of these buffers.
            config: options for storing the values.

        Returns:
            For each value, 0 or an error number.
        """

    def put(self, key: str, value: bytes, config: Config) -> int:
        """Write a value if it does not exist; return 0 (also if it exists) or an error number.

        Args:
            key: name of the value.
            value: its bytes, at least one.
            config: options for storing the value.
        """

    def upsert(self, key: str, value: bytes, config: Config) -> int:
        """Write or replace a value; return 0 or an error number.

        Args:
            key: name of the value.
            value: its bytes, at least one.
            config: options for storing the value.
        """

    def get(self, key: str) -> bytes:
        """Return a value; b"" if there is none."""

    def get_size(self, key: str) -> int:
        """Return the length of a value in bytes; a negative error number if it cannot be read."""

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:  # noqa: FBT001
        """Remove values; return 0 or an error number for each.

        Args:
            keys: names of the values.
            force: True to remove also values that were just read, which are protected otherwise.
        """


class Package(Protocol):
    def MooncakeDistributedStore(self) -> MooncakeClient: ...  # noqa: N802

    def ReplicateConfig(self) -> Config: ...  # noqa: N802

    @property
    def SoftPinAction(self) -> SoftPin: ...  # noqa: N802


class SoftPin(Protocol):
    @property
    def ENABLE(self) -> object: ...  # noqa: N802


# Largest number of pieces (buffers) in all calls together, and largest product of pieces and
# `halt_s`. A call returns after 60 s even if bytes are still moving. With a frozen provider and a
# `halt_s` of 2 s, a call with 128 pieces takes 19 s. With 192 pieces it takes 60 s, and 47 of them
# are written later, into buffers that the caller already uses again.
_MAX_PIECES = 128
_MAX_PIECES_AND_HALTS = 256
_MIN_PIECES = 2  # pieces of one call: a header and a payload
# Largest `halt_s`, so that a call with a frozen provider returns before these 60 s are over.
_LONGEST_HALT_S = 10.0


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """The settings of a Mooncake store.

    Attributes:
        local_host: the address at which providers (nodes that lend memory) reach this node.
        num_threads: number of threads that read; the same number of other threads write. A thread
            occupies a processor core while it waits for its bytes. The limit is 32 if
            connect_timeout_s is 2 or less, and falls to 6 if connect_timeout_s is above 9.
        replicas: number of copies of each value.
        connect_timeout_s: seconds in which the master must be reached and answer. A read or write
            also fails if a provider moves no byte for this time, rounded up to whole seconds, at
            most 10. Mooncake's package reads these limits once per process, from MC_RPC_TIMEOUT_MS
            and MC_TCP_PROGRESS_TIMEOUT_SEC in the environment; tierkv sets these variables if they
            are not set.
        protocol: tcp or rdma.
        rdma_devices: the devices for rdma, separated by commas.
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
            raise ConfigError(
                f"storage.mooncake.protocol must be tcp or rdma, not {self.protocol!r}"
            )
        if self.max_pieces < _MIN_PIECES:
            raise ConfigError(
                f"{self.num_threads} threads that each wait {self.halt_s} s for a "
                "frozen provider exceed the deadline of Mooncake's calls: lower "
                "storage.mooncake.num_threads or connect_timeout_s"
            )

    @property
    def halt_s(self) -> int:
        """The time in seconds after which a read or write fails if a provider moves no byte.

        Providers are the nodes that lend memory to the store.
        """
        return math.ceil(min(self.connect_timeout_s, _LONGEST_HALT_S))

    @property
    def is_rdma(self) -> bool:
        """True if values move by RDMA, for which memory must be registered with the network card.

        Over TCP no memory is registered, because every host that reaches the client's ports can
        read and write registered memory.
        """
        return self.protocol == "rdma"

    @property
    def max_pieces(self) -> int:
        """The largest number of buffers in one call of the client.

        A call with more buffers could return while their bytes are still moving.
        """
        in_flight = min(_MAX_PIECES, _MAX_PIECES_AND_HALTS // self.halt_s)
        return in_flight // (2 * self.num_threads)


def environment(settings: MooncakeSettings) -> dict[str, str]:
    """Return the environment variables that Mooncake's package reads when a client is created."""
    limit_s = settings.connect_timeout_s
    halt_s = str(settings.halt_s)
    return {
        "GLOG_minloglevel": "2",  # with a lower level the package logs each miss
        "MC_RPC_TIMEOUT_MS": str(math.ceil(limit_s * 1000)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(math.ceil(limit_s * 1000)),
        # Each retry waits for the master again. With the package's default of 20, that takes 42 s.
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "MC_TCP_STATUS_TIMEOUT_SEC": halt_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": halt_s,
        # Number of connections to a provider. Each moves one piece at a time, so a header occupies
        # one for a round trip. With 16, the package's maximum, put reaches 0.90 to 0.98 of the rate
        # of Mooncake's client alone; with the package's default of 4, it reaches 0.78.
        "MC_TCP_LANES_PER_PEER": "16",
    }
