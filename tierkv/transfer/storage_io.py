"""Copies of blocks between host slots and a store: fetch (read and check) and flush (write).

`StorageIO` calls the store. `Values` translates between blocks and stored values, without I/O.
`Slices` describes each rank's share of a block. `TailLists` makes the tails of other prompts
findable. `Toucher` renews the time to live of used blocks.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import msgspec
import numpy as np

from tierkv import tracing
from tierkv.cache.keys import TOKEN_BYTES, KeyRun, Names, StoredKey, Tail, common_tokens
from tierkv.cache.layout import Bytes1D, Layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.errors import LayoutError, StoreCorruptError, StoreUnavailableError
from tierkv.gpu.protocol import HostSlots, Ids
from tierkv.storage.base import WorkerThreads
from tierkv.storage.codec import (
    LAYOUT_DIGEST_BYTES,
    Codec,
    PlainCodec,
    ValueIdentity,
    is_packed,
)
from tierkv.storage.protocol import (
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
    check_names,
)
from tierkv.tasks import background, both, supervised
from tierkv.transfer.deletions import Deletions


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's share of each block, with the rank's host slots."""

    shard: Shard
    layout: Layout
    host: HostSlots

    def payload(self, slot: int, num_tokens: int) -> Bytes1D:
        """Return the memory in a host slot into which a stored value's payload is read.

        A tail may be stored without the unused bytes of its planes. The payload is then shorter
        than the slot, and its planes must be moved to their offsets in the slot after the read
        (`Values.check`).

        Args:
            slot: id of the host slot.
            num_tokens: number of tokens of the block or tail.

        Returns:
            uint8 [bytes of the payload], a view of the slot's first bytes.
        """
        payload: Bytes1D = self.host.array[slot][: self.layout.stored_bytes(num_tokens)]
        return payload


class Slices:
    """The stored values that make up a block: one for each tensor-parallel rank.

    A node without tensor parallelism stores a block as one value. A node of n ranks stores n
    values, one for each rank's slice (share) of the block; a block counts as stored when all n are
    stored. Blocks that nodes with other numbers of ranks have stored are found too, and are put
    together from their slices.

    Args:
        names: returns the names under which the service's blocks are stored.
        parts: the slices of this node, one per rank, each with the rank's host memory.
        scheme: the heads of a block that each rank has; None to find only blocks of nodes with as
            many ranks as this one.
        peer_tensor_parallel: numbers of ranks of other nodes whose blocks this node also finds. A
            number is ignored if this node's slices cannot be made from the slices of such a node.

    Raises:
        LayoutError: the number of `parts` is not the number of ranks.
    """

    def __init__(
        self,
        names: Names,
        parts: Sequence[Slice],
        scheme: ShardScheme | None = None,
        peer_tensor_parallel: Sequence[int] = (),
    ) -> None:
        self.names = names
        self.parts = tuple(parts)
        self.size = self.parts[0].shard.size
        self._scheme = scheme
        if len(self.parts) != self.size:
            raise LayoutError(
                f"a block of {self.size} ranks needs {self.size} slices, not {len(self.parts)}"
            )
        others = [
            n for n in dict.fromkeys(peer_tensor_parallel) if n != self.size and self._can_be(n)
        ]
        self.peer_tensor_parallel = tuple(others)
        self._names = {n: _names(names, n) for n in (self.size, *others)}
        self._layouts = {part.shard: part.layout for part in self.parts}
        self._digests: dict[Shard, bytes] = {}

    def _can_be(self, size: int) -> bool:
        if self._scheme is None:
            return False
        try:
            self._scheme.layout(Shard(size - 1, size))
        except LayoutError:
            return False
        return True

    def names_of(self, key: StoredKey, size: int) -> list[str]:
        """Return the names under which a block's values are stored, in the order of ranks.

        Args:
            key: key of the block.
            size: number of ranks of the node that has stored the block.
        """
        return [names.name(key) for names in self._names[size]]

    def names_of_all(self, keys: Sequence[StoredKey], size: int) -> Sequence[str]:
        """Return the names under which several blocks' values are stored.

        The names are in the order of the blocks, and within a block in the order of ranks.

        Args:
            keys: keys of the blocks.
            size: number of ranks of the node that has stored the blocks, which is the number of
                names per block.
        """
        if size == 1 and isinstance(keys, KeyRun):
            return self._names[1][0].of_run(keys)
        per_rank = [names.all(keys) for names in self._names[size]]
        if size == 1:
            return per_rank[0]
        return [name for of_key in zip(*per_rank, strict=True) for name in of_key]

    def sources(self, size: int) -> tuple[Shard, ...]:
        """Return the slices of a node of `size` ranks that together contain this node's slices."""
        if size == self.size:
            return tuple(part.shard for part in self.parts)
        assert self._scheme is not None, "other sizes are looked for only with a scheme"
        needed = (s for part in self.parts for s in self._scheme.sources(part.shard, size))
        return tuple(sorted(set(needed)))

    def layout(self, shard: Shard) -> Layout:
        """Return the layout of a slice."""
        layout = self._layouts.get(shard)
        if layout is None:
            assert self._scheme is not None, "other sizes are looked for only with a scheme"
            layout = self._layouts[shard] = self._scheme.layout(shard)
        return layout

    def identity(self, key: StoredKey, shard: Shard) -> ValueIdentity:
        """Return the identity that the header of a slice's stored value must have.

        The rank is part of the identity, so a value of one rank is never accepted for another rank.

        Args:
            key: key of the block.
            shard: rank and number of ranks of the slice.
        """
        digest = self._digests.get(shard)
        if digest is None:
            digest = self._digests[shard] = slice_digest(self.layout(shard), shard)
        return ValueIdentity(digest, key.digest, key.num_tokens)

    def assemble(self, slot: int, payloads: dict[Shard, Bytes1D], num_tokens: int) -> None:
        """Fill one host slot with a block that nodes with another number of ranks have stored.

        Args:
            slot: id of the host slot; every rank of this node has its part of the block under this
                id.
            payloads: bytes read from storage, one array for each slice of the block.
            num_tokens: number of tokens of the block.
        """
        assert self._scheme is not None, "other sizes are looked for only with a scheme"
        for part in self.parts:
            target = part.payload(slot, num_tokens)
            self._scheme.assemble(part.shard, payloads, target, num_tokens=num_tokens)


