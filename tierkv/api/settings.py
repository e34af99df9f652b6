"""All settings of a node, one section for each part that has some."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import msgspec

from tierkv.api.listen_settings import ListenSection
from tierkv.config import all_above_zero
from tierkv.errors import ConfigError
from tierkv.pd.settings import HandoffSettings
from tierkv.refmodel.config import ModelConfig
from tierkv.refmodel.engine import EngineSettings
from tierkv.sched.settings import CacheSettings
from tierkv.storage.settings import StorageSettings

NO_STORAGE = "none"


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


class NodeSection(ListenSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the node is and how it is reached.

    name: for people, in logs, tickets and metrics; role@host:port where it is empty.
    device: what computes and holds the Device tier: "cpu", "cuda", or "cuda:1" for the second GPU.
    close_limit_s: how long all else may take after the drain. A store or a device that does not
        leave the node's memory by then, such as a disk that hangs, is left behind: exit status 1.
    unix_socket: path of a socket to listen on as well; "" for none.
    listens_tcp: False listens on the Unix socket only.
    """

    role: Role = Role.BOTH
    name: str = ""
    device: str = "cpu"
    port: int = 8100
    drain_grace_s: float = 20.0
    close_limit_s: float = 60.0
    unix_socket: str = ""
    listens_tcp: bool = True

    def __post_init__(self) -> None:
        self.check("node")
        if not (self.listens_tcp or self.unix_socket):
            raise ConfigError("without node.listens_tcp, node.unix_socket must name a path")
        all_above_zero("node", self, "close_limit_s")
        if not self.name.isprintable():
            raise ConfigError("node.name must be printable, on one line")


class AuthSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """file: who may call, as `tierkv token` writes it; "" asks nobody who they are.
    reload_s: how often is looked whether it has changed."""

    file: str = ""
    reload_s: float = 1.0

    def __post_init__(self) -> None:
        all_above_zero("auth", self, "reload_s")


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
        all_above_zero("tls", self, "reload_s")
        if (self.key or self.client_ca) and not self.cert:
            raise ConfigError("tls.key and tls.client_ca are of no use without tls.cert")


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The config file of `tierkv serve`: each field is a table in it."""

    node: NodeSection = NodeSection()
    auth: AuthSection = AuthSection()
    tls: TlsSection = TlsSection()
    cache: CacheSettings = CacheSettings()
    handoff: HandoffSettings = HandoffSettings()
    storage: StorageSettings = StorageSettings()
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
