"""Types for the functions of Mooncake's Python package that tierkv calls, and their settings.

The package itself has no type hints.
"""

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
    """The type of `mooncake.store.MooncakeDistributedStore`. Every call blocks."""

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


# Most pieces of all calls together, and most pieces times the halt below in seconds. A call ends
# after 60 s, even with pieces under way. With a frozen provider and halts of 2 s, 128 pieces hold a
# call for 19 s, and 192 for 60 s: 47 of these landed later in buffers that the caller had back.
_MAX_PIECES = 128
_MAX_PIECES_AND_HALTS = 256
_LEAST_PIECES = 2  # pieces of one call: a header and a payload
# Longest seconds without a byte on a connection to a provider. A call ends after 60 s, and bytes
# that a frozen provider sends later would land in buffers that are in use again.
_LONGEST_HALT_S = 10.0


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """The settings of a Mooncake store.

    Attributes:
        local_host: the address at which providers reach this node.
        num_threads: number of calls that read at a time, and of as many that write. A call waits
            for its bytes in a busy loop and has a core to itself. At most 32, or 6 with long
            timeouts: see max_pieces.
        replicas: number of copies of each value.
        connect_timeout_s: seconds in which the master must be reached and answer, and in which a
            provider must move a byte (whole seconds, at most 10). The package reads it from the
            environment once (MC_RPC_TIMEOUT_MS, otherwise 30 s; MC_TCP_PROGRESS_TIMEOUT_SEC).
        protocol: tcp or rdma.
        rdma_devices: the devices of rdma, separated by commas.
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
        if self.max_pieces < _LEAST_PIECES:
            raise ConfigError(
                f"{self.num_threads} threads that each wait {self.halt_s} s for a "
                "frozen provider exceed the deadline of Mooncake's calls: lower "
                "storage.mooncake.num_threads or connect_timeout_s"
            )

    @property
    def halt_s(self) -> int:
        """The seconds in which a provider may move no byte."""
        return math.ceil(min(self.connect_timeout_s, _LONGEST_HALT_S))

    @property
    def is_rdma(self) -> bool:
        """True for RDMA, which needs registered memory.

        A network card moves bytes of registered memory only. Over TCP no memory is registered:
        every host that reaches the client's ports can read and write registered memory.
        """
        return self.protocol == "rdma"

    @property
    def max_pieces(self) -> int:
        """The most pieces of the values in one call of the client, see _MAX_PIECES."""
        in_flight = min(_MAX_PIECES, _MAX_PIECES_AND_HALTS // self.halt_s)
        return in_flight // (2 * self.num_threads)


def environment(settings: MooncakeSettings) -> dict[str, str]:
    """Return the environment variables that the package reads when a client is made.

    Variables that the user has set keep their values.
    """
    limit_s = settings.connect_timeout_s
    halt_s = str(settings.halt_s)
    return {
        "GLOG_minloglevel": "2",  # below that the package logs each miss
        "MC_RPC_TIMEOUT_MS": str(math.ceil(limit_s * 1000)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(math.ceil(limit_s * 1000)),
        # Each retry waits for the master again: 42 s for a frozen one with the package's own 20.
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "MC_TCP_STATUS_TIMEOUT_SEC": halt_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": halt_s,
        # Connections to a provider, each with one piece under way: a header occupies one for a
        # round trip. With 16, the most that the package takes, put has 0.90 to 0.98 of the rate of
        # Mooncake's client alone, and 0.78 with the package's own 4.
        "MC_TCP_LANES_PER_PEER": "16",
    }
