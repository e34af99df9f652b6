"""Groups of an engine's blocks: layers whose blocks have one layout, one size and one rule of which
of them are needed.

    full attention     every block before a length, the last one perhaps in part
    sliding window     only the blocks that hold the last tokens before a length
    state              one block, the state at exactly that length, which is a multiple of the
                       block size, or the end of the prompt that was saved
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tierkv.cache.layout import Layout
from tierkv.errors import ConfigError

NO_BLOCK: Final = -1  # in a list of an engine's blocks: it has none at this place


class GroupKind(Enum):
    FULL = "full attention"
    WINDOW = "sliding window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group of an engine's layers.

    layout: of its blocks, block size included: of a state, how many tokens lie between two of them.
    window: so many tokens before a length are needed; of a sliding window only.
    share: of the host memory, None for a part by bytes per token, so that every group holds as
        many tokens and none alone limits what is found.
    """

    layout: Layout
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.WINDOW) != (self.window > 0):
            raise ConfigError("a sliding window has 1 token or more, and no other group has one")
        if self.share is not None and not 0 < self.share < 1:
            raise ConfigError("a group's share of host memory is between 0 and 1")

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def needed(self, num_tokens: int, have_tokens: int = 0) -> range:
        """The positions of the blocks without which the first `num_tokens` tokens are of no use
        to an engine that has the first `have_tokens` of them."""
        size = self.layout.block_size
        stop = -(-num_tokens // size)
        if num_tokens <= have_tokens:
            return range(stop, stop)
        if self.kind is GroupKind.STATE:
            return range(stop - 1, stop)
        first = have_tokens // size
        if self.kind is GroupKind.WINDOW:
            first = max(first, (num_tokens - self.window) // size)
        return range(first, stop)


def as_groups(groups: Sequence[CacheGroup | Layout]) -> tuple[CacheGroup, ...]:
    """A layout alone is a group of full attention."""
    if not groups:
        raise ConfigError("an engine's blocks have one group or more")
    return tuple(CacheGroup(one) if isinstance(one, Layout) else one for one in groups)


def main_group(groups: Sequence[CacheGroup]) -> int:
    """Which of them the fingerprint's layout and a prompt's block size are of: the first of full
    attention, or the first if there is none."""
    kinds = [group.kind for group in groups]
    return kinds.index(GroupKind.FULL) if GroupKind.FULL in kinds else 0
