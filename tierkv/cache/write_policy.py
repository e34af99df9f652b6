"""When a copy is written to the tier below."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tierkv.errors import ConfigError


class WritePolicy(Enum):
    NONE = "none"  # never
    WRITE_THROUGH = "write_through"  # as soon as the block is whole
    SELECTIVE = "write_through_selective"  # once it has been matched `after_hits` times
    WRITE_BACK = "write_back"  # when it is evicted; its slot is reused only after the copy is done


@dataclass(frozen=True, slots=True)
class WriteRule:
    policy: WritePolicy
    after_hits: int = 2

    def __post_init__(self) -> None:
        if self.after_hits < 1:
            raise ConfigError(f"after_hits must be at least 1, not {self.after_hits}")

    def writes_now(self, hits: int) -> bool:
        """Whether a block that has been matched `hits` times should be copied down by now."""
        if self.policy is WritePolicy.SELECTIVE:
            return hits >= self.after_hits
        return self.policy is WritePolicy.WRITE_THROUGH

    @property
    def writes_early(self) -> bool:
        """Whether some blocks are copied down before they are evicted."""
        return self.policy in (WritePolicy.WRITE_THROUGH, WritePolicy.SELECTIVE)

    @property
    def writes_on_eviction(self) -> bool:
        return self.policy is WritePolicy.WRITE_BACK