def slice_digest(layout: Layout, shard: Shard) -> bytes:
    """Return the layout digest for the header of a slice's stored value, 32 bytes.

    For a whole block this is the digest of the layout. For a slice the digest covers its rank too,
    so slices of equal layouts have different digests.

    Args:
        layout: layout of the slice.
        shard: rank and number of ranks.
    """
    if shard.size == 1:
        return layout.digest
    return hashlib.sha256(b"tierkv slice v1" + layout.digest + shard.name.encode()).digest()


def _names(names: Names, size: int) -> list[Names]:
    return [replace(names, shard=Shard(rank, size).name) for rank in range(size)]


MAX_TAILS = 8  # largest number of tails in a list; the latest ones stay
_MAX_LIST_BYTES = 256 << 10
_NOT_A_BLOCK = 0  # token count in a list's header; every block has tokens
_LANES = 16
_NOTE_S = 2.0  # time limit of an addition to a list


@dataclass(frozen=True, slots=True)
class SharedTail:
    """A stored tail that begins with the same tokens as a block of a prompt.

    Attributes:
        key: the name of the tail in storage.
        tail: the tokens of the tail, and the key of the block before.
        num_shared: number of leading tokens of the tail that the prompt has, too.
    """

    key: StoredKey
    tail: Tail
    num_shared: int


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    tokens: bytes
    extra: bytes


class TailLists:
    """The lists of stored tails, by which a prompt finds tails that other prompts have stored.

    A tail is the last, partial block of a prompt. Its name in storage depends on all of its tokens,
    so only a prompt with exactly the same tokens can compute the name. Each full block can have a
    list: a small stored value with the tokens of all tails that follow this block. With the list a
    prompt also finds a tail that shares only its first tokens with the prompt's next block.

    A list cannot cause wrong results: a tail's name is computed from the tokens in the list, and
    the tail's value is checked as any block is. If a list is lost, damaged or out of date, its
    tails are not found. If two nodes add to one list at once, one of the additions may be lost.

    Args:
        store: the store of the lists.
        names: makes the names in storage of the lists.
        layout: the layout of whole blocks.
        codecs: returns the codec (encodes values and checks them when read) for a fingerprint's
            short form.
        ttl_s: seconds to live of a list; None for as long as the store keeps it.
        stats: counts damaged lists.
        used: called with the names of lists that were used, to renew their time to live.
        deletions: the deletions of stored values, during which lists are neither read nor written.
    """

    def __init__(  # noqa: PLR0913 - what a StorageIO has
        self,
        store: Store,
        names: Names,
        layout: Layout,
        codecs: Callable[[str], Codec],
        *,
        ttl_s: float | None,
        stats: StorageStats,
        used: Callable[[Sequence[str]], object],
        deletions: Deletions,
    ) -> None:
        self._store = store
        self._used = used
        self._deletions = deletions
        self._names = names
        self._layout = layout
        self._codecs = codecs
        self._ttl_s = ttl_s
        # Additions to one list in this process take turns; a few locks serve all lists.
        self._turns = [asyncio.Lock() for _ in range(_LANES)]
        self._stats = stats

    async def note(self, keys: Sequence[StoredKey], *, generation: int | None = None) -> None:
        """Add stored tails to the lists by which other prompts find them.

        Failures are ignored: other prompts then do not find the tail.

        Args:
            keys: keys of stored blocks and tails; blocks are skipped.
            generation: value of `Deletions.generation` when the tails were computed; None for the
                present value. Tails are not listed if the stored values were deleted since.
        """
        deletions = self._deletions
        generation = deletions.generation if generation is None else generation
        for key in keys:
            if key.tail is None or deletions.refusal(generation):
                continue
            turn = self._turns[key.tail.parent[0] % _LANES]
            with deletions.writing(), suppress(StoreUnavailableError, TimeoutError):
                async with asyncio.timeout(_NOTE_S), turn:
                    await self._note(key.tail, key.space)

    async def _note(self, tail: Tail, space: str) -> None:
        known = await self._read(tail.parent, space)
        if known and known[0] == tail:
            self._used([self._names.tails(tail.parent, space)])
            return
        kept = [tail, *(one for one in known if not self._is_covered(one, tail))][:MAX_TAILS]
        body = msgspec.msgpack.encode([_Entry(one.tokens, one.extra) for one in kept])
        parts = self._codec(space).encode(body, _identity(tail.parent))
        name = self._names.tails(tail.parent, space)
        await self._store.put([PutItem(name, parts, ttl_s=self._ttl_s, keep_existing=False)])

    def _is_covered(self, old: Tail, new: Tail) -> bool:
        """Return True if every prompt that could use the tail `old` can use `new` instead."""
        if old == new:
            return True
        is_start = new.extra == old.extra and new.tokens.startswith(old.tokens)
        return is_start and self._layout.has_prefixes

    async def best(
        self,
        parent: bytes,
        wanted: bytes,
        extra: bytes,
        space: str,
        *,
        missing: Collection[bytes] = (),
    ) -> SharedTail | None:
        """Return the stored tail that shares the most tokens with a prompt's next block.

        Only tails that follow block `parent` are compared. If a layout's blocks can only be used
        whole, such as recurrent states, a tail that has tokens beyond the prompt, or other tokens,
        is skipped.

        Args:
            parent: key of the block before the tail, 32 bytes.
            wanted: the prompt's tokens after that block, int32 as bytes.
            extra: extra keys of the prompt's next block; a tail with other extra keys is skipped.
            space: name of the prompt's space (short form of its fingerprint); "" for the service's
                own.
            missing: keys of tails that are known not to be stored; they are skipped.

        Returns:
            The tail. None if no tail shares a token, if the store does not answer, or while stored
                values are being deleted.
        """
        if self._deletions.bars_reads:
            return None
        try:
            tails = await self._read(parent, space)
        except StoreUnavailableError:
            return None
        best: SharedTail | None = None
        for tail in tails:
            num_tokens = len(tail.tokens) // TOKEN_BYTES
            shared = common_tokens(tail.tokens, wanted) if tail.extra == extra else 0
            if not self._layout.has_prefixes and shared < num_tokens:
                continue
            if shared > (best.num_shared if best else 0) and tail.digest not in missing:
                key = StoredKey(tail.digest, num_tokens, is_tail=True, space=space, tail=tail)
                best = SharedTail(key, tail, shared)
        if best is not None:
            self._used([self._names.tails(parent, space)])
        return best

    async def _read(self, parent: bytes, space: str) -> list[Tail]:
        """Return the tails listed after `parent`, newest first, or [] without an intact list."""
        name = self._names.tails(parent, space)
        try:
            value = await self._store.get(name, max_bytes=_MAX_LIST_BYTES)
            if value is None:
                return []
            codec = self._codec(space)
            header, stored = value[: codec.header_bytes], value[codec.header_bytes :]
            room = memoryview(bytearray(_MAX_LIST_BYTES))
            room[: len(stored)] = stored
            num_bytes = codec.decode(header, room, _identity(parent), num_bytes=len(stored))
            entries = msgspec.msgpack.decode(room[:num_bytes], type=list[_Entry])
        except (StoreCorruptError, msgspec.DecodeError, RecursionError):
            self._stats.damaged_lists += 1
            return []
        return [
            Tail(parent, entry.tokens, entry.extra)
            for entry in entries[:MAX_TAILS]
            if 0 < len(entry.tokens) < self._layout.block_size * TOKEN_BYTES
            and len(entry.tokens) % TOKEN_BYTES == 0
        ]

    def _codec(self, space: str) -> Codec:
        return self._codecs(space or self._names.fingerprint)


