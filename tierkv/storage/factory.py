"""The settings of the storage tier, and functions that return the store for a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from tierkv.clock import Clock
from tierkv.config import Fixed, from_mapping
from tierkv.errors import ConfigError
from tierkv.storage.codec import SmallCodec, TenantCodecs, Trust, parse_key, read_key
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.layered import LayeredSettings, LayeredStore, OpensLater
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.mooncake.client import MooncakeSettings
from tierkv.storage.mooncake.store import MooncakeStore
from tierkv.storage.protocol import Store
from tierkv.storage.redis.url import REDIS_SCHEMES, RedisSettings, parse_redis_url

# In this group of entry points, packages register a StoreKind under the scheme of its URLs.
ENTRY_POINTS = "tierkv.stores"

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class StoreKind(Generic[Settings]):
    """A kind of store that an installed package provides.

    Attributes:
        settings: dataclass of the settings, each with a default. Users set them in the table
            `storage.stores.SCHEME`.
        open: returns a store for a URL, settings and a clock; raises ConfigError for a wrong URL.
    """

    settings: type[Settings]
    open: Callable[[str, Settings, Clock], Store]

    def settings_from(self, table: Mapping[str, object], scheme: str) -> Settings:
        """Return the settings of a store.

        Args:
            table: settings by name, from a file or the environment; missing ones get their default.
            scheme: scheme of the store's URL, for errors.

        Raises:
            ConfigError: a key is unknown, or a value has a wrong type.
        """
        where = f"[storage.stores.{scheme}]"
        return from_mapping(self.settings, table, where, converts_text=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The settings of every kind of store; only those of the opened store take effect.

    Attributes:
        stores: tables of settings for stores of installed packages, by the scheme of their URLs.
    """

    memory: MemorySettings = field(default_factory=MemorySettings)
    file: FileSettings = field(default_factory=FileSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    mooncake: MooncakeSettings = field(default_factory=MooncakeSettings)
    layered: LayeredSettings = field(default_factory=LayeredSettings)
    resilience: ResilienceSettings = field(default_factory=ResilienceSettings)
    stores: dict[str, dict[str, Any]] = field(default_factory=dict)


def _memory(url: str, settings: StoreSettings, clock: Clock) -> Store:
    if url != "memory://":
        raise ConfigError(f"a store in memory has no address: use memory://, not {url[:80]!r}")
    return MemoryStore(settings.memory, clock)


def _file(url: str, settings: StoreSettings, clock: Clock) -> Store:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{url[:200]!r} has a part after its path; accepted: {_FILE}, with % as "
            "%25, ? as %3F and # as %23; settings such as storage.file.capacity_bytes "
            "belong in the config file"
        )
    if parts.netloc or not path or "\0" in path:
        raise ConfigError(f"{url[:200]!r} names no directory of this machine; accepted: {_FILE}")
    return FileStore(Path(path), settings.file, clock)


def _redis(url: str, settings: StoreSettings, clock: Clock) -> Store:
    # Importing the client takes 20 MiB and 0.3 s, so nodes with another store do not import it.
    from tierkv.storage.redis.store import RedisStore  # noqa: PLC0415

    return RedisStore(parse_redis_url(url), settings.redis, clock)


def _mooncake(url: str, settings: StoreSettings, clock: Clock) -> Store:  # noqa: ARG001
    return MooncakeStore(url, settings.mooncake)


def _layered(url: str, settings: StoreSettings, clock: Clock) -> Store:
    urls = urls_in(url)
    if len(urls) != 2:  # noqa: PLR2004 - near and far
        raise ConfigError(f"a layered store needs two URLs; accepted: {_LAYERED}")
    near, far = [open_store(one, settings, clock) for one in urls]
    resilience = settings.resilience
    # NEAR is asked before FAR. If NEAR did not answer, it would use up all of the time, so it has
    # half of the time and its own breaker. Until NEAR can be opened, only FAR is used.
    part = replace(resilience, timeout_s=resilience.timeout_s / 2)
    return LayeredStore(GuardedStore(OpensLater(near), part, clock), far, settings.layered)


_LAYERED = "layered:NEAR-URL|FAR-URL"
_FILE = "file:///absolute/directory or file:relative/directory"
_ACCEPTED = (
    "memory://, file://, redis:// (or rediss, unix, redis+sentinel, redis+cluster), mooncake://, "
    "layered:"
)
_STORES: dict[str, Callable[[str, StoreSettings, Clock], Store]] = {
    "memory": _memory,
    "file": _file,
    **dict.fromkeys(REDIS_SCHEMES, _redis),
    "mooncake": _mooncake,
    "layered": _layered,
}


def open_store(url: str, settings: StoreSettings, clock: Clock) -> Store:
    """Return the store that `url` names. Entering its `running()` opens it.

    Args:
        url: URL of the store.
        settings: the settings of all kinds of stores.
        clock: the clock for times to live.

    Raises:
        ConfigError: the URL names no store; the message lists accepted URLs.
    """
    scheme, separator, _ = url.partition(":")
    opens = _STORES.get(scheme) if separator else None
    if opens is None and separator and (kind := _installed_kind(scheme)) is not None:
        return kind.open(url, kind.settings_from(settings.stores.get(scheme, {}), scheme), clock)
    if opens is None:
        if url[:1] in {"/", "."}:
            raise ConfigError(f"{url[:200]!r} is not a storage URL; accepted: {_FILE}")
        # The URL is not quoted, because it may contain a password after the misspelt scheme.
        raise ConfigError(
            f"the storage URL starts with {scheme[:20]!r}; accepted: {_ACCEPTED}, and the schemes "
            "of installed packages with a store (entry points of the group tierkv.stores)"
        )
    return opens(url, settings, clock)


