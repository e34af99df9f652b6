"""Tickets and the like in a store, sealed under their names as `storage.trust` asks for."""

from __future__ import annotations

from tierkv.errors import StoreUnavailableError
from tierkv.storage.codec_small import SmallCodec
from tierkv.storage.protocol import PutItem, PutStatus, Store

_SEAL_BYTES = 64  # no seal adds more


class SmallValues:
    """codec: what a value is sealed with; it must be that of every node that shares the store."""

    def __init__(self, store: Store, codec: SmallCodec) -> None:
        self._store = store
        self._codec = codec

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """What was put under `name`, None if nothing is there. Raises StoreUnavailableError, and
        StoreCorruptError if it is too long, or was not sealed for this name with this key."""
        value = await self._store.get(name, max_bytes=max_bytes + _SEAL_BYTES)
        return None if value is None else self._codec.unseal_small(name, value)

    async def put(self, name: str, content: bytes, *, ttl_s: float, only_new: bool = False) -> bool:
        """In place of what is there, or, with `only_new`, where nothing is; whether it was put.
        Raises StoreUnavailableError if the store did not take it."""
        sealed = self._codec.seal_small(name, content)
        item = PutItem(name, (sealed,), ttl_s=ttl_s, keep_existing=False, only_new=only_new)
        [outcome] = await self._store.put([item])
        if outcome.status not in (PutStatus.STORED, PutStatus.EXISTED):
            raise StoreUnavailableError(f"{self._store.url} did not take it: {outcome.reason}")
        return outcome.status is PutStatus.STORED
