"""What must be equal for two nodes to share bytes, in a form that says where they differ."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tierkv.cache.layout import Layout
from tierkv.errors import ConfigError

KEY_FORMAT = 1


@dataclass(frozen=True)
class Fingerprint:
    """Identity of the producer of KV bytes. Anything that would make bytes unusable is a field.

    model, revision: which weights. weight_dtype: as loaded ("bfloat16").
    layout: planes and block size of one shard.
    adapter: LoRA name and revision, "" without. tenant: salt that keeps tenants apart, "" shared.
    """

    model: str
    layout: Layout
    revision: str = ""
    weight_dtype: str = "float32"
    adapter: str = ""
    tenant: str = ""
    key_format: int = KEY_FORMAT

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("a fingerprint needs the model's name")

    def readable(self) -> dict[str, str]:
        """Field by field, for logs, tickets and `differences`; the tenant salt stays a digest."""
        return {
            "key_format": str(self.key_format),
            "model": self.model,
            "revision": self.revision,
            "weight_dtype": self.weight_dtype,
            "block_size": str(self.layout.block_size),
            "layout": f"{len(self.layout.planes)} planes of {self.layout.num_layers} layers, "
            f"{self.layout.block_bytes} bytes, {self.layout.digest.hex()[:16]}",
            "adapter": self.adapter,
            "tenant": hashlib.sha256(self.tenant.encode()).hexdigest()[:16] if self.tenant else "",
        }

    def root(self) -> bytes:
        """32 bytes: the parent of every first block. Every field is tagged and length-prefixed."""
        h = hashlib.sha256(b"tierkv root v1\0".ljust(32, b"\0"))
        exact = self.readable() | {"tenant": self.tenant, "layout": self.layout.digest.hex()}
        for name, value in sorted(exact.items()):
            for text in (name.encode(), value.encode()):
                h.update(len(text).to_bytes(8, "little"))
                h.update(text)
        return h.digest()

    @property
    def short(self) -> str:
        """16 hex digits that name this fingerprint in stored names."""
        return self.root().hex()[:16]


def differences(ours: dict[str, str], theirs: dict[str, str]) -> tuple[str, ...]:
    """The fields in which two readable fingerprints differ, as "field (ours, theirs)"."""
    return tuple(
        f"{field} (here {ours.get(field, 'absent')!r}, there {theirs.get(field, 'absent')!r})"
        for field in sorted(ours.keys() | theirs.keys())
        if ours.get(field) != theirs.get(field)
    )