def _installed_kind(scheme: str) -> StoreKind[Any] | None:
    from importlib.metadata import entry_points  # noqa: PLC0415 - 2 MiB that few nodes need

    entry = next(iter(entry_points(group=ENTRY_POINTS, name=scheme)), None)
    if entry is None:
        return None
    what = f"the store for {entry.name}: URLs, {entry.value},"
    try:
        kind = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} cannot be imported: {error}") from error
    if not isinstance(kind, StoreKind):
        raise ConfigError(f"{what} is not a tierkv.storage.factory.StoreKind: upgrade its package")
    return kind


def urls_in(url: str) -> Sequence[str]:
    """Return the URLs of the stores that a layered store consists of; [url] for other stores."""
    scheme, _, rest = url.partition(":")
    return rest.split("|") if scheme == "layered" else [url]


def open_guarded_store(url: str, settings: StoreSettings, clock: Clock) -> GuardedStore:
    """Return the store that `url` names, with deadlines and a breaker around it (`GuardedStore`).

    Entering its `running()` opens it.

    Args:
        url: URL of the store.
        settings: the settings of all kinds of stores.
        clock: the clock for times to live and deadlines.

    Raises:
        ConfigError: the URL names no store.
    """
    part, num_parts = settings.resilience, len(urls_in(url))
    resilience = replace(
        part,
        # If the writes of one store hang, they occupy `write_batches` batches; each of the other
        # stores needs as many for itself.
        write_batches=part.write_batches * num_parts,
        # The stores are used one after the other. Each has the whole time for a write, for which no
        # request waits, and for the bytes of a read.
        write_timeout_s=part.write_timeout_s * num_parts,
        slowest_bytes_per_s=part.slowest_bytes_per_s / num_parts,
    )
    return GuardedStore(open_store(url, settings, clock), resilience, clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings(StoreSettings):
    """The settings of the storage tier.

    Attributes:
        url: URL of the storage tier: file:///directory, redis://host:port/0, memory://,
            mooncake://..., layered:NEAR|FAR, or none. If empty, files in the user's cache
            directory, which the nodes of one machine share.
        trust: protection of stored values against other writers: trusted detects accidental damage,
            signed also detects forged values, and sealed also encrypts values. All nodes that share
            a store need the same.
        key_file: file with the key for signed and sealed, 64 hex digits. All nodes that share a
            store need the same key.
        key: the key itself, instead of key_file; meant for TIERKV_STORAGE__KEY.
        touches_per_ttl: largest number of times that the time to live of a used block is renewed
            within one time to live. With 0 a block expires even if it is used.
        tenants: URLs of separate stores of some tenants, by short fingerprint, which is the second
            field in the names of a tenant's values.
        peer_tensor_parallel: tensor-parallel sizes of other nodes. Their blocks are used if there
            are none of this node's own size.
        stores: a table of settings for each store that another package provides, by the scheme of
            its URLs: [storage.stores.s3].
    """

    url: str = ""
    trust: Trust = Trust.TRUSTED
    key_file: str = ""
    key: str = field(default="", repr=False)
    touches_per_ttl: Fixed[int] = 10
    tenants: dict[str, str] = field(default_factory=dict)
    peer_tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        for scheme, table in self.stores.items():
            if (kind := _installed_kind(scheme)) is None:
                raise ConfigError(
                    f"[storage.stores.{scheme}] has settings, but no installed package provides a "
                    f"store for {scheme}: URLs: install it, or remove the table"
                )
            kind.settings_from(table, scheme)
        if self.key and self.key_file:
            raise ConfigError("storage.key and storage.key_file are both set: remove one")
        if self.trust is Trust.TRUSTED and (self.key or self.key_file):
            raise ConfigError(
                "storage has a key, but storage.trust is trusted, which uses none: set "
                "storage.trust, or remove the key"
            )
        if self.trust is not Trust.TRUSTED and not (self.key or self.key_file):
            raise ConfigError(
                f"storage.trust is {self.trust.value}, which needs a key: set storage.key_file"
            )
        if self.touches_per_ttl < 0:
            raise ConfigError(
                f"storage.touches_per_ttl must be at least 0, not {self.touches_per_ttl}"
            )
        if any(size < 1 for size in self.peer_tensor_parallel):
            raise ConfigError(
                "storage.peer_tensor_parallel must hold sizes of at least 1, not "
                f"{list(self.peer_tensor_parallel)}"
            )

    def codecs(self) -> TenantCodecs:
        """Read the secret key, if one is set, and return the codecs for stored blocks.

        Raises:
            ConfigError: the key cannot be read or used.
        """
        return TenantCodecs(self.trust, self._read_key())

    def small_codec(self) -> SmallCodec:
        """Read the key, and return the codec for tickets and other small values.

        Raises:
            ConfigError: the key cannot be read or used.
        """
        return SmallCodec(self.trust, self._read_key())

    def _read_key(self) -> bytes | None:
        if self.key_file:
            return read_key(self.key_file)
        return parse_key(self.key) if self.key else None
