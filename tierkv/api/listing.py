"""Listings of all cached blocks in pages, none of which looks at more blocks than it tells of."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from uuid import uuid4

from tierkv.api.refusals import UnknownIdError
from tierkv.api.types_node import BlockAnswer, BlocksAnswer
from tierkv.cache.copies import CopyState
from tierkv.cache.index import Index
from tierkv.cache.node import Node, Tier

MOST_LISTINGS = 16  # the one asked longest ago is given up for another one


@dataclass(slots=True)
class _Listing:
    """pending: nodes still to tell of, the last one next. at: blocks of it that were told.

    page: the last one, so that a client that lost it can ask again.
    """

    pending: list[Node]
    at: int = 0
    num_pages: int = 0
    page: BlocksAnswer | None = None


class Listings:
    """Cursors belong to this object. Blocks that come, go or move apart while a listing is under
    way may be missing from it, or be told twice."""

    def __init__(self) -> None:
        self._listings: OrderedDict[str, _Listing] = OrderedDict()

    def page(self, index: Index, cursor: str | None, *, limit: int) -> BlocksAnswer:
        """Up to `limit` blocks. Raises UnknownIdError if the cursor is of no listing under way."""
        if cursor is None:
            name = uuid4().hex
            listing = _Listing([child for root in index.roots() for child in _children(root)])
        else:
            name, _, number = cursor.partition(".")
            found = self._listings.get(name)
            if found is None or number not in (str(found.num_pages), str(found.num_pages - 1)):
                raise UnknownIdError("this cursor is not known any more: begin a new listing")
            listing = found
            if number == str(found.num_pages - 1) and found.page is not None:
                return found.page
        blocks = _next(index, listing, limit)
        listing.num_pages += 1
        listing.page = BlocksAnswer(
            blocks, f"{name}.{listing.num_pages}" if listing.pending else None
        )
        self._listings[name] = listing
        self._listings.move_to_end(name)
        while len(self._listings) > MOST_LISTINGS:
            self._listings.popitem(last=False)
        return listing.page


def _next(index: Index, listing: _Listing, limit: int) -> list[BlockAnswer]:
    blocks: list[BlockAnswer] = []
    while listing.pending and len(blocks) < limit:
        node = listing.pending[-1]
        if not _is_there(node):
            listing.pending.pop()
            listing.at = 0
            continue
        stop = min(node.num_blocks, listing.at + limit - len(blocks))
        blocks += _told(index, node, listing.at, stop)
        listing.at = stop
        if stop >= node.num_blocks:
            listing.pending.pop()
            listing.at = 0
            listing.pending.extend(_children(node))
    return blocks


def _children(node: Node) -> list[Node]:
    return list(node.children.values())


def _is_there(node: Node) -> bool:
    parent = node.parent
    return parent is not None and parent.children.get(node.key) is node


def _told(index: Index, node: Node, start: int, stop: int) -> list[BlockAnswer]:
    device, host = (node.copies[tier].states[start:stop].tolist() for tier in Tier)
    stored = node.stored_in(start, stop).tolist()
    first = node.start + start
    digests = [] if node.is_tail else index.digests(node, node.start + stop, start=first)
    return [
        BlockAnswer(
            digest=digests[i].hex() if i < len(digests) else "",
            space=node.space.name,
            index=first + i,
            is_tail=node.is_tail,
            device=CopyState(device[i]).name.lower(),
            host=CopyState(host[i]).name.lower(),
            is_stored=bool(stored[i]),
            is_held=node.holders > 0,
            hits=node.hits,
        )
        for i in range(stop - start)
    ]
