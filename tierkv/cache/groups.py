"""Cache groups: an engine's layers, grouped by layout and by the blocks that they need.

All layers of a cache group have the same layout and block size, and need the same blocks of a
prefix of a prompt:

    full attention     every block of the prefix; the last one may be partial
    sliding window     only the blocks with the last tokens of the prefix
    recurrent state    one block, with the state after the last token of the prefix

With a recurrent state, a prefix can end only at a multiple of the block size or at the end of a
saved prompt.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from tierkv.cache.keys import TOKEN_BYTES, StoredKey, common_tokens
from tierkv.cache.layout import Layout
from tierkv.cache.node import BlockPool
from tierkv.errors import ConfigError

NO_BLOCK: Final = -1  # in a list of an engine's blocks, for a position without a block


class GroupKind(Enum):
    """The kind of a cache group, which decides which blocks are needed to continue a prompt.

    FULL needs all blocks of the prompt so far, WINDOW those of the last tokens, and STATE the
    recurrent state after the last token.

    Attributes:
        value: text in the description of the cache group, which is part of an engine's fingerprint
            unless its only cache group is FULL. If the text is changed, such engines no longer find
            the blocks that they have stored.
    """

    FULL = "full attention"
    WINDOW = "sliding window"
    STATE = "state"


class TokensAt(Protocol):
    """The number of cached leading tokens of each block of a prompt, by the block's position."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of an engine with the same layout, which need the same blocks of a prompt.

    Attributes:
        layout: layout of a block. For a recurrent layer, a block is one saved state, and the block
            size is the number of tokens between two saved states.
        kind: decides which blocks are needed: all blocks of the prompt so far (full attention),
            those of the last tokens (sliding window), or the last recurrent state.
        window: number of last tokens that a sliding window needs; 0 for other kinds.
        share: fraction of the host memory for this group, between 0 and 1. Groups with None divide
            the remaining memory, so that each has room for the same number of tokens.

    Raises:
        ConfigError: a sliding window has no `window`, another kind has one, or `share` is out of
            range.
    """

    layout: Layout
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.WINDOW) != (self.window > 0):
            raise ConfigError(
                "a group of sliding-window attention needs a window of at least 1 token, "
                "and other groups must have none"
            )
        if self.share is not None and not 0 < self.share < 1:
            raise ConfigError(
                f"a group's share of host memory must be between 0 and 1, not {self.share}"
            )

    def __str__(self) -> str:
        of = f" of {self.window} tokens" if self.window else ""
        digest = self.layout.digest.hex()[:16]
        return f"{self.kind.value}{of}, blocks of {self.layout.block_size}, {digest}"

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def needed(self, num_tokens: int, have_tokens: int = 0) -> range:
        """Return the positions of the blocks that an engine needs to reuse a prefix of a prompt.

        Full attention needs all blocks of the prefix, a sliding window those within the window, and
        recurrent state only the last block.

        Args:
            num_tokens: number of tokens of the prefix.
            have_tokens: number of leading tokens that the engine has already; the blocks that only
                these tokens fill are left out.
        """
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

    @property
    def has_prefixes(self) -> bool:
        """True if a block can be reused for a prompt that shares only the block's first tokens."""
        return self.kind is not GroupKind.STATE and self.layout.has_prefixes

    def longest(self, limit: int, valid: TokensAt) -> int:
        """Return the length in tokens of the longest prefix that this cache group can reuse.

        A prefix can be reused if the blocks that the group needs for it are cached: all of them,
        those in the sliding window, or the last recurrent state.

        Args:
            limit: largest length, in tokens.
            valid: for each block position, the number of the block's first tokens that are cached;
                0 for none. For recurrent states, the number of tokens between the block's start and
                its saved state.
        """
        size = self.layout.block_size
        length = min(limit, len(valid) * size)
        while length > 0:
            needed = self.needed(length)
            # From the last block to the first, except for full attention, which needs every block.
            is_full = self.kind is GroupKind.FULL
            for at in needed if is_full else reversed(needed):
                have, wanted = valid[at], min(length - at * size, size)
                if have < wanted if self.has_prefixes else have != wanted:
                    length = at * size + (have if have < wanted else 0)
                    break
            else:
                return length
        return 0


def longest_of_all(groups: Sequence[tuple[CacheGroup, TokensAt]], limit: int) -> int:
    """Return the number of tokens of the longest prefix for which all groups have their blocks.

    Args:
        groups: each cache group, together with a sequence that has one number for each block of the
            prompt: how many of the block's first tokens are cached for this group, 0 for none.
        limit: largest result, in tokens.
    """
    length, before = limit, -1
    while length != before:
        before = length
        for group, valid in groups:
            length = group.longest(length, valid)
    return length


