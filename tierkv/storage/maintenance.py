"""Operations on a whole store: list, count, verify and remove values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.errors import StoreCorruptError, StoreUnavailableError
from tierkv.storage.codec import (
    FLAG_SEALED,
    FLAG_SIGNED,
    HEADER_BYTES,
    KEY_DIGEST_BYTES,
    SEALED_HEADER_BYTES,
    Codec,
    Damage,
    DamagedValueError,
    PlainCodec,
    TenantCodecs,
    Trust,
    ValueIdentity,
    check_fields,
    read_identity,
)
from tierkv.storage.protocol import Store, StoredValue, Usage
from tierkv.tasks import task_group

_PAGE = 1000
_MAX_PASSES = 4
# Deletions in one call, within a node's deadline of 0.3 s: a disk takes up to 1 ms for 2 MiB.
_DELETES_AT_ONCE = 64
_READS_AT_ONCE = 8
_MAX_VALUE_BYTES = 1 << 30
_FLAGS = slice(6, 8)
_FINGERPRINT_FIELD = 1
_DIGEST_FIELD = 2
_TAILS = "tails"  # in the place of a shard: the list of a block's tails
_TAILS_TOKENS = 0
_PARTIAL = "partial"
_KEYED_HEADER_BYTES = {FLAG_SIGNED: HEADER_BYTES, FLAG_SEALED: SEALED_HEADER_BYTES}

ValueFilter = Callable[[StoredValue], bool]


async def values_under(
    store: Store, prefix: str, is_selected: ValueFilter = lambda _: True
) -> AsyncIterator[StoredValue]:
    """Yield each value under `prefix` that `is_selected` accepts.

    A value may be yielded twice if other values are written or removed at the same time.

    Args:
        store: the store to list.
        prefix: start of the names, as in `Store.list`.
        is_selected: returns True for the values to yield.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    async for page in _pages_under(store, prefix, is_selected):
        for value in page:
            yield value


async def _pages_under(
    store: Store, prefix: str, is_selected: ValueFilter
) -> AsyncIterator[Sequence[StoredValue]]:
    """Yield pages of the values under `prefix` that `is_selected` accepts.

    The caller can remove the values of a page before it requests the next page.
    """
    cursor: str | None = None
    while True:
        page = await store.list(prefix, limit=_PAGE, cursor=cursor)
        if selected := [value for value in page.values if is_selected(value)]:
            yield selected
        cursor = page.cursor
        if cursor is None:
            return