def _identity(parent: bytes) -> ValueIdentity:
    """Return the identity in the header of a list of tails, the same for all layouts."""
    return ValueIdentity(bytes(LAYOUT_DIGEST_BYTES), parent, _NOT_A_BLOCK)


log = logging.getLogger(__name__)
_MAX_FOUND = 65_536
_FAR_S = 0.1  # after a slower answer, a lookup sends its two questions together
_MAX_COPIES = 4  # copies of one value that are tried if each is damaged
# Number of values encoded per turn of the loop. 32 take 0.3 ms, and a server that writes values of
# 512 KiB would be idle in that time.
_MADE_AT_ONCE = 8
_WAITED_FOR = 1e9  # worth of a block that a request waits for
# Smallest number of cores with which threads make headers ahead of sending. A value of 2 MiB takes
# a thread 0.07 ms, and the loop 0.5 ms to send; replacing values gets up to 1.39 times as fast.
# With two cores the threads would take the time from the server.
_CORES = 4
_MIN_VALUES = 4  # with fewer values, the loop makes most headers before a thread wakes up
makes_ahead = len(os.sched_getaffinity(0)) >= _CORES
_MAX_AT_ONCE = 64  # largest number of values that are checked on the loop
_BATCH_NAMES = 512
_MAX_NAMES = 65_536
_PAUSE_S = 0.2  # between batches: at most 2,560 names a second
_DEADLINE_S = 5.0
_WORST_GET = (GetStatus.FAILED, GetStatus.DAMAGED, GetStatus.MISS, GetStatus.HIT)
# A block is new if one of its slices is.
_WORST_PUT = (PutStatus.FAILED, PutStatus.FULL, PutStatus.STORED, PutStatus.EXISTED)
_NOT_ASKED = GetOutcome(GetStatus.FAILED, "not asked for yet")
_DELETED = GetOutcome(GetStatus.MISS, "the stored values were deleted during the read")
_PLAIN = PlainCodec()


@dataclass(slots=True)
class StorageStats:
    """Counts of reads from storage and writes to storage since the start of the node.

    Attributes:
        fetched_blocks: number of blocks read.
        fetched_bytes: number of bytes read.
        flushed_blocks: number of blocks written.
        flushed_bytes: number of bytes written.
        skipped_blocks: number of blocks not written, because the store had them already.
        damaged_blocks: number of blocks whose stored value was damaged.
        damaged_lists: number of damaged lists of tails (a list names the tails after one block).
        failed_reads: number of blocks that could not be read.
        failed_writes: number of blocks that could not be written.
    """

    fetched_blocks: int = 0
    fetched_bytes: int = 0
    flushed_blocks: int = 0
    flushed_bytes: int = 0
    skipped_blocks: int = 0  # not written, since the store had them already
    damaged_blocks: int = 0
    damaged_lists: int = 0  # lists of tails
    failed_reads: int = 0
    failed_writes: int = 0


