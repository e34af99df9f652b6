"""The storage tier's settings: where it is, how far it is trusted, and each kind's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.storage.codec_keyed import TenantCodecs, Trust, parse_key
from tierkv.storage.codec_small import SmallCodec
from tierkv.storage.factory import StoreSettings
from tierkv.storage.file import FileSettings
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.layered import LayeredSettings
from tierkv.storage.memory import MemorySettings
from tierkv.storage.mooncake.client import MooncakeSettings
from tierkv.storage.redis.url import RedisSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """url: where the storage tier is: file:///directory, redis://host:port/0, memory://,
        mooncake://..., layered:NEAR|FAR, or none. Where it is empty, files in the
        user's cache directory, which nodes of one machine share.
    trust: of whoever else can write to the store: trusted (values are checked for accidents),
        signed (and for forgeries), sealed (and nobody without the key can read them). All nodes
        that share have the same.
    key_file, key: 64 hex digits, the same on all these nodes; the file holds them, or the setting
        does, which is meant for TIERKV_STORAGE__KEY. Needed unless trusted.
    touches_per_ttl: a stored block that is used lives for its whole TTL again, which the store is
        told at most so often in each TTL. 0: it ends when it was going to.
    tenants: a store of its own for some tenants: URL by the short fingerprint.
    peer_tensor_parallel: tensor-parallel sizes of other nodes whose blocks are looked for where
        there is none of this node's own size.
    """

    url: str = ""
    trust: Trust = Trust.TRUSTED
    key_file: str = ""
    key: str = field(default="", repr=False)
    touches_per_ttl: int = 10
    tenants: dict[str, str] = field(default_factory=dict)
    peer_tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    file: FileSettings = field(default_factory=FileSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    mooncake: MooncakeSettings = field(default_factory=MooncakeSettings)
    layered: LayeredSettings = field(default_factory=LayeredSettings)
    resilience: ResilienceSettings = field(default_factory=ResilienceSettings)

    def __post_init__(self) -> None:
        if self.key and self.key_file:
            raise ConfigError("storage.key and storage.key_file are both set: give one")
        if self.trust is Trust.TRUSTED and (self.key or self.key_file):
            raise ConfigError("storage has a key but is trusted: set storage.trust to use it")
        if self.trust is not Trust.TRUSTED and not (self.key or self.key_file):
            raise ConfigError(f"storage.trust is {self.trust.value}: give it storage.key_file")
        if self.touches_per_ttl < 0:
            raise ConfigError("storage.touches_per_ttl must not be negative")
        if any(size < 1 for size in self.peer_tensor_parallel):
            raise ConfigError("storage.peer_tensor_parallel holds sizes of 1 and more")

    def of_kinds(self) -> StoreSettings:
        return StoreSettings(
            memory=self.memory,
            file=self.file,
            redis=self.redis,
            mooncake=self.mooncake,
            layered=self.layered,
            resilience=self.resilience,
        )

    def codecs(self) -> TenantCodecs:
        """For blocks. Reads the key. Raises ConfigError if it cannot be read or used."""
        return TenantCodecs(self.trust, self._read_key())

    def small_codec(self) -> SmallCodec:
        """For tickets and the like. Reads the key. Raises ConfigError as `codecs` does."""
        return SmallCodec(self.trust, self._read_key())

    def _read_key(self) -> bytes | None:
        text = self.key
        if self.key_file:
            try:
                text = Path(self.key_file).read_text(encoding="ascii")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the key file {self.key_file} cannot be read") from error
        return parse_key(text) if text else None
