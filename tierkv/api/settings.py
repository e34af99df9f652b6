"""All settings of a node, one section for each part that has some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import msgspec

from tierkv.errors import ConfigError
from tierkv.pd.settings import HandoffSettings
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.engine import EngineSettings
from tierkv.sched.settings import CacheSettings
from tierkv.storage.settings import StorageSettings

NO_STORAGE = "none"
_MAX_PORT = 65_535


class Role(Enum):
    """Which half of the work a node takes; any node generates by itself."""

    PREFILL = "prefill"  # computes prompts and publishes them
    DECODE = "decode"  # claims published prompts and goes on
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class NodeSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the node is and how it is reached.

    name: for people, in logs, tickets and metrics; role@host:port where it is empty.
    device: what computes and holds the Device tier: "cpu", "cuda", or "cuda:1" for the second GPU.
    port: 0 takes a free one.
    drain_grace_s: how long running requests may go on after SIGTERM.
    allow_insecure_bind: listen on other than loopback addresses although nobody is asked who they
        are; for a private network.
    unix_socket: path of a socket to listen on as well; "" for none.
    listens_tcp: False listens on the Unix socket only.
    max_body_bytes: a longer request body is refused; counted after decompression.
    max_connections: one more is answered with 503 and closed.
    idle_timeout_s: a connection that brings no complete request head for so long is closed.
    body_timeout_s: how long a request's body may take to arrive.
    send_timeout_s: a client that takes nothing of its answer for so long is cut off.
    """

    role: Role = Role.BOTH
    name: str = ""
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: int = 8100
    drain_grace_s: float = 20.0
    allow_insecure_bind: bool = False
    unix_socket: str = ""
    listens_tcp: bool = True
    max_body_bytes: int = 16 << 20
    max_connections: int = 16_384
    idle_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"node.port must be in 0..{_MAX_PORT}, not {self.port}")
        if not self.host:
            raise ConfigError("node.host is empty: name an address, such as 127.0.0.1")
        if self.max_body_bytes < 1:
            raise ConfigError("node.max_body_bytes must be at least 1")
        if self.max_connections < 1:
            raise ConfigError("node.max_connections must be at least 1")
        if not (self.listens_tcp or self.unix_socket):
            raise ConfigError("without node.listens_tcp, node.unix_socket must name a path")
        if not (math.isfinite(self.drain_grace_s) and self.drain_grace_s >= 0):
            raise ConfigError("node.drain_grace_s must be a number that is not negative")
        for name in ("idle_timeout_s", "body_timeout_s", "send_timeout_s"):
            _check_above_zero(f"node.{name}", getattr(self, name))


class AuthSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """file: who may call, as `tierkv token` writes it; "" asks nobody who they are.
    reload_s: how often is looked whether it has changed."""

    file: str = ""
    reload_s: float = 1.0

    def __post_init__(self) -> None:
        _check_above_zero("auth.reload_s", self.reload_s)


class TlsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths of PEM files. cert: the node's own, with its chain; "" serves without TLS.

    key: of cert, where it is not in the same file. client_ca: every client must bring a
    certificate that one of these signed; "" asks for none. reload_s: how often is looked whether a
    file has changed. The Unix socket is without TLS always.
    """

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    reload_s: float = 10.0

    def __post_init__(self) -> None:
        _check_above_zero("tls.reload_s", self.reload_s)
        if (self.key or self.client_ca) and not self.cert:
            raise ConfigError("tls.key and tls.client_ca are of no use without tls.cert")


def _check_above_zero(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a number above 0")


StorageSection = StorageSettings


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The config file of `tierkv serve`: each field is a table in it."""

    node: NodeSection = NodeSection()
    auth: AuthSection = AuthSection()
    tls: TlsSection = TlsSection()
    cache: CacheSettings = CacheSettings()
    handoff: HandoffSettings = HandoffSettings()
    storage: StorageSection = StorageSection()
    model: ModelConfig = ModelConfig()
    engine: EngineSettings = EngineSettings()

    def __post_init__(self) -> None:
        if self.tls.client_ca and not self.auth.file:
            raise ConfigError(
                "tls.client_ca says whose certificates are asked for, and auth.file must say which "
                "of them may do what"
            )


def default_storage_url(environ: Mapping[str, str]) -> str:
    """$XDG_CACHE_HOME/tierkv/store, by default below ~/.cache. ConfigError without a home."""
    base = environ.get("XDG_CACHE_HOME", "")
    try:
        directory = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError("there is no home directory to keep files in: give --storage") from error
    return (directory / "tierkv" / "store").as_uri()
