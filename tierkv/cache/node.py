"""One node of the radix tree: a run of blocks, and where each of their copies is.

Each node belongs to the space of one fingerprint: tenants and adapters never meet in one tree.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

from tierkv.cache.copies import MOST_KEPT, Mask, TierCopies
from tierkv.cache.keys import DIGEST_BYTES
from tierkv.cache.pool import Ids
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.errors import ConfigError

DEFAULT: Final = ""  # the space of an index with a single fingerprint
Quota = tuple[int | None, int | None]  # the most device and host blocks, None for any
Segment = tuple["TreeNode", int, int]  # blocks [i, j) of a node's run, counted from the run's start
_NO_TOKEN: Final = b"\xff" * 4  # a negative number: what comes before extra keys can't be tokens
# Of no children, as most runs have none: never changed.
_NOBODY: Final[dict[bytes, TreeNode]] = {}
_NO_ORDER: Final[list[bytes]] = []
_BY_BLOCK: Final = b"\xff"  # at the end of a key of a whole block: no token ends so


class Tier(IntEnum):
    """The tiers that have slots. Storage has names instead and is asked, never assumed."""

    DEVICE = 0
    HOST = 1


TIERS: Final = tuple(Tier)  # going over these takes a tenth of what going over the enum takes
# Compared with, as `Tier.HOST` takes 0.1 us.
HOST: Final = Tier.HOST


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


class TreeNode:
    """Blocks [start, end) of every prompt that runs through here.

    packed: the tokens of the run are `token_bytes` bytes of it, from `packed_at` on. Before them
        are the last tokens of the path above, behind them those of runs below that were split
        off, or some that are gone.
    key: how the parent finds it, see `adopt`.
    extras: extra keys by block, where media overlap. is_tail: a partial block; it has no
        children, and its tokens are fewer than a block's.
    holders: leases that end here, and children that have holders. While there is one, no copy in
        this node is evicted. A lease therefore protects its whole path.
    last_used: the newest tick at which a lease that has ended, or ends here, was taken.
    digests: block keys of the first blocks of the run, 32 bytes each, as far as anybody asked.
    children_on_device, children_on_host: those of them, tails included, with a copy there.
    device: its copies there. host: those there, None where there is none, as mostly.
    order: the keys of those children that are found by their whole first block, sorted, so that
        the one sharing the most leading tokens with a prompt is next to where it would stand.
    """

    __slots__ = (
        "_stored",
        "children",
        "children_on_device",
        "children_on_host",
        "device",
        "digests",
        "end",
        "extras",
        "hits",
        "holders",
        "host",
        "is_tail",
        "key",
        "last_used",
        "num_blocks",
        "order",
        "packed",
        "packed_at",
        "parent",
        "soft_pins",
        "space",
        "start",
        "token_bytes",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        parent: TreeNode | None,
        space: Space,
        device: TierCopies,
    ) -> None:
        """A node with no tokens, key and host copies yet: see `put_tokens`, `adopt`, `on`."""
        num_blocks = device.num_blocks
        start = parent.end if parent is not None else 0
        self.uid = uid
        self.parent = parent
        self.space = space
        self.key = b""
        self.start = start
        self.end: int = start + num_blocks
        self.num_blocks = num_blocks
        self.is_tail = False
        self.extras: dict[int, bytes] | None = None
        self.device = device
        self.host: TierCopies | None = None
        self.children = _NOBODY
        self.order = _NO_ORDER
        self.children_on_device = 0
        self.children_on_host = 0
        self.holders = 0
        self.hits = 0
        self.last_used = 0
        self.soft_pins = 0
        self.digests: bytes = b""
        self.packed = b""
        self.packed_at = 0
        self.token_bytes = 0
        self._stored: Mask | None = None

    def extra(self, block: int) -> bytes:
        """Extra keys of `block`, counted from the prompt's start."""
        return self.extras.get(block, b"") if self.extras else b""

    def path(self) -> Iterator[TreeNode]:
        """This node, its parent, and so on, up to but without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def tokens(self) -> bytes:
        """Packed tokens of the run: a copy, unless `packed` has no others."""
        return self.packed[self.packed_at : self.packed_at + self.token_bytes]

    def tokens_of(self, start: int, stop: int) -> bytes:
        """Packed tokens of run blocks [start, stop)."""
        width = self.token_bytes // self.num_blocks
        return self.packed[self.packed_at + start * width : self.packed_at + stop * width]

    def put_tokens(self, packed: bytes, start: int, stop: int) -> None:
        """Let bytes [start, stop) of `packed` be the run's tokens: copied, unless hardly anything
        is beside them."""
        self.token_bytes = num_bytes = stop - start
        if 8 * len(packed) <= 9 * num_bytes:
            self.packed, self.packed_at = packed, start
        else:
            self.packed, self.packed_at = packed[start:stop], 0

    def keep_less(self, packed: bytes) -> None:
        """Blocks below needed `packed` and are gone: this run and those above that share it with
        it, as the halves of a run do, copy what is theirs if it is much more than they need."""
        part, needed = self, 0
        while part.packed is packed and part.parent is not None:
            needed += part.token_bytes
            part = part.parent
        if len(packed) > MOST_KEPT * needed:
            part = self
            while part.packed is packed and part.parent is not None:
                part.packed, part.packed_at = part.tokens, 0
                part = part.parent

    # Copies

    @property
    def copies(self) -> tuple[TierCopies, TierCopies]:
        """By tier, to be read only."""
        return self.device, self.host or TierCopies(self.num_blocks)

    def on(self, tier: Tier) -> TierCopies:
        """The copies on `tier`, to be changed."""
        if tier is not HOST:
            return self.device
        if self.host is None:
            self.host = TierCopies(self.num_blocks)
        return self.host

    def num_present(self, tier: Tier) -> int:
        """Copies on `tier`, whole or incoming."""
        copies = self.host if tier is HOST else self.device
        return copies.num_present if copies else 0

    # Children

    def adopt(self, child: TreeNode) -> None:
        """Let `child`, which has its tokens, be found below: by its first token, or, if another one
        is found by that, by its first block, or tail. So most need neither a long key nor a place
        in `order`, and where all begin alike it takes O(log n)."""
        at, extra = child.packed_at, b""
        key = child.packed[at : at + TOKEN_BYTES]
        if child.extras:
            extra = child.extra(child.start)
            key = child_key(key, extra)
        if not self.children:
            self.children = {}
        elif key in self.children:
            key = child_key(child.tokens_of(0, 1), extra) + _BY_BLOCK
            if not self.order:
                self.order = []
            bisect.insort(self.order, key)
        child.key = key
        self.children[key] = child

    def disown(self, child: TreeNode) -> None:
        key, order = child.key, self.order
        del self.children[key]
        if not order:
            return
        at = bisect.bisect_left(order, key)
        if key.endswith(_BY_BLOCK):
            del order[at]
        elif at < len(order) and order[at].startswith(key):  # one that begins with that token, too
            heir = self.children.pop(order.pop(at))
            heir.key = key
            self.children[key] = heir

    def child_with(self, tokens: bytes, extra: bytes) -> TreeNode | None:
        """The child that begins with this block, or is this tail."""
        child = self.children.get(child_key(tokens[:TOKEN_BYTES], extra))
        if child is not None and child.tokens_of(0, 1) != tokens:
            child = self.children.get(child_key(tokens, extra) + _BY_BLOCK)
        return child

    @property
    def present_children(self) -> tuple[int, int]:
        """By tier: children, tails included, with a copy there."""
        return self.children_on_device, self.children_on_host

    def count_present(self, tier: Tier, step: int) -> None:
        """So many more children have a copy on `tier`."""
        if tier is HOST:
            self.children_on_host += step
        else:
            self.children_on_device += step

    # What Storage has been told of: a belief that saves writes, never a match.

    def stored_in(self, start: int, stop: int) -> Mask:
        if self._stored is None:
            return np.zeros(stop - start, np.bool_)
        return self._stored[start:stop]

    def believe_stored(self, start: int, stop: int, believed: Mask) -> None:
        if self._stored is None:
            if not believed.any():
                return
            self._stored = np.zeros(self.num_blocks, np.bool_)
        self._stored[start:stop] = believed

    def believe_nothing_stored(self) -> None:
        self._stored = None

    # The shape of the run

    def append(self, tier: Tier, slots: Ids) -> None:
        """Add blocks at the end of the run, ready in `slots` of `tier`. Their tokens are the
        caller's business."""
        ready, num_blocks = self.on(tier), len(slots)
        self.num_blocks += num_blocks
        self.end += num_blocks
        for copies in (self.device, self.host):
            if copies:
                copies.extend(num_blocks, slots if copies is ready else None)
        if self._stored is not None:
            self._stored = np.append(self._stored, np.zeros(num_blocks, np.bool_))

    def truncate(self, num_blocks: int) -> None:
        """Forget blocks from `num_blocks` on. The tokens behind them stay in memory for a while,
        see `keep_less`."""
        self._shorten(num_blocks)
        self.device.truncate(num_blocks)
        if self.host:
            self.host.truncate(num_blocks)

    def cut(self, tier: Tier, num_blocks: int) -> None:
        """`truncate` a run that is ready throughout on `tier` and nowhere else, but for its copies
        there: they are the caller's business."""
        self._shorten(num_blocks)
        if tier is HOST:
            self.device.num_blocks = num_blocks
        else:
            self.host = None

    def _shorten(self, num_blocks: int) -> None:
        self.token_bytes = self.token_bytes // self.num_blocks * num_blocks
        if len(self.packed) > MOST_KEPT * self.token_bytes:
            self.keep_less(self.packed)
        before, self.end = self.end, self.start + num_blocks
        self.num_blocks = num_blocks
        if self.extras:
            for block in range(self.end, before):
                self.extras.pop(block, None)
        if self.digests:
            self.digests = self.digests[: num_blocks * DIGEST_BYTES]
        if self._stored is not None:
            self._stored = self._stored[:num_blocks].copy()

    def behead(self, uid: int, at: int) -> TreeNode:
        """Cut the run in two: a new node for the first `at` blocks, while this one keeps the
        rest, its children and its leases. Links to and from parents are the caller's."""
        cut = self.token_bytes // self.num_blocks * at
        upper = TreeNode(uid, self.parent, self.space, self.device.behead(at))
        upper.key = self.key
        if self.host:
            upper.host = self.host.behead(at)
        upper.packed, upper.packed_at, upper.token_bytes = self.packed, self.packed_at, cut
        upper.hits, upper.last_used, upper.soft_pins = self.hits, self.last_used, self.soft_pins
        if self.digests:
            known = at * DIGEST_BYTES
            upper.digests, self.digests = self.digests[:known], self.digests[known:]
        self.packed_at += cut
        self.token_bytes -= cut
        self.start += at
        self.num_blocks -= at
        if self.extras:
            upper.extras = {b: e for b, e in self.extras.items() if b < self.start}
            self.extras = {b: e for b, e in self.extras.items() if b >= self.start}
        if self._stored is not None:
            upper.believe_stored(0, at, self._stored[:at])
            self._stored = self._stored[at:].copy()
        self.parent = upper
        return upper


def child_key(tokens: bytes, extra: bytes) -> bytes:
    """What a run that begins with `tokens` is found by: these, behind the extra keys of its first
    block if media overlap that. Different ones have different keys, and sorted keys have those side
    by side that share extra keys and most leading tokens."""
    return _NO_TOKEN + len(extra).to_bytes(4, "little") + extra + tokens if extra else tokens
