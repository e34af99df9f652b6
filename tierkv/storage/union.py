"""The listing of several stores that hold the same values, each value once."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.errors import BadRequestError, StoreUnavailableError
from tierkv.storage.base import present
from tierkv.storage.protocol import ListPage, Store, StoredValue, Usage

_PAGE = 1000
# What became of each store before the one that is listed now, in a cursor.
_LISTED, _SILENT = "+", "-"


async def list_union(
    stores: Sequence[Store],
    prefix: str,
    *,
    limit: int,
    cursor: str | None,
    needs_first: bool = False,
) -> ListPage:
    """As `Store.list`: the values of the first store, then what only the second has, and so on. A
    page can be short, and empty.

    Raises StoreUnavailableError if no store answers, if one does not any more, or, with
    `needs_first`, if the first does not. Another one that does not answer at all has nothing that
    could be read.
    """
    passed, slash, inner = "/".partition("/") if cursor is None else cursor.partition("/")
    if not slash or len(passed) >= len(stores) or set(passed) - {_LISTED, _SILENT}:
        raise BadRequestError(f"{(cursor or '')[:80]!r} is not a cursor of this store")
    for at in range(len(passed), len(stores)):
        try:
            page = await stores[at].list(prefix, limit=limit, cursor=inner or None)
        except StoreUnavailableError:
            is_last_hope = _LISTED not in passed and at + 1 == len(stores)
            if inner or is_last_hope or (needs_first and at == 0):
                raise
            passed += _SILENT
            continue
        values: Sequence[StoredValue] = page.values
        for earlier, how in zip(stores[:at], passed, strict=True):
            if how == _LISTED:  # one that was silent, and is back, was not listed
                values = await _without_those_of(earlier, values)
        if page.cursor is not None:
            return ListPage(tuple(values), f"{passed}/{page.cursor}")
        passed += _LISTED
        return ListPage(tuple(values), f"{passed}/" if at + 1 < len(stores) else None)
    return ListPage((), None)


async def usage_of_union(
    stores: Sequence[Store], prefix: str, *, needs_first: bool = False
) -> Usage:
    """As `Store.usage`, of what `list_union` lists."""
    num_values = num_bytes = 0
    cursor: str | None = None
    while True:
        page = await list_union(stores, prefix, limit=_PAGE, cursor=cursor, needs_first=needs_first)
        num_values += len(page.values)
        num_bytes += sum(value.num_bytes for value in page.values)
        if (cursor := page.cursor) is None:
            return Usage(num_values, num_bytes)


async def _without_those_of(store: Store, values: Sequence[StoredValue]) -> Sequence[StoredValue]:
    if not values:
        return values
    try:
        are_there = await present(store, [value.name for value in values])
    except StoreUnavailableError:
        return values
    return [value for value, is_there in zip(values, are_there, strict=True) if not is_there]
