"""The tails that hang under a block, listed in storage: how a prompt finds another prompt's tail.

A tail's own name is known only to a prompt that ends exactly where it ends. The list, one small
value for each parent block, tells the others: a longer prompt, a shorter one, one that goes another
way after a few tokens.

A list is never a reason for a wrong byte: an entry is believed only if its tokens give its digest,
and the tail's value is checked like any other. It is never a reason to fail either: one that is
lost, damaged or not written in time is a tail less that is found. Of two nodes that add to one list
at once, one entry can be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from tierkv.cache.keys import Names, StoredKey, Tail
from tierkv.cache.layout import Layout
from tierkv.cache.tokens import TOKEN_BYTES, common_tokens
from tierkv.errors import StoreCorruptError, StoreUnavailableError
from tierkv.storage.codec import LAYOUT_DIGEST_BYTES, Codec, ValueIdentity
from tierkv.storage.protocol import PutItem, Store

MAX_TAILS = 8  # of one parent; the ones noted last
_MAX_LIST_BYTES = 256 << 10
_NOT_A_BLOCK = 0  # token count in the header: no block has none, so none is taken for a list
_LANES = 16


@dataclass(frozen=True, slots=True)
class SharedTail:
    """A stored tail of which a prompt shares the first `num_shared` tokens."""

    key: StoredKey
    tail: Tail
    num_shared: int


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    tokens: bytes
    extra: bytes


class TailLists:
    """Lists of one store. codecs: of a fingerprint, by its short form. ttl_s: as the blocks'.
    used: told the names of lists that are to live on, as what they list does."""

    def __init__(  # noqa: PLR0913 - what a StorageIO has
        self,
        store: Store,
        names: Names,
        layout: Layout,
        codecs: Callable[[str], Codec],
        *,
        deadline_s: float,
        ttl_s: float | None,
        used: Callable[[Sequence[str]], object] = lambda _: None,
    ) -> None:
        self._store = store
        self._used = used
        self._names = names
        self._layout = layout
        self._codecs = codecs
        self._deadline_s = deadline_s
        self._ttl_s = ttl_s
        # Who adds to one list in this process takes turns; a few locks for all lists.
        self._turns = [asyncio.Lock() for _ in range(_LANES)]
        self.num_damaged = 0

    async def note(self, keys: Sequence[StoredKey]) -> None:
        """List those of `keys` that are tails, which are stored. Never fails: see above."""
        for key in keys:
            if key.tail is None:
                continue
            turn = self._turns[key.tail.parent[0] % _LANES]
            with suppress(StoreUnavailableError, TimeoutError):
                async with asyncio.timeout(self._deadline_s), turn:
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
        """Whether whoever would use `old` can use `new`."""
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
        """The stored tail under `parent` that shares most of the packed tokens `wanted`.

        Of a layout whose blocks have no prefixes, only one of which all are wanted. None if there
        is none, or the store does not say in time.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                tails = await self._read(parent, space)
        except (StoreUnavailableError, TimeoutError):
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
        """What is listed, newest first; [] if the list is damaged. Raises StoreUnavailableError."""
        name = self._names.tails(parent, space)
        try:
            value = await self._store.get(name, max_bytes=_MAX_LIST_BYTES)
            if value is None:
                return []
            codec = self._codec(space)
            size = codec.header_bytes
            payload = memoryview(bytearray(value[size:]))
            codec.decode(value[:size], payload, _identity(parent))
            entries = msgspec.msgpack.decode(payload, type=list[_Entry])
        except (StoreCorruptError, msgspec.DecodeError, RecursionError):
            self.num_damaged += 1
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
    """The same for every slice of a model: tokens have no layout."""
    return ValueIdentity(bytes(LAYOUT_DIGEST_BYTES), parent, _NOT_A_BLOCK)
