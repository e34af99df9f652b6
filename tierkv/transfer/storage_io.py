"""Moves blocks between Host slots and a store: fetch and flush, checked on the way in.

`StorageIO` asks the store; `Values` says, without I/O, what is read where, whether it is right and
what is written; `made_ahead` has threads make headers while the values before them are sent, and
`Toucher` lets blocks that are used live on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from tierkv.cache.keys import Names, StoredKey
from tierkv.cache.layout import Bytes1D, Layout
from tierkv.cache.shards import Shard
from tierkv.errors import StoreCorruptError, StoreUnavailableError
from tierkv.gpu.protocol import HostSlots, Ids
from tierkv.storage.codec import Codec, PlainCodec
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
from tierkv.storage.threads import WorkerThreads
from tierkv.tasks import background
from tierkv.transfer.slices import Slice, Slices
from tierkv.transfer.tails import TailLists

log = logging.getLogger("tierkv.storage")
_MAX_FOUND = 65_536
_MAX_COPIES = 4  # of one value that are read, as long as they are damaged
# Values of which 32 take 0.2 to 0.4 ms, in which a server that writes 512 KiB runs out of work: SET
# over one and four connections at 1.02 of the rate (Redis 7.0, 2 cores, 2026-11-23).
_MADE_AT_ONCE = 8
_WAITED_FOR = 1e9  # the worth of a block that somebody waits for
# A thread sums up 2 MiB in 0.07 ms, which the loop takes 0.5 to send. Where values of 512 KiB and
# 2 MiB are replaced it came to 1.14 to 1.39 of the rate, into an empty server to 0.95 to 1.01 (16
# cores, Redis 7.0, 2026-11-23). With two cores it would take it from the server.
_CORES = 4
_LEAST_VALUES = 4  # of fewer the loop has made most before a thread is awake
makes_ahead = len(os.sched_getaffinity(0)) >= _CORES
_MAX_AT_ONCE = 64  # of values that are looked at on the loop
_BATCH_NAMES = 512
_MAX_NAMES = 65_536
_PAUSE_S = 0.2  # between batches: at most 2,560 names a second
_DEADLINE_S = 5.0
_WORST_GET = (GetStatus.FAILED, GetStatus.DAMAGED, GetStatus.MISS, GetStatus.HIT)
# A block is new if one of its slices is.
_WORST_PUT = (PutStatus.FAILED, PutStatus.FULL, PutStatus.STORED, PutStatus.EXISTED)
_NOT_ASKED = GetOutcome(GetStatus.FAILED, "not asked for yet")
_PLAIN = PlainCodec()


@dataclass(slots=True)
class StorageStats:
    """Counts since the start; read by metrics and by the demo."""

    fetched_blocks: int = 0
    fetched_bytes: int = 0
    flushed_blocks: int = 0
    flushed_bytes: int = 0
    skipped_blocks: int = 0  # were in the store already
    damaged_blocks: int = 0
    failed_reads: int = 0
    failed_writes: int = 0


class StorageIO:
    """One fingerprint's blocks in one store. Concurrency and deadlines of single operations are
    the store's; the deadline of a whole question is the caller's.

    block_ttl_s: how long a stored block lives, None for as long as the store keeps it.
    touches_per_ttl: how often a block that is used may be told to the store, to live on.
    codecs: how the blocks of a fingerprint, by its short form, become values; None for a plain
        checksum.
    slices: what this node holds of each block; None for all of it, in the slots of `host`.
    """

    def __init__(  # noqa: PLR0913 - a block needs all of them to become a value
        self,
        store: Store,
        names: Names,
        layout: Layout,
        host: HostSlots,
        *,
        deadline_s: float,
        block_ttl_s: float | None,
        touches_per_ttl: int = 0,
        codecs: Callable[[str], Codec] | None = None,
        slices: Slices | None = None,
    ) -> None:
        self.store = store
        self.names = names
        self.slices = slices or Slices.whole(names, layout, host)
        self.stats = StorageStats()
        self._deadline_s = deadline_s
        self._codecs = codecs or (lambda _: _PLAIN)
        self._values = Values(self.slices, self._codec, block_ttl_s)
        self._found: OrderedDict[bytes, int] = OrderedDict()  # digest -> size of who stored it
        # Checksums of 2 MiB blocks would stop the loop for 70 us each.
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
            deadline_s=deadline_s,
            ttl_s=block_ttl_s,
            used=self._toucher.used if self._toucher is not None else lambda _: None,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self._checkers.running(),
            self._toucher.running() if (self._toucher) else nullcontext(),
        ):
            yield

    # Looking

    async def count_present(self, keys: Sequence[StoredKey]) -> int:
        """How many of `keys`, from the first on, the store has whole, all ranks' slices of each.
        StoreUnavailableError if it does not say so in time."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._count_present(keys)
        except TimeoutError as error:
            raise StoreUnavailableError(
                f"{self.store.url} did not answer within {self._deadline_s:g} s"
            ) from error

    async def _count_present(self, keys: Sequence[StoredKey]) -> int:
        at, size = 0, self.slices.size
        while True:
            names = check_names(self.slices.names_of_all(keys[at:], size))
            found = await self.store.exists(names) // size
            if found:
                if self._toucher is not None:
                    self._toucher.used(names[: found * size])
                self._note_found(keys[at : at + found], size)
                at += found
            if at == len(keys) or not self.slices.peer_sizes:
                return at
            [other] = await self._sizes_of([keys[at]], size)
            if other is None:
                return at
            size = other

    async def _sizes_of(self, keys: Sequence[StoredKey], tried: int) -> list[int | None]:
        """Of how many ranks the node was that has stored each block, one of `tried` aside; None if
        none has. One exchange for all."""
        sizes = [n for n in (self.slices.size, *self.slices.peer_sizes) if n != tried]
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
        for key in keys:
            self._found[key.digest] = size
            while len(self._found) > _MAX_FOUND:
                self._found.popitem(last=False)

    # Fetch

    async def fetch(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[GetOutcome]:
        """Bring blocks into host slots, which stay the caller's until this returns.

        HIT means that length, key, layout and checksum are right, of every rank's slice. A damaged
        value is deleted; where the store has another copy of it, that is read.
        """
        sizes = [self._found.get(key.digest, self.slices.size) for key in keys]
        blocks = await self._fetch(keys, slot_ids, sizes)
        await self._fetch_missed(keys, slot_ids, blocks)
        for key, outcome in zip(keys, blocks, strict=True):
            if outcome.status is not GetStatus.HIT:
                self._found.pop(key.digest, None)  # whoever stored it, look again
            if outcome.status is GetStatus.DAMAGED:
                self.stats.damaged_blocks += 1
            elif outcome.status is GetStatus.FAILED:
                self.stats.failed_reads += 1
        return blocks

    async def _fetch_missed(
        self, keys: Sequence[StoredKey], slot_ids: Ids, blocks: list[GetOutcome]
    ) -> None:
        """Found by another way than `count_present`, a block can be of any size."""
        missed = [
            at
            for at, key in enumerate(keys)
            if blocks[at].status is GetStatus.MISS and key.digest not in self._found
        ]
        with suppress(StoreUnavailableError):
            sizes = await self._sizes_of([keys[at] for at in missed], self.slices.size)
            found = {at: size for at, size in zip(missed, sizes, strict=True) if size is not None}
            if found:
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
        """sizes: of how many ranks the node was that stored each of them."""
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
        if self._toucher is not None:
            self._toucher.used(read.item.name for read in hits)
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
        """Delete the damaged values; the blocks of whose values there may be other copies."""
        damaged = [read for read in reads if read.outcome.status is GetStatus.DAMAGED]
        again = {at for at, block in enumerate(blocks) if block.status is GetStatus.DAMAGED}
        if damaged:
            try:
                others = await self.store.forget_damaged([read.item.name for read in damaged])
            except StoreUnavailableError:
                return []  # they will be found damaged again
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
    ) -> list[PutOutcome]:
        """Write host slots to the store, which stay as they are until this returns.

        notes_tails: list the tails among them under their parents too; who has no time for it now
            does it later, with `tails.note`.

        worth: of each block; of writes that are too many for the store the least worth are
            dropped. None: somebody waits for them.
        """
        values = [_WAITED_FOR] * len(keys) if worth is None else worth
        is_late = self.store.capabilities.sends_from_loop
        items = await self._encoded_later(keys, slot_ids, values) if is_late else None
        if items is None:
            items = await self._checkers.run(
                lambda: self._values.encode(keys, slot_ids, values, is_late=is_late)
            )
        async with made_ahead(self._checkers, items):
            outcomes = await self.store.put(items)
        if self._toucher is not None:
            answered = zip(items, outcomes, strict=True)
            self._toucher.wrote(i.name for i, o in answered if o.status is PutStatus.STORED)
            answered = zip(items, outcomes, strict=True)
            self._toucher.used(i.name for i, o in answered if o.status is PutStatus.EXISTED)
        size = self.slices.size
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.status is PutStatus.STORED:
                self.stats.flushed_bytes += item.num_bytes
        blocks = [_worst_put(outcomes[at : at + size]) for at in range(0, len(outcomes), size)]
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
        """As `Values.encode_later`, with turns for others: what is sent meanwhile would wait for
        all of them."""
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