def as_groups(groups: Sequence[CacheGroup | Layout]) -> tuple[CacheGroup, ...]:
    """Return cache groups; a layout in `groups` becomes a group of full attention.

    Args:
        groups: cache groups or layouts, at least one.

    Returns:
        The cache groups, in the same order.

    Raises:
        ConfigError: `groups` is empty.
    """
    if not groups:
        raise ConfigError("an engine needs at least one group of layers")
    return tuple(CacheGroup(one) if isinstance(one, Layout) else one for one in groups)


def main_group(groups: Sequence[CacheGroup]) -> int:
    """Return the index, in `groups`, of the cache group with its blocks in the radix tree.

    This is the first group of full attention; the first group if none has full attention.
    """
    kinds = [group.kind for group in groups]
    return kinds.index(GroupKind.FULL) if GroupKind.FULL in kinds else 0


def slots_of(groups: Sequence[CacheGroup], num_bytes: int) -> list[int]:
    """Divide host memory into slots for each cache group.

    A group with a `share` gets that share; the other groups divide the rest in proportion to their
    bytes per token.

    Args:
        groups: the engine's cache groups.
        num_bytes: bytes of host memory for all groups together.

    Returns:
        The number of slots of each group.

    Raises:
        ConfigError: the shares add up to more than 1, or to 1 although a group has no share.
    """
    said = sum(group.share or 0.0 for group in groups)
    others = [group for group in groups if group.share is None]
    if said > 1 or (others and said >= 1):
        raise ConfigError(
            f"the groups' shares of host memory add up to {said:g}, which leaves nothing "
            "for the other groups"
        )
    per_token = sum(group.layout.block_bytes / group.block_size for group in others)
    slots = []
    for group in groups:
        block_bytes = group.layout.block_bytes
        share = group.share
        if share is None:
            share = (1 - said) * (block_bytes / group.block_size) / per_token
        # Exact integers for a single group, without rounding.
        slots.append(
            num_bytes // block_bytes if share == 1 else int(num_bytes * share) // block_bytes
        )
    return slots


@dataclass(slots=True, eq=False)
class FlatBlock:
    """A cached block on the host that is not in the radix tree, of one cache group.

    Attributes:
        key: key of the block.
        parent: key of the block before it, or the root.
        tokens: packed tokens of the block.
        extra: extra keys (identity of media) of the block; b"" for none.
        position: index of the block in its prompt.
        slot: the host slot with the block's bytes.
        holders: number of `hold` calls that `release` has not ended. Above 0, the block is not
            evicted.
        hits: number of lookups that found the block.
        is_stored: True if the block was passed to storage.
    """

    key: StoredKey
    parent: bytes
    tokens: bytes
    extra: bytes
    position: int
    slot: int
    holders: int = 0
    hits: int = 0
    is_stored: bool = False


