"""What an operator does with a whole store: look, count, verify, remove, give times to live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.errors import StoreCorruptError
from tierkv.storage.codec import (
    KEY_DIGEST_BYTES,
    Codec,
    DamagedValueError,
    PlainCodec,
    read_identity,
)
from tierkv.storage.codec_keyed import FLAG_SEALED, FLAG_SIGNED, TenantCodecs, Trust
from tierkv.storage.protocol import Store, StoredValue, Usage
from tierkv.tasks import task_group

_PAGE = 1000
_READS_AT_ONCE = 8
_FLAGS_AT = 6
_FINGERPRINT_FIELD = 1
_DIGEST_FIELD = 2
_TAILS = "tails"  # in the place of a shard: the list of a block's tails
_KEYED = frozenset({FLAG_SIGNED, FLAG_SEALED})


async def values_under(store: Store, prefix: str) -> AsyncIterator[StoredValue]:
    """Each value once, as long as none comes or goes meanwhile. Raises StoreUnavailableError."""
    cursor: str | None = None
    while True:
        page = await store.list(prefix, limit=_PAGE, cursor=cursor)
        for value in page.values:
            yield value
        cursor = page.cursor
        if cursor is None:
            return


async def usage_by_group(store: Store, prefix: str) -> dict[str, Usage]:
    """Values and bytes by the first two fields of their names: model and tenant, or tickets."""
    groups: dict[str, Usage] = {}
    async for value in values_under(store, prefix):
        group = ":".join(value.name.split(":", 2)[:2])
        so_far = groups.get(group, Usage(0, 0))
        groups[group] = Usage(so_far.num_values + 1, so_far.num_bytes + value.num_bytes)
    return groups


@dataclass(slots=True)
class Verified:
    """damaged: (name, why). num_keyed: values that only a tenant's key can verify. num_others:
    tickets and whatever else is no block."""

    num_whole: int = 0
    num_keyed: int = 0
    num_others: int = 0
    num_gone: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)


async def verify(store: Store, prefix: str, key: bytes | None = None) -> Verified:
    """Read every value and check its header against its name and its bytes.

    key: the deployment's, for signed and sealed values. Raises StoreUnavailableError, and
    ConfigError if the key is none or a package is missing for it.
    """
    found = Verified()
    codecs: dict[int, Callable[[str], Codec]] = {0: lambda _: PlainCodec()}
    if key is not None:
        codecs[FLAG_SIGNED] = TenantCodecs(Trust.SIGNED, key)
        codecs[FLAG_SEALED] = TenantCodecs(Trust.SEALED, key)
    places = asyncio.Semaphore(_READS_AT_ONCE)

    async def verify_one(value: StoredValue) -> None:
        try:
            await _verify_one(store, value, codecs, found)
        finally:
            places.release()

    async with task_group() as group:
        async for value in values_under(store, prefix):
            await places.acquire()
            group.create_task(verify_one(value))
    return found


async def _verify_one(
    store: Store,
    value: StoredValue,
    codecs: Mapping[int, Callable[[str], Codec]],
    found: Verified,
) -> None:
    digest = _digest_of(value.name)
    if digest is None:
        found.num_others += 1
        return
    try:
        content = await store.get(value.name, max_bytes=value.num_bytes)
    except StoreCorruptError as error:
        found.damaged.append((value.name, str(error)))
        return
    if content is None:
        found.num_gone += 1
        return
    flags = content[_FLAGS_AT] if len(content) > _FLAGS_AT else 0
    if flags in _KEYED and flags not in codecs:
        found.num_keyed += 1
        return
    codec = codecs.get(flags, codecs[0])(value.name.split(":")[_FINGERPRINT_FIELD])
    _check(found, value.name, bytearray(content), digest, codec)


def _digest_of(name: str) -> bytes | None:
    """The block digest in a name, None if it is not one of a block."""
    fields = name.split(":")
    try:
        digest = bytes.fromhex(fields[_DIGEST_FIELD])
    except (IndexError, ValueError):
        return None
    is_block = len(digest) == KEY_DIGEST_BYTES and len(fields) > _DIGEST_FIELD + 1
    return digest if is_block and fields[_DIGEST_FIELD + 1] != _TAILS else None


def _check(found: Verified, name: str, content: bytearray, digest: bytes, codec: Codec) -> None:
    at = codec.header_bytes
    header, payload = content[:at], memoryview(content)[at:]
    try:
        identity = read_identity(header)
        codec.decode(header, payload, identity)
        if identity.key_digest != digest:
            found.damaged.append((name, f"the value belongs to block {identity.key_digest.hex()}"))
            return
    except DamagedValueError as error:
        found.damaged.append((name, str(error)))
        return
    found.num_whole += 1


async def remove(
    store: Store, prefix: str, so_far: Callable[[int], object] = lambda _: None
) -> int:
    """Forget every value under `prefix`; how many there were, which `so_far` is told in between.

    Raises StoreUnavailableError.
    """
    names = [value.name async for value in values_under(store, prefix)]
    removed = 0
    for part in _parts(names):
        removed += await store.delete(part)
        so_far(removed)
    return removed


async def give_ttl(store: Store, prefix: str, ttl_s: float) -> int:
    """Let values that live for ever, which no node may remember, live for `ttl_s` from now on.

    Returns how many there were. A node that uses one of them touches it. StoreUnavailableError.
    """
    names = [value.name async for value in values_under(store, prefix) if value.expires_at is None]
    return sum([await store.touch(part, ttl_s=ttl_s) for part in _parts(names)])


def _parts(names: Sequence[str]) -> Sequence[Sequence[str]]:
    return [names[at : at + _PAGE] for at in range(0, len(names), _PAGE)]
