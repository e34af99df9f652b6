"""All settings of a node, one section per table of the config file, and their masked form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from tierkv.config import all_above_zero, none_negative
from tierkv.engine import EngineSpec
from tierkv.engines import EngineTables, engine_of
from tierkv.errors import ConfigError
from tierkv.http.settings import AuthSection, ListenSection, TlsSection
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service.kv_events import EventsSection
from tierkv.storage.factory import StorageSettings

NO_STORAGE = "none"


class Role(Enum):
    """The phase of a request that a node computes: prefill, decode or both.

    A node of any role also answers /v1/generate, for which it computes both phases.
    """

    PREFILL = "prefill"  # computes prompts and publishes them
    DECODE = "decode"  # claims published prompts and generates the tokens after them
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class NodeSection(ListenSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node and its addresses.

    Attributes:
        role: the phase of a request that the node computes: prefill, decode or both.
        name: a name for people, in logs, tickets and metrics; "" for role@host:port.
        engine: name of the engine that computes: reference or transformers. Ignored if
            engine_socket is set.
        model: the model that the engine serves: a directory with config.json and weights, or a GGUF
            file; "" for the small model that is built in.
        device: the device that computes and has the device tier: "cpu", "cuda", or "cuda:1" for the
            second GPU.
        close_limit_s: seconds that the node may take to close after its running requests have
            ended. Then the process ends with exit status 1, even if a store or a device that hangs
            still uses the node's memory.
        session_ttl_s: seconds for which the blocks of a session's last turn are evicted only after
            all other blocks; 0 to evict them like all other blocks.
        unix_socket: path of a Unix socket to listen on besides TCP; "" for none.
        listens_tcp: false to listen on the Unix socket only.
        engine_socket: path of the Unix socket to which engines in other processes connect; "" for
            none. The node then keeps the KV of these engines, and has no engine of its own. The
            socket's directory should be private. cache.host_blocks then counts blocks of the
            engines, each with the KV of all layers.
    """

    role: Role = Role.BOTH
    name: str = ""
    engine: str = "reference"
    model: str = ""
    device: str = "cpu"
    port: int = 8100
    drain_grace_s: float = 20.0
    close_limit_s: float = 60.0
    session_ttl_s: float = 300.0
    unix_socket: str = ""
    listens_tcp: bool = True
    engine_socket: str = ""

    @property
    def model_name(self) -> str:
        """The name of the model's directory or file; "" if `model` is not set."""
        if not self.model:
            return ""
        path = Path(self.model).expanduser()
        return path.stem if path.suffix == ".gguf" else path.resolve().name

    def __post_init__(self) -> None:
        self.check("node")
        if not (self.listens_tcp or self.unix_socket):
            raise ConfigError(
                "node.listens_tcp is false, which needs node.unix_socket: set it to a path"
            )
        all_above_zero("node", self, "close_limit_s")
        none_negative("node", self, "session_ttl_s")
        if not self.name.isprintable():
            raise ConfigError(
                f"node.name must be one line of printable characters, not {self.name[:80]!r}"
            )


class NodeSettings(EngineTables, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The config file of `tierkv serve`: each field is a table in it."""

    node: NodeSection = NodeSection()
    auth: AuthSection = AuthSection()
    tls: TlsSection = TlsSection()
    cache: CacheSettings = CacheSettings()
    handoff: HandoffSettings = HandoffSettings()
    storage: StorageSettings = StorageSettings()
    events: EventsSection = EventsSection()

    def engine_spec(self) -> EngineSpec:
        """Return the description of the engine that the setting `node.engine` names.

        Raises:
            ConfigError: There is no such engine, or its settings contradict each other.
        """
        node = self.node
        return engine_of(node.engine, self, self.cache, model=node.model, device=node.device)

    def __post_init__(self) -> None:
        if self.tls.client_ca and not self.auth.file:
            raise ConfigError(
                "tls.client_ca makes clients present certificates, but auth.file is "
                "not set: set it to a file that gives each certificate a role"
            )
        if not (self.events.is_local or self.node.allow_insecure_bind):
            raise ConfigError(
                f"events.endpoint {self.events.endpoint} can be reached from other "
                "machines, and its subscribers are not authenticated: use an address "
                "of this machine, or --insecure on a private network"
            )


def default_storage_url(environ: Mapping[str, str]) -> str:
    """Return the URL of the default file store, in $XDG_CACHE_HOME/tierkv/store or below ~/.cache.

    Raises:
        ConfigError: The user has no home directory.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    try:
        directory = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError(
            "the default store needs a home directory, and this user has none: give --storage"
        ) from error
    return (directory / "tierkv" / "store").as_uri()


MASK = "***"
_SECRETS = re.compile(r"(^|_)(password|secret|token|key|salt|tenant)$")
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*@")  # the user as well: some stores expect a token there
_QUERY = re.compile(r"(?<=[?&])([^=&#]+)=[^&#]*")


def masked(settings: msgspec.Struct) -> dict[str, dict[str, Any]]:
    """Return all settings as a dict of config tables, with passwords and other secrets masked."""
    plain: dict[str, dict[str, Any]] = msgspec.to_builtins(settings)
    return {table: _masked(fields) for table, fields in plain.items()}


def masked_url(url: str) -> str:
    """Return `url` without user, password and the values of its query parameters."""
    return _QUERY.sub(rf"\1={MASK}", _PASSWORD.sub(f"{MASK}@", url))


def _masked(value: Any) -> Any:  # noqa: ANN401 - plain data of any shape
    if isinstance(value, dict):
        return {name: _masked_field(name, part) for name, part in value.items()}
    if isinstance(value, list):
        return [_masked(part) for part in value]
    return masked_url(value) if isinstance(value, str) else value


def _masked_field(name: str, value: Any) -> Any:  # noqa: ANN401 - plain data of any shape
    is_secret = isinstance(value, str) and value and _SECRETS.search(name)
    return MASK if is_secret else _masked(value)
