"""The listing of several stores that hold the same values, each value once."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.errors import BadRequestError, StoreUnavailableError
from tierkv.storage.presence import present
from tierkv.storage.protocol import ListPage, Store, StoredValue, Usage

_PAGE = 1000


async def list_union(
    stores: Sequence[Store], prefix: str, *, limit: int, cursor: str | None
) -> ListPage:
    """As `Store.list`: the values of the first store, then what only the second has, and so on. A
    page can be short, and empty.

    Raises StoreUnavailableError if the first store does not answer, or another no more. One that
    does not answer at all has nothing that could be read.
    """
    at_text, slash, inner = (cursor or "0/").partition("/")
    starts = [str(at) for at in range(len(stores))]
    if cursor == "" or not slash or at_text not in starts:
        raise BadRequestError(f"{(cursor or '')[:80]!r} is not a cursor of this store")
    at = starts.index(at_text)
    values: Sequence[StoredValue] = ()
    next_inner: str | None = None
    try:
        page = await stores[at].list(prefix, limit=limit, cursor=inner or None)
        values, next_inner = page.values, page.cursor
    except StoreUnavailableError:
        if at == 0 or inner:
            raise
    for earlier in stores[:at]:
        values = await _without_those_of(earlier, values)
    if next_inner is not None:
        return ListPage(tuple(values), f"{at}/{next_inner}")
    return ListPage(tuple(values), f"{at + 1}/" if at + 1 < len(stores) else None)


async def usage_of_union(stores: Sequence[Store], prefix: str) -> Usage:
    """As `Store.usage`, of what `list_union` lists."""
    first = await stores[0].usage(prefix)
    num_values, num_bytes = first.num_values, first.num_bytes
    cursor: str | None = "1/"
    while cursor is not None:
        page = await list_union(stores, prefix, limit=_PAGE, cursor=cursor)
        num_values += len(page.values)
        num_bytes += sum(value.num_bytes for value in page.values)
        cursor = page.cursor
    return Usage(num_values, num_bytes)


async def _without_those_of(store: Store, values: Sequence[StoredValue]) -> Sequence[StoredValue]:
    if not values:
        return values
    try:
        are_there = await present(store, [value.name for value in values])
    except StoreUnavailableError:
        return values
    return [value for value, is_there in zip(values, are_there, strict=True) if not is_there]