class StorageIO:
    """Reads and writes of one fingerprint's blocks in one store.

    The store limits the time of each operation.

    Args:
        store: the store to read and write.
        names: makes the names in storage of the fingerprint's blocks.
        layout: the layout of whole blocks.
        host: the host slots that blocks are read into and written from.
        block_ttl_s: seconds to live of a stored block; None for as long as the store keeps it.
        touches_per_ttl: largest number of times that a used block's time to live is renewed within
            one such time; 0 for never.
        codecs: returns the codec (encodes values and checks them when read) for a fingerprint's
            short form; None to protect values by a checksum only.
        slices: this node's share of each block; None for whole blocks in the slots of `host`.
        deletions: the record of deletions of all stored values, shared by all objects of a service
            that write to its stores; None to create one.

    Attributes:
        has_other_sizes: True once a block was found that a node with another number of ranks has
            stored.
        asking: function without arguments, called before each lookup in the store. The result is a
            second function, which is called with the digest of each block that the lookup does not
            find. The service uses them to report missing blocks in its cache events.
    """

    def __init__(  # noqa: PLR0913 - a block needs all of them to become a value
        self,
        store: Store,
        names: Names,
        layout: Layout,
        host: HostSlots,
        *,
        block_ttl_s: float | None,
        touches_per_ttl: int = 0,
        codecs: Callable[[str], Codec] | None = None,
        slices: Slices | None = None,
        deletions: Deletions | None = None,
    ) -> None:
        self.store = store
        self.names = names
        self.deletions = deletions or Deletions()
        self.slices = slices or Slices(names, [Slice(Shard(0, 1), layout, host)])
        self.stats = StorageStats()
        self._codecs = codecs or (lambda _: _PLAIN)
        self._values = Values(self.slices, self._codec, block_ttl_s)
        self._found: OrderedDict[bytes, int] = OrderedDict()  # digest -> number of ranks
        self.has_other_sizes = False  # True once a block of another size was found
        self.asking: Callable[[], Callable[[bytes], None]] = lambda: _ignore
        self._is_far = False  # the last question took longer than _FAR_S
        # The checksum of a 2 MiB block would block the loop for 70 us.
        self._checkers = WorkerThreads("storage I/O", 2)
        self._toucher: Toucher | None = None
        if block_ttl_s is not None and touches_per_ttl:
            interval_s = block_ttl_s / touches_per_ttl
            self._toucher = Toucher(store, ttl_s=block_ttl_s, interval_s=interval_s)
        self.tails = TailLists(
            store,
            names,
            layout,
            self._codecs,
            ttl_s=block_ttl_s,
            stats=self.stats,
            used=self.used,
            deletions=self.deletions,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self._checkers.running(),
            self._toucher.running() if (self._toucher) else nullcontext(),
        ):
            yield

    # Lookups

    @property
    def reads_at_once(self) -> bool:
        """True if lookups are no cheaper than reads, so that blocks are read without a lookup."""
        return not self.store.capabilities.has_cheap_questions

    async def count_present(self, keys: Sequence[StoredKey]) -> int:
        """Return how many of `keys` the store has before the first one that it lacks.

        A block counts only if the slices of all ranks are stored. Slices may come from a node with
        another number of ranks, if the setting `peer_tensor_parallel` allows to convert them. The
        number is 0 while stored values are being deleted.

        Raises:
            StoreUnavailableError: the store did not answer.
        """
        if self.deletions.bars_reads:
            return 0
        at, size, time = 0, self.slices.size, asyncio.get_running_loop().time
        missing = self.asking()
        while True:
            names = check_names(self.slices.names_of_all(keys[at:], size))
            began = time()
            if self._is_far:  # saves a round trip if the first block is missing
                asking = both(self.store.exists(names), self._sizes_of(keys[at : at + 1], size))
                found, first_sizes = await asking
            else:
                found, first_sizes = await self.store.exists(names), None
            found //= size
            self._is_far = time() - began > _FAR_S
            if found:
                self.used(names[: found * size])
                self._note_found(keys[at : at + found], size)
                at += found
            if at == len(keys):
                return at
            if not self.slices.peer_tensor_parallel:
                missing(keys[at].digest)
                return at
            if found or first_sizes is None:
                first_sizes = await self._sizes_of([keys[at]], size)
            [other] = first_sizes
            if other is None:
                missing(keys[at].digest)
                return at
            size = other

    async def are_present(self, keys: Sequence[StoredKey]) -> list[bool]:
        """Return, for each key, True if the store has the block from nodes of as many ranks.

        The number of ranks is that of this node.

        Raises:
            StoreUnavailableError: the store did not answer.
        """
        [there] = await are_all_present([(self, keys)])
        return there

    async def present(self, names: Sequence[str]) -> list[bool]:
        """Return, for each name, True if the store has a value.

        All results are False while stored values are being deleted, and after a deletion that
        failed.

        Raises:
            StoreUnavailableError: the store did not answer.
        """
        if self.deletions.bars_reads:
            return [False] * len(names)
        return await self.store.present(names)

    def used(self, names: Iterable[str]) -> None:
        """Renew, in the background, the time to live of the values with these names.

        Nothing is done for values without a time to live.
        """
        if self._toucher is not None:
            self._toucher.used(names)

    async def _sizes_of(self, keys: Sequence[StoredKey], tried: int) -> list[int | None]:
        """Ask the store for each block how many ranks have written it; None if no number is found.

        The candidates are the numbers of ranks of this node and of its peers, without `tried`.
        """
        sizes = [n for n in (self.slices.size, *self.slices.peer_tensor_parallel) if n != tried]
        if not sizes or not keys:
            return [None] * len(keys)
        of_key = [{size: self.slices.names_of(key, size) for size in sizes} for key in keys]
        names = [name for of_size in of_key for some in of_size.values() for name in some]
        answers = await self.store.present(names)
        there = {name for name, is_there in zip(names, answers, strict=True) if is_there}
        return [
            next((size for size, some in of_size.items() if there.issuperset(some)), None)
            for of_size in of_key
        ]

    def _note_found(self, keys: Sequence[StoredKey], size: int) -> None:
        if size == self.slices.size:
            if self._found:
                for key in keys:
                    self._found.pop(key.digest, None)
            return
        self.has_other_sizes = True
        for key in keys:
            self._found[key.digest] = size
            while len(self._found) > _MAX_FOUND:
                self._found.popitem(last=False)

    # Fetch

    async def fetch(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[GetOutcome]:
        """Read blocks into host slots and check them.

        A damaged value is deleted; if the store has another copy, that copy is read.

        Args:
            keys: keys of the blocks.
            slot_ids: int32 [len(keys)], the target slots. The caller must not use or free them
                before the call has returned.

        Returns:
            One outcome per key. HIT: the slot has the block, and length, key, layout and checksum
                are right. MISS: the block is not stored, or stored values were deleted during the
                read. DAMAGED: the stored value failed a check. FAILED: the store did not answer.
        """
        if self.deletions.bars_reads:
            return [_DELETED] * len(keys)
        generation, missing = self.deletions.generation, self.asking()
        sizes = [self._found.get(key.digest, self.slices.size) for key in keys]
        with tracing.span("storage.read", blocks=len(keys)):
            blocks = await self._fetch(keys, slot_ids, sizes)
            await self._fetch_missed(keys, slot_ids, blocks)
        if generation != self.deletions.generation:
            return [_DELETED] * len(keys)
        for key, outcome in zip(keys, blocks, strict=True):
            if outcome.status is not GetStatus.HIT:
                self._found.pop(key.digest, None)  # the number of ranks may have changed
            if outcome.status in (GetStatus.MISS, GetStatus.DAMAGED):
                missing(key.digest)
            if outcome.status is GetStatus.DAMAGED:
                self.stats.damaged_blocks += 1
            elif outcome.status is GetStatus.FAILED:
                self.stats.failed_reads += 1
        return blocks

    async def _fetch_missed(
        self, keys: Sequence[StoredKey], slot_ids: Ids, blocks: list[GetOutcome]
    ) -> None:
        missed = [
            at
            for at, key in enumerate(keys)
            if blocks[at].status is GetStatus.MISS and key.digest not in self._found
        ]
        with suppress(StoreUnavailableError):
            sizes = await self._sizes_of([keys[at] for at in missed], self.slices.size)
            found = {at: size for at, size in zip(missed, sizes, strict=True) if size is not None}
            if found:
                self.has_other_sizes = True
                slots = slot_ids[list(found)]
                again = await self._fetch([keys[at] for at in found], slots, [*found.values()])
                for at, outcome in zip(found, again, strict=True):
                    blocks[at] = outcome

    async def _fetch(
        self,
        keys: Sequence[StoredKey],
        slot_ids: Ids,
        sizes: Sequence[int],
        *,
        tries: int = _MAX_COPIES,
    ) -> list[GetOutcome]:
        """Read blocks into host slots, check them, and delete damaged values from the store.

        If the store has another copy of a damaged value, read that copy; `tries` is the largest
        number of reads of a block.
        """
        reads = self._values.reads(keys, slot_ids, sizes)
        outcomes = await self.store.get_into([read.item for read in reads])
        for read, outcome in zip(reads, outcomes, strict=True):
            read.outcome = outcome
        if self._values.reads_bytes(keys, sizes, reads):
            check = partial(self._values.check, keys, slot_ids, sizes, reads)
            blocks = await self._checkers.run(check)
        else:  # a thread would take as long to begin
            blocks = self._values.check(keys, slot_ids, sizes, reads)
        hits = [read for read in reads if blocks[read.at].status is GetStatus.HIT]
        self.stats.fetched_blocks += sum(block.status is GetStatus.HIT for block in blocks)
        self.stats.fetched_bytes += sum(len(read.payload) for read in hits)
        self.used(read.item.name for read in hits)
        again = await self._forget_damaged(reads, blocks)
        if again and tries > 1:
            some = [keys[at] for at in again], slot_ids[again], [sizes[at] for at in again]
            for at, outcome in zip(again, await self._fetch(*some, tries=tries - 1), strict=True):
                if outcome.status is GetStatus.HIT:
                    self.stats.damaged_blocks += 1
                    blocks[at] = outcome
        return blocks

    async def _forget_damaged(
        self, reads: Sequence[Read], blocks: Sequence[GetOutcome]
    ) -> list[int]:
        """Delete the values that were found damaged from the store.

        Return the positions in `blocks` of damaged blocks of which the store may have another copy,
        to be read again.
        """
        damaged = [read for read in reads if read.outcome.status is GetStatus.DAMAGED]
        again = {at for at, block in enumerate(blocks) if block.status is GetStatus.DAMAGED}
        if damaged:
            try:
                others = await self.store.forget_damaged([read.item.name for read in damaged])
            except StoreUnavailableError:
                return []  # the next read finds the values damaged again
            again -= {r.at for r, other in zip(damaged, others, strict=True) if not other}
        return sorted(again)

    # Flush

    async def flush(
        self,
        keys: Sequence[StoredKey],
        slot_ids: Ids,
        worth: Sequence[float] | None = None,
        *,
        notes_tails: bool = True,
        generation: int | None = None,
    ) -> list[PutOutcome]:
        """Write blocks in host slots to the store.

        Args:
            keys: keys of the blocks.
            slot_ids: int32 [len(keys)], the slots. Their content must stay unchanged until the call
                has returned.
            worth: value of each block to later requests: if too many writes are waiting, the blocks
                of least value are dropped. None gives all blocks the highest value, for a request
                that waits for the write.
            notes_tails: True to add the tails (partial last blocks) to the lists in the store by
                which later prompts find tails; False to write only the blocks.
            generation: value of `deletions.generation` (number of deletions of stored blocks) when
                the blocks were computed. After a later deletion, nothing is written. None for the
                value at the call.

        Returns:
            One outcome per key. All are FAILED if a deletion forbids the write.
        """
        deletions = self.deletions
        if why := deletions.refusal(deletions.generation if generation is None else generation):
            return [PutOutcome(PutStatus.FAILED, why)] * len(keys)
        with deletions.writing():
            return await self._flush(keys, slot_ids, worth, notes_tails=notes_tails)

    async def _flush(
        self,
        keys: Sequence[StoredKey],
        slot_ids: Ids,
        worth: Sequence[float] | None,
        *,
        notes_tails: bool,
    ) -> list[PutOutcome]:
        values = [_WAITED_FOR] * len(keys) if worth is None else worth
        is_late = self.store.capabilities.sends_from_loop
        items = await self._encoded_later(keys, slot_ids, values) if is_late else None
        if items is None:
            items = await self._checkers.run(
                lambda: self._values.encode(keys, slot_ids, values, is_late=is_late)
            )
        with tracing.span("storage.write", blocks=len(keys)):
            async with made_ahead(self._checkers, items):
                outcomes = await self.store.put(items)
        answered = list(zip(items, outcomes, strict=True))
        written = [item for item, outcome in answered if outcome.status is PutStatus.STORED]
        self.stats.flushed_bytes += sum(item.num_bytes for item in written)
        if self._toucher is not None:
            self._toucher.wrote(item.name for item in written)
        self.used(item.name for item, one in answered if one.status is PutStatus.EXISTED)
        size = self.slices.size
        blocks = [
            min(outcomes[at : at + size], key=lambda one: _WORST_PUT.index(one.status))
            for at in range(0, len(outcomes), size)
        ]
        for block in blocks:
            if block.status is PutStatus.STORED:
                self.stats.flushed_blocks += 1
            elif block.status is PutStatus.EXISTED:
                self.stats.skipped_blocks += 1
            else:
                self.stats.failed_writes += 1
        if notes_tails:
            stored = (PutStatus.STORED, PutStatus.EXISTED)
            pairs = zip(keys, blocks, strict=True)
            await self.tails.note([key for key, block in pairs if block.status in stored])
        return blocks

    async def _encoded_later(
        self, keys: Sequence[StoredKey], slot_ids: Ids, worth: Sequence[float]
    ) -> list[PutItem] | None:
        """Return writes of blocks without the checksums, which the sender computes.

        Return None if the sender cannot compute the checksum of a block, for example of a tail.
        """
        items: list[PutItem] = []
        for at in range(0, len(keys), _MADE_AT_ONCE):
            if at:
                await asyncio.sleep(0)
            part = slice(at, at + _MADE_AT_ONCE)
            some = self._values.encode_later(keys[part], slot_ids[part], worth[part])
            if some is None:
                return None
            items += some
        return items

    def _codec(self, key: StoredKey) -> Codec:
        return self._codecs(key.space or self.names.fingerprint)


async def are_all_present(
    asked: Sequence[tuple[StorageIO, Sequence[StoredKey]]],
) -> list[list[bool]]:
    """Ask one store, in a single call, which blocks it has, for several `StorageIO`s.

    Args:
        asked: one pair or more of a StorageIO and the storage keys of the blocks. All StorageIOs
            have the same store.

    Returns:
        A list per pair: for each key, True if the values of all ranks of that StorageIO are stored.

    Raises:
        StoreUnavailableError: the store did not answer.
    """
    names = [io.slices.names_of_all(keys, io.slices.size) for io, keys in asked]
    first, _ = asked[0]
    missing = [io.asking() for io, _ in asked]
    answers = iter(await first.present(check_names([name for some in names for name in some])))
    found = []
    for (io, keys), some, is_missing in zip(asked, names, missing, strict=True):
        there, size = list(islice(answers, len(some))), io.slices.size
        io.used(name for name, is_there in zip(some, there, strict=True) if is_there)
        found.append([all(there[at : at + size]) for at in range(0, len(there), size)])
        for key, is_there in zip(keys, found[-1], strict=True):
            if not is_there:
                is_missing(key.digest)
    return found


@dataclass(slots=True)
class Read:
    """The read of one stored value into host memory.

    Attributes:
        at: index of the block among the keys of the fetch.
        shard: the shard whose slice of the block is read.
        item: the request for the store.
        header: buffer for the value's header.
        payload: buffer for the bytes after the header.
        outcome: result of the read.
    """

    at: int  # index of the key
    shard: Shard
    item: GetItem
    header: bytearray
    payload: Bytes1D
    outcome: GetOutcome = _NOT_ASKED


class Values:
    """The translation between one node's blocks and stored values, without I/O. Thread-safe.

    Args:
        slices: this node's share of each block.
        codec_of: returns the codec (encodes values and checks them when read) of the fingerprint
            that a block's key belongs to.
        ttl_s: seconds to live of a stored value; None for as long as the store keeps it.
    """

    def __init__(
        self, slices: Slices, codec_of: Callable[[StoredKey], Codec], ttl_s: float | None
    ) -> None:
        self._slices = slices
        self._codec = codec_of
        self._ttl_s = ttl_s

    def reads(
        self, keys: Sequence[StoredKey], slot_ids: Ids, sizes: Sequence[int]
    ) -> Sequence[Read]:
        """Return the reads that bring blocks into their host slots, one read per stored value.

        Args:
            keys: keys of the blocks.
            slot_ids: int32 [len(keys)], the target slots.
            sizes: for each block, the number of ranks of the node that has stored it.
        """
        return [
            self._read(at, key, shard, int(slot))
            for at, (key, slot, size) in enumerate(zip(keys, slot_ids, sizes, strict=True))
            for shard in self._slices.sources(size)
        ]

    def _read(self, at: int, key: StoredKey, shard: Shard, slot: int) -> Read:
        if shard.size == self._slices.size:
            payload = self._slices.parts[shard.rank].payload(slot, key.num_tokens)
        else:
            payload = np.empty(self._slices.layout(shard).stored_bytes(key.num_tokens), np.uint8)
        codec = self._codec(key)
        header = bytearray(codec.header_bytes)
        name = self._slices.names_of(key, shard.size)[shard.rank]
        item = GetItem(name, (memoryview(header), payload.data), partial(codec.digest, header))
        return Read(at, shard, item, header, payload)

    def reads_bytes(
        self, keys: Sequence[StoredKey], sizes: Sequence[int], reads: Sequence[Read]
    ) -> bool:
        """Return True if checking the reads takes long, so that `check` should run in a thread.

        This is the case if bytes must be hashed, decompressed or moved: the store has not computed
        a digest, values are compressed, a block is a tail, or a block was stored by a node with
        another number of ranks. More than 64 reads count as long, too.

        Args:
            keys: keys of the blocks.
            sizes: for each block, the number of ranks of the node that has stored it.
            reads: the reads, with outcomes.
        """
        return (
            any(
                r.outcome.status is GetStatus.HIT
                and (r.outcome.digest is None or is_packed(r.header))
                for r in reads
            )
            or any(key.is_tail for key in keys)
            or any(size != self._slices.size for size in sizes)
            or len(reads) > _MAX_AT_ONCE
        )

    def check(
        self,
        keys: Sequence[StoredKey],
        slot_ids: Ids,
        sizes: Sequence[int],
        reads: Sequence[Read],
    ) -> list[GetOutcome]:
        """Check the values that were read, and complete the blocks in their slots.

        The call blocks the thread.

        Args:
            keys: keys of the blocks.
            slot_ids: int32 [len(keys)], the host slots of the blocks.
            sizes: for each block, the number of tensor-parallel ranks of the node that stored the
                block, and so of the slices into which the block is divided.
            reads: the finished reads of all slices. The outcome of a read is changed to DAMAGED if
                its value is damaged.

        Returns:
            One outcome per block. HIT: the slot has the whole block.
        """
        of_block: list[list[Read]] = [[] for _ in keys]
        for read in reads:
            of_block[read.at].append(read)
            key = keys[read.at]
            if read.outcome.status is GetStatus.HIT:
                try:
                    self._decode(key, read)
                except StoreCorruptError as error:
                    read.outcome = GetOutcome(GetStatus.DAMAGED, str(error))
        blocks = []
        for key, slot, size, parts in zip(keys, slot_ids, sizes, of_block, strict=True):
            outcomes = [read.outcome for read in parts]
            blocks.append(min(outcomes, key=lambda one: _WORST_GET.index(one.status)))
            if blocks[-1].status is not GetStatus.HIT:
                continue
            if size != self._slices.size:
                payloads = {read.shard: read.payload for read in parts}
                self._slices.assemble(int(slot), payloads, key.num_tokens)
            if key.is_tail:
                for part in self._slices.parts:
                    payload = part.payload(int(slot), key.num_tokens).copy()
                    part.layout.paste_tail(payload, part.host.array[slot], key.num_tokens)
        return blocks

    def _decode(self, key: StoredKey, read: Read) -> None:
        num_bytes = self._codec(key).decode(
            read.header,
            read.payload.data,
            self._slices.identity(key, read.shard),
            read.outcome.digest,
            num_bytes=read.outcome.num_bytes - len(read.header),
        )
        if num_bytes != len(read.payload):
            raise StoreCorruptError(
                f"{read.item.name} has a payload of {num_bytes} bytes, but a block has "
                f"{len(read.payload)}"
            )

    def encode_later(
        self, keys: Sequence[StoredKey], slot_ids: Ids, worth: Sequence[float]
    ) -> list[PutItem] | None:
        """Return the values to store for blocks; their checksums are computed when they are sent.

        No bytes of the blocks are read, so the event loop is not blocked.

        Args:
            keys: keys of the blocks.
            slot_ids: int32 [len(keys)], the host slots of the blocks.
            worth: number for each block, higher if later requests gain more from the block. If too
                many writes are waiting, the blocks with the lowest numbers are dropped.

        Returns:
            The values, one per rank and block. None if a block is a tail, or if the codec cannot
                compute a checksum after this call.
        """
        items = []
        for key, slot, value in zip(keys, slot_ids, worth, strict=True):
            for part in self._slices.parts:
                item = self._later(key, part, int(slot), value)
                if item is None:
                    return None
                items.append(item)
        return items

    def encode(
        self, keys: Sequence[StoredKey], slot_ids: Ids, worth: Sequence[float], *, is_late: bool
    ) -> list[PutItem]:
        """Return the stored values of blocks, one per rank and block. The call blocks the thread.

        Args:
            keys: keys of the blocks.
            slot_ids: int32 [len(keys)], the slots.
            worth: value of each block to later requests; if too many writes are waiting, the blocks
                of least value are dropped.
            is_late: True to let the sender compute checksums where possible; False to compute all
                of them here.
        """
        return [
            (self._later(key, part, int(slot), value) if is_late else None)
            or self._item(key, part, int(slot), value)
            for key, slot, value in zip(keys, slot_ids, worth, strict=True)
            for part in self._slices.parts
        ]

    def _later(self, key: StoredKey, part: Slice, slot: int, worth: float) -> PutItem | None:
        """Return a write of a block whose header is computed only when the value is sent.

        The result is None for a tail, or if the codec cannot compute headers separately.
        """
        payload = part.host.array[slot].data
        header = None
        if not key.is_tail:
            identity = self._slices.identity(key, part.shard)
            header = self._codec(key).header_later(payload, identity)
        if header is None:
            return None
        name, given = self._name(key, part), (header.content, payload)
        return PutItem(name, given, ttl_s=self._ttl_s, worth=worth, complete=header)

    def _item(self, key: StoredKey, part: Slice, slot: int, worth: float) -> PutItem:
        payload = part.layout.cut_tail(part.host.array[slot], key.num_tokens)
        identity = self._slices.identity(key, part.shard)
        value = self._codec(key).encode(np.ascontiguousarray(payload).data, identity)
        return PutItem(self._name(key, part), value, ttl_s=self._ttl_s, worth=worth)

    def _name(self, key: StoredKey, part: Slice) -> str:
        return self._slices.names_of(key, part.shard.size)[part.shard.rank]


def _ignore(digest: bytes) -> None: ...


@asynccontextmanager
async def made_ahead(threads: WorkerThreads, items: Sequence[PutItem]) -> AsyncIterator[None]:
    """Compute the headers of values in threads while the `with` block sends the values.

    When the `with` block has ended, no thread reads a value any more.

    Args:
        threads: the worker threads that compute the headers.
        items: the values, in the order in which they are sent. Items without `PutItem.complete`
            have their header already and are left unchanged.
    """
    late = [item.complete for item in items if item.complete is not None]
    if not makes_ahead or len(late) < _MIN_VALUES:
        yield
        return

    async def make() -> None:
        with suppress(StoreUnavailableError):  # threads are closing: headers are made when sent
            await threads.run_each(lambda complete: complete(), late)

    async with background({"tierkv-make-headers": make()}):
        yield


class Toucher:
    """A task that renews the time to live of stored blocks that are used.

    Args:
        store: the store of the blocks.
        ttl_s: the new time to live, in seconds.
        interval_s: seconds after a write or renewal of a block during which it is not renewed
            again.
    """

    def __init__(self, store: Store, *, ttl_s: float, interval_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._interval_s = interval_s
        self._seen: OrderedDict[str, float] = OrderedDict()  # name -> last write or renewal
        self._due: OrderedDict[str, None] = OrderedDict()
        self._came = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renew the time to live of queued stored blocks while this context is entered.

        Renewals that are still queued at the exit are dropped.
        """
        async with supervised({"tierkv-touch": self._keep_touching}):
            yield

    def wrote(self, names: Iterable[str]) -> None:
        """Record that the values with these names were just written.

        The times to live of these values are not renewed during the next `interval_s` seconds.
        """
        now = asyncio.get_running_loop().time()
        for name in names:
            self._record(name, now)

    def used(self, names: Iterable[str]) -> None:
        """Queue the renewal of the times to live of stored values that were found in the store.

        Values that were renewed or written less than `interval_s` ago are skipped. While 65,536
        renewals are queued, further values are ignored.

        Args:
            names: names of the values.
        """
        now = asyncio.get_running_loop().time()
        for name in names:
            if now - self._seen.get(name, -self._interval_s) < self._interval_s:
                continue
            if len(self._due) >= _MAX_NAMES:
                return
            self._record(name, now)
            self._due[name] = None
            self._came.set()

    def _record(self, name: str, now: float) -> None:
        self._seen[name] = now
        self._seen.move_to_end(name)
        while len(self._seen) > _MAX_NAMES:
            self._seen.popitem(last=False)

    async def _keep_touching(self) -> None:
        while True:
            while not self._due:
                self._came.clear()
                await self._came.wait()
            count = min(len(self._due), _BATCH_NAMES)
            names = [self._due.popitem(last=False)[0] for _ in range(count)]
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    await self._store.touch(names, ttl_s=self._ttl_s)
            except (TimeoutError, StoreUnavailableError) as error:
                log.debug(
                    "the lifetime of %d stored blocks was not extended: %s", len(names), error
                )
                for name in names:
                    self._seen.pop(name, None)  # the next use tries again
            await asyncio.sleep(_PAUSE_S)