async def usage_by_group(
    store: Store, prefix: str, is_selected: ValueFilter = lambda _: True
) -> dict[str, Usage]:
    """Return the number and the bytes of stored values for each kind of value and fingerprint.

    A name consists of fields, separated by colons. Values are counted together if the first two
    fields of their names are equal. The second field is the short fingerprint of a block's model
    and tenant, or the kind of another value, such as a ticket.

    Args:
        store: the store to list.
        prefix: start of the names, as in `Store.list`.
        is_selected: returns True for the values to count.

    Returns:
        The number and the bytes of values for each pair of fields; the fields are joined by a
            colon.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    groups: dict[str, Usage] = {}
    async for value in values_under(store, prefix, is_selected):
        group = ":".join(value.name.split(":", 2)[:2])
        total = groups.get(group, Usage(0, 0))
        groups[group] = Usage(total.num_values + 1, total.num_bytes + value.num_bytes)
    return groups


@dataclass(slots=True)
class Verified:
    """The result of `verify`.

    Attributes:
        num_whole: values without a fault.
        num_keyed: values with a correct header that cannot be checked fully without a tenant's key,
            which `verify` does not have.
        num_others: values that are not blocks, such as tickets and lists of tails.
        num_removed: values that were removed before they were read.
        damaged: names of damaged values, each with the reason.
        unread: names of values that could not be read although the store answers, each with the
            reason.
        kept: the reason why damaged values could not be removed; "" if there is none.
    """

    num_whole: int = 0
    num_keyed: int = 0
    num_others: int = 0
    num_removed: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    kept: str = ""


async def verify(
    store: Store,
    prefix: str,
    key: bytes | None = None,
    *,
    removes_damaged: bool = False,
) -> Verified:
    """Read every block under `prefix`, and compare its header with its name and its bytes.

    Args:
        store: a store that does not consist of several stores, because only one copy of each value
            is read.
        prefix: start of the names, as in `Store.list`.
        key: the deployment's key, for signed and sealed values; None if it is not known.
        removes_damaged: True to remove damaged values at the end.

    Returns:
        Counts, and the damaged and unread values.

    Raises:
        StoreUnavailableError: the store does not answer.
        ConfigError: the key is malformed, or a package that it needs is missing.
    """
    found = Verified()
    codecs = _codecs(key)
    places = asyncio.Semaphore(_READS_AT_ONCE)

    async def verify_one(name: str) -> None:
        try:
            await _verify_one(store, name, codecs, found)
        finally:
            places.release()

    async with task_group() as group:
        async for value in values_under(store, prefix):
            await places.acquire()
            group.create_task(verify_one(value.name))
    if removes_damaged:
        for part in _parts([name for name, _ in found.damaged]):
            try:
                await store.delete(part)
            except StoreUnavailableError as error:
                found.kept = str(error)
    return found


def _codecs(key: bytes | None) -> Mapping[int, Callable[[str], Codec]]:
    codecs: dict[int, Callable[[str], Codec]] = {0: lambda _: PlainCodec()}
    if key is not None:
        codecs[FLAG_SIGNED] = TenantCodecs(Trust.SIGNED, key)
        codecs[FLAG_SEALED] = TenantCodecs(Trust.SEALED, key)
    return codecs


async def _verify_one(
    store: Store, name: str, codecs: Mapping[int, Callable[[str], Codec]], found: Verified
) -> None:
    identity = _identity_in(name)
    if identity is None:
        found.num_others += 1
        return
    try:
        content = await store.get(name, max_bytes=_MAX_VALUE_BYTES)
        if content is None:
            found.num_removed += 1
            return
        is_keyed = _check(name, bytearray(content), identity, codecs)
    except StoreCorruptError as error:
        found.damaged.append((name, str(error)))
        return
    except StoreUnavailableError as error:
        await store.ping()
        found.unread.append((name, str(error).removeprefix(f"{name}: ")))
        return
    if identity.num_tokens == _TAILS_TOKENS:
        found.num_others += 1
    elif is_keyed:
        found.num_keyed += 1
    else:
        found.num_whole += 1


@dataclass(frozen=True, slots=True)
class _Identity:
    """The block whose bytes a value contains, according to the value's name.

    Attributes:
        digest: digest of the block, 32 bytes.
        num_tokens: number of tokens; None if the name does not contain it, as for a full block.
    """

    digest: bytes
    num_tokens: int | None


def _identity_in(name: str) -> _Identity | None:
    fields = name.split(":")
    try:
        digest = bytes.fromhex(fields[_DIGEST_FIELD])
        shard, *rest = fields[_DIGEST_FIELD + 1 :]
    except (IndexError, ValueError):
        return None
    if len(digest) != KEY_DIGEST_BYTES:
        return None
    if shard == _TAILS:
        return _Identity(digest, _TAILS_TOKENS)
    is_tail = len(rest) == 2 and rest[0] == _PARTIAL and rest[1].isdecimal()  # noqa: PLR2004
    return _Identity(digest, int(rest[1]) if is_tail else None)


def _check(
    name: str,
    content: bytearray,
    identity: _Identity,
    codecs: Mapping[int, Callable[[str], Codec]],
) -> bool:
    """Check that a stored value is intact and belongs to its name.

    Return True if the check is incomplete, because the value is signed or encrypted and its
    secret key is not given.
    """
    says = read_identity(content)
    if says.key_digest != identity.digest:
        raise DamagedValueError(
            Damage.KEY, f"the value belongs to another block, {says.key_digest.hex()}"
        )
    if identity.num_tokens not in (None, says.num_tokens):
        raise DamagedValueError(
            Damage.TOKENS, f"the value holds {says.num_tokens} tokens, not {identity.num_tokens}"
        )
    flags = int.from_bytes(content[_FLAGS], "little")
    if flags in _KEYED_HEADER_BYTES and flags not in codecs:
        _check_without_key(content, says, flags)
        return True
    codec = codecs.get(flags, codecs[0])(name.split(":")[_FINGERPRINT_FIELD])
    at = codec.header_bytes
    codec.check(content[:at], memoryview(content)[at:], says)
    return False


def _check_without_key(content: bytearray, says: ValueIdentity, flags: int) -> None:
    """Check the header of a signed or encrypted value without its key.

    DamagedValueError is also raised for an ordinary value whose header was changed to look signed
    or encrypted.
    """
    at = _KEYED_HEADER_BYTES[flags]
    header, payload = memoryview(content)[:at], memoryview(content)[at:]
    check_fields(header, payload.nbytes, says, flags=flags, header_bytes=at)
    content[_FLAGS] = bytes(2)
    try:
        PlainCodec().check(header, payload, says)
    except DamagedValueError:
        return
    raise DamagedValueError(Damage.VERSION, f"a plain value has the flags {flags:#x}")


async def remove(
    store: Store,
    prefix: str,
    on_progress: Callable[[int], object] = lambda _: None,
    is_selected: ValueFilter = lambda _: True,
) -> int:
    """Delete the values under `prefix` that `is_selected` accepts, and return their number.

    Args:
        store: the store to delete from.
        prefix: start of the names, as in `Store.list`.
        on_progress: called with the number of removed values after each batch.
        is_selected: returns True for the values to delete.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    removed = 0
    async for page in _pages_under(store, prefix, is_selected):
        for part in _parts([value.name for value in page]):
            removed += await store.delete(part)
            on_progress(removed)
    return removed


async def remove_all(store: Store, prefix: str, is_selected: ValueFilter = lambda _: True) -> int:
    """Delete the values under `prefix` that `is_selected` accepts, until a listing finds none.

    The listing is repeated because a slow server may carry out a write after the writer has
    disconnected. There are at most _MAX_PASSES listings, so values that are written all the time
    may be left.

    Args:
        store: the store to delete from.
        prefix: start of the names, as in `Store.list`.
        is_selected: returns True for the values to delete.

    Returns:
        The number of removed values.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    removed = 0
    for _ in range(_MAX_PASSES):
        count = await remove(store, prefix, is_selected=is_selected)
        removed += count
        if not count:
            break
    return removed


def _parts(names: Sequence[str]) -> Sequence[Sequence[str]]:
    return [names[at : at + _DELETES_AT_ONCE] for at in range(0, len(names), _DELETES_AT_ONCE)]
