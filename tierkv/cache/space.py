"""One fingerprint's share of an index: tenants and adapters never meet in one tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tierkv.errors import ConfigError

DEFAULT: Final = ""  # the space of an index with a single fingerprint
Quota = tuple[int | None, int | None]  # the most device and host blocks, None for any


@dataclass(slots=True, eq=False)
class Space:
    """name: the fingerprint's short form, "" for the service's own.
    root_digest: the parent of every first block's key.
    used: copies per tier, incoming ones included. quota: the most there may be, None for any.
    """

    name: str
    root_digest: bytes
    used: list[int] = field(default_factory=lambda: [0, 0])
    quota: Quota = (None, None)

    def __post_init__(self) -> None:
        check_quota(self.quota)

    @property
    def has_quota(self) -> bool:
        return self.quota != (None, None)


def check_quota(quota: Quota) -> None:
    if any(most is not None and most < 0 for most in quota):
        raise ConfigError("a quota is a number of blocks, at least 0")