@dataclass(slots=True)
class Read:
    """One value on its way into a slot, or into a buffer from which slots are assembled."""

    at: int  # which of the keys
    shard: Shard
    item: GetItem
    header: bytearray
    payload: Bytes1D
    outcome: GetOutcome = _NOT_ASKED


class Values:
    """What blocks of one node are in storage. Safe from several threads.

    codec_of: how the blocks of a key's fingerprint become values. ttl_s: how long they live.
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
        """Where the values of each block land. sizes: of how many ranks the node was that stored
        each of them."""
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
        """Whether `check` takes more than some 4 us for each of them: a digest that no store has
        made, a tail or a block of another size to be put together."""
        return (
            any(r.outcome.status is GetStatus.HIT and r.outcome.digest is None for r in reads)
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
        """What became of each block, which is in its slot if that is HIT. Blocks the thread."""
        of_block: list[list[Read]] = [[] for _ in keys]
        for read in reads:
            of_block[read.at].append(read)
            key = keys[read.at]
            if read.outcome.status is GetStatus.HIT:
                identity = self._slices.identity(key, read.shard)
                try:
                    self._codec(key).decode(
                        read.header, read.payload.data, identity, read.outcome.digest
                    )
                except StoreCorruptError as error:
                    read.outcome = GetOutcome(GetStatus.DAMAGED, str(error))
        blocks = []
        for key, slot, size, parts in zip(keys, slot_ids, sizes, of_block, strict=True):
            blocks.append(_worst_get([read.outcome for read in parts]))
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

    def encode_later(
        self, keys: Sequence[StoredKey], slot_ids: Ids, worth: Sequence[float]
    ) -> list[PutItem] | None:
        """What `encode` with `is_late` returns; None if that takes a look at their bytes."""
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
        """The values of each block, rank after rank. Blocks the thread. is_late: with as little of
        that as can be."""
        return [
            (self._later(key, part, int(slot), value) if is_late else None)
            or self._item(key, part, int(slot), value)
            for key, slot, value in zip(keys, slot_ids, worth, strict=True)
            for part in self._slices.parts
        ]

    def _later(self, key: StoredKey, part: Slice, slot: int, worth: float) -> PutItem | None:
        """The value of a block whose header is made by who sends it."""
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


def _worst_get(outcomes: Sequence[GetOutcome]) -> GetOutcome:
    return min(outcomes, key=lambda outcome: _WORST_GET.index(outcome.status))


def _worst_put(outcomes: Sequence[PutOutcome]) -> PutOutcome:
    return min(outcomes, key=lambda outcome: _WORST_PUT.index(outcome.status))


@asynccontextmanager
async def made_ahead(threads: WorkerThreads, items: Sequence[PutItem]) -> AsyncIterator[None]:
    """Have threads complete `items` while the body sends them; whoever comes to one first does.
    Afterwards no thread reads any."""
    late = [item.complete for item in items if item.complete is not None]
    if not makes_ahead or len(late) < _LEAST_VALUES:
        yield
        return

    async def make() -> None:
        with suppress(StoreUnavailableError):  # closing: then all is made as it is sent
            await threads.run_each(lambda complete: complete(), late)

    async with background({"tierkv-make-headers": make()}):
        yield


class Toucher:
    """ttl_s: what a block in use gets. interval_s: how long a block that was touched, or written,
    is not touched again."""

    def __init__(self, store: Store, *, ttl_s: float, interval_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._interval_s = interval_s
        self._seen: OrderedDict[str, float] = OrderedDict()  # name -> when it was noted last
        self._due: OrderedDict[str, None] = OrderedDict()
        self._came = asyncio.Event()
        self.num_touched = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving forgets what is still to be told: it is at most a block that ends in time."""
        async with background({"tierkv-touch": self._keep_touching()}):
            yield

    def wrote(self, names: Iterable[str]) -> None:
        """These have just been given their whole TTL."""
        now = asyncio.get_running_loop().time()
        for name in names:
            self._see(name, now)

    def used(self, names: Iterable[str]) -> None:
        """These were found in the store. What is too much to remember is not touched."""
        now = asyncio.get_running_loop().time()
        for name in names:
            if now - self._seen.get(name, -self._interval_s) < self._interval_s:
                continue
            if len(self._due) >= _MAX_NAMES:
                return
            self._see(name, now)
            self._due[name] = None
            self._came.set()

    def _see(self, name: str, now: float) -> None:
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
                    self.num_touched += await self._store.touch(names, ttl_s=self._ttl_s)
            except (TimeoutError, StoreUnavailableError) as error:
                log.debug("%d stored blocks were not touched: %s", len(names), error)
                for name in names:
                    self._seen.pop(name, None)  # the next use tries again
            await asyncio.sleep(_PAUSE_S)