class FlatBlocks:
    """The host blocks, found by key, of a cache group that keeps only some blocks of a prompt.

    The radix tree cannot list such blocks, because it has only unbroken sequences from the start of
    a prompt. Engines save only some blocks of sliding windows and recurrent states. Blocks that
    `hold` does not protect can be evicted, the least recently used one first.

    Args:
        name: name of the tier in error messages.
        capacity: number of slots.
        on_evict: called with each block that is evicted.
    """

    def __init__(
        self, name: str, capacity: int, on_evict: Callable[[FlatBlock], None] = lambda _: None
    ) -> None:
        self._pool = BlockPool(name, capacity)
        self._on_evict = on_evict
        self._blocks: dict[bytes, FlatBlock] = {}
        self._unheld: OrderedDict[bytes, FlatBlock] = OrderedDict()  # the next one to evict first
        self._siblings: dict[tuple[bytes, bytes], dict[bytes, FlatBlock]] = {}
        self._allocated: set[int] = set()
        self._retired: set[FlatBlock] = set()  # excluded from lookups, still held

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[FlatBlock]:
        return iter(self._blocks.values())

    @property
    def num_holds(self) -> int:
        """Number of `hold` calls, over all blocks, that `release` has not ended yet."""
        return sum(block.holders for block in (*self._blocks.values(), *self._retired))

    def get(self, digest: bytes) -> FlatBlock | None:
        return self._blocks.get(digest)

    def best(self, parent: bytes, tokens: bytes, extra: bytes) -> tuple[FlatBlock | None, int]:
        """Return the block after `parent` that shares the most leading tokens with `tokens`.

        Args:
            parent: key of the block before, or the root.
            tokens: packed tokens after the parent.
            extra: extra keys (identity of media) of the block; b"" for none.

        Returns:
            The block and the number of shared tokens; None and 0 if no block shares any.
        """
        best, shared = None, 0
        for block in self._siblings.get((parent, tokens[:TOKEN_BYTES]), {}).values():
            if block.extra == extra and (n := common_tokens(block.tokens, tokens)) > shared:
                best, shared = block, n
        return best, shared

    def hold(self, blocks: Iterable[FlatBlock]) -> None:
        """Protect the blocks from eviction until `release`; such blocks are called held."""
        for block in blocks:
            block.holders += 1
            self._unheld.pop(block.key.digest, None)

    def release(self, blocks: Sequence[FlatBlock]) -> None:
        """End the protection from eviction that one call of `hold` gave each of the blocks.

        The blocks are then the most recently used ones. They must be in the order of their prompt,
        so that the last ones are evicted first.
        """
        for block in reversed(blocks):
            block.holders -= 1
            if block in self._retired:
                if not block.holders:
                    self._retired.remove(block)
                    self._pool.release([block.slot])
            elif not block.holders:
                self._unheld[block.key.digest] = block

    def use(self, digests: Sequence[bytes]) -> None:
        """Mark blocks as just used, so that they are evicted after all other unprotected blocks.

        Among the marked blocks, the last one is evicted first. Blocks that are protected or not
        cached are ignored.

        Args:
            digests: keys of the blocks, in the order of the prompt.
        """
        for digest in reversed(digests):
            if digest in self._unheld:
                self._unheld.move_to_end(digest)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` slots; if too few are free, evict blocks that are not held.

        Returns:
            The slots, fewer than `count` if too many slots are in use. The caller uses each slot
                for a block (`put`) or frees it (`free`).
        """
        count = min(count, self._pool.num_free + len(self._unheld))
        while self._pool.num_free < count:
            self._evict(next(iter(self._unheld.values())))
        slots: list[int] = self._pool.allocate(count).tolist()
        self._allocated.update(slots)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Free slots that `allocate` has returned."""
        self._allocated.difference_update(slots)
        self._pool.release(slots)

    def put(self, block: FlatBlock) -> bool:
        """Add a block whose slot `allocate` has returned. The cached block then owns the slot.

        Returns:
            False if a block with this key is cached already; the caller then still owns the slot.
        """
        digest = block.key.digest
        if digest in self._blocks:
            return False
        self._allocated.remove(block.slot)
        self._blocks[digest] = self._unheld[digest] = block
        self._siblings.setdefault(_first(block), {})[digest] = block
        return True

    def forget(self) -> int:
        """Evict all blocks that `hold` does not protect; return the number of protected blocks."""
        for block in list(self._unheld.values()):
            self._evict(block)
        return len(self._blocks) + len(self._retired)

    def retire(self) -> None:
        """Exclude all blocks from lookups, and evict them.

        A held block is freed when its last holder releases it.
        """
        self.forget()
        for block in list(self._blocks.values()):
            self._unlist(block)
            self._retired.add(block)
            self._on_evict(block)

    def _evict(self, block: FlatBlock) -> None:
        self._unlist(block)
        del self._unheld[block.key.digest]
        self._pool.release([block.slot])
        self._on_evict(block)

    def _unlist(self, block: FlatBlock) -> None:
        digest, siblings = block.key.digest, self._siblings[_first(block)]
        del self._blocks[digest], siblings[digest]
        if not siblings:
            del self._siblings[_first(block)]

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; [] if there are none."""
        name, blocks = self._pool.tier, self._blocks
        every = (*blocks.values(), *self._retired)
        wrong = self._pool.findings([*self._allocated, *(one.slot for one in every)])
        unheld = {digest for digest, block in blocks.items() if not block.holders}
        if unheld != self._unheld.keys():
            wrong.append(f"{name}: the evictable blocks differ from the blocks without a holder")
        listed = Counter(digest for some in self._siblings.values() for digest in some)
        if listed != Counter(blocks.keys()):
            wrong.append(f"{name}: some blocks are not listed under their parents")
        return wrong


def _first(block: FlatBlock) -> tuple[bytes, bytes]:
    return block.parent, block.tokens[:TOKEN_BYTES]
