"""The routes for operators of the node: tiers, blocks, configuration and quotas."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated
from uuid import uuid4

import msgspec
from aiohttp import web

from tierkv.api.metrics import Metrics
from tierkv.api.node import Node, Routes, refused
from tierkv.api.settings import masked
from tierkv.api.types import (
    BlockAnswer,
    BlocksAnswer,
    ConfigAnswer,
    QuotaAnswer,
    QuotaBody,
    ResetAnswer,
    ResizeBody,
    StorageBody,
    TierAnswer,
    TierName,
    TiersAnswer,
)
from tierkv.cache.index import Index
from tierkv.cache.node import CopyState, PoolStats, Tier
from tierkv.cache.node import TreeNode as IndexNode
from tierkv.errors import OutOfBlocksError
from tierkv.http import bodies
from tierkv.http.callers import Access
from tierkv.http.problems import UnknownIdError
from tierkv.http.route import Route, in_path
from tierkv.sched.events import CacheEvents
from tierkv.tasks import deadline

Limit = Annotated[int, msgspec.Meta(ge=1, le=1000)]
_TIERS = {TierName.DEVICE: Tier.DEVICE, TierName.HOST: Tier.HOST}


class _Page(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cursor: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    limit: Limit = 100


class _Free(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    storage: bool = False


class NodeRoutes(Routes):
    def __init__(self, node: Node, metrics: Metrics) -> None:
        super().__init__(node, metrics)
        self._listings = Listings()

    @Route("POST", "/v1/resize", Access.ADMIN, body=ResizeBody, answer=TiersAnswer)
    async def resize(self, request: web.BaseRequest) -> TiersAnswer:
        """Change the number of blocks of the device tier or the host tier while the node runs."""
        async with self._node.work():
            body = await self._node.bodies.read(request, ResizeBody)
            tier = _TIERS[body.tier]

            def late() -> OutOfBlocksError:
                capacity = self._node.service.tiers.slots.pools[tier].capacity
                return OutOfBlocksError(body.tier.value, needed=capacity - body.blocks, available=0)

            with refused():
                async with deadline(body.deadline_s, late):
                    await self._node.service.resize(tier, body.blocks)
        return self._tiers()

    @Route("POST", "/v1/reset", Access.ADMIN, answer=ResetAnswer)
    async def reset(self, _: web.BaseRequest) -> ResetAnswer:
        """Remove from device and host all blocks that no request or pin uses.

        Storage is unchanged.
        """
        self._node.check_started()
        return ResetAnswer(await self._node.service.forget())

    @Route(
        "GET",
        "/v1/blocks",
        Access.ADMIN,
        answer=BlocksAnswer,
        query=(("cursor", str), ("limit", Limit)),
    )
    async def blocks(self, request: web.BaseRequest) -> BlocksAnswer:
        """List the blocks of all tenants on device and host, in pages."""
        self._node.check_started()
        page = bodies.from_query(request, _Page)
        service = self._node.service
        return self._listings.page(service.index, service.events, page.cursor, limit=page.limit)

    @Route("DELETE", "/v1/blocks", Access.ADMIN, answer=ResetAnswer, query=(("storage", bool),))
    async def free(self, request: web.BaseRequest) -> ResetAnswer:
        """Remove from device and host all blocks that no request or pin uses.

        With ?storage=true, also delete the stored blocks of this node's fingerprints. Other nodes
        that share the store lose these blocks too.
        """
        async with self._node.work():
            chosen = bodies.from_query(request, _Free)
            service = self._node.service
            freed = await service.free(clears_storage=chosen.storage)
        return ResetAnswer(freed.held_copies, freed.removed_values)

    @Route("GET", "/v1/config", Access.ADMIN, answer=ConfigAnswer)
    async def config(self, _: web.BaseRequest) -> ConfigAnswer:
        """Return the node's settings, with passwords and other secrets masked."""
        self._node.check_started()
        roots = self._node.service.roots()
        digests = {space: digest.hex() for space, digest in roots.items()}
        return ConfigAnswer(masked(self._node.settings), digests)

    @Route("GET", "/v1/tiers", Access.READ, answer=TiersAnswer)
    async def tiers(self, _: web.BaseRequest) -> TiersAnswer:
        """Return each tier's capacity and use, and the state of each store."""
        self._node.check_started()
        return self._tiers()

    @Route("PUT", "/v1/tiers/storage", Access.ADMIN, body=StorageBody, answer=TiersAnswer)
    async def attach(self, request: web.BaseRequest) -> TiersAnswer:
        """Use another store as the storage tier, instead of the present one."""
        async with self._node.work():
            body = await self._node.bodies.read(request, StorageBody)
            with refused():
                await self._node.service.attach_storage(body.url)
        return self._tiers()

    @Route("DELETE", "/v1/tiers/storage", Access.ADMIN, answer=TiersAnswer)
    async def detach(self, _: web.BaseRequest) -> TiersAnswer:
        """Stop using the store; requests then run without a storage tier."""
        self._node.check_started()
        self._node.service.detach_storage()
        return self._tiers()

    def _tiers(self) -> TiersAnswer:
        service = self._node.service
        stats, block_bytes = service.stats(), service.fingerprint.layout.block_bytes
        return TiersAnswer(
            device=_tier(stats.device, block_bytes),
            host=_tier(stats.host, block_bytes),
            storage=self._stores(),
        )


def _tier(pool: PoolStats, block_bytes: int) -> TierAnswer:
    return TierAnswer(capacity_blocks=pool.capacity, used_blocks=pool.used, block_bytes=block_bytes)


MAX_LISTINGS = 16  # above it, the least recently read listing is dropped


@dataclass(slots=True)
class _Listing:
    pending: list[IndexNode]
    at: int = 0
    num_pages: int = 0
    page: BlocksAnswer | None = None


class Listings:
    """Listings of cached blocks that clients read in pages.

    The `MAX_LISTINGS` most recently read listings are kept. A cursor is the id of a page, and is
    valid only in this process. A block that is added, removed or moved while a client reads a
    listing may be missing in it, or be listed twice.
    """

    def __init__(self) -> None:
        self._listings: OrderedDict[str, _Listing] = OrderedDict()

    def page(
        self, index: Index, events: CacheEvents, cursor: str | None, *, limit: int
    ) -> BlocksAnswer:
        """Return a page of cached blocks.

        Args:
            index: The index of cached blocks.
            events: The node's cache events, which record the blocks that are in storage.
            cursor: Cursor from the page before; None for the first page.
            limit: Largest number of blocks on the page.

        Raises:
            UnknownIdError: The cursor is unknown, its listing is no longer kept, or a page after
                the cursor's page has been read.
        """
        if cursor is None:
            name = uuid4().hex
            listing = _Listing(
                [child for root in index.spaces.roots() for child in root.children.values()]
            )
        else:
            name, _, number = cursor.partition(".")
            found = self._listings.get(name)
            if found is None or number not in (str(found.num_pages), str(found.num_pages - 1)):
                raise UnknownIdError(
                    "this cursor has expired: start the listing again without a cursor"
                )
            listing = found
            if number == str(found.num_pages - 1) and found.page is not None:
                return found.page
        blocks = _next(index, events, listing, limit)
        listing.num_pages += 1
        listing.page = BlocksAnswer(
            blocks, f"{name}.{listing.num_pages}" if listing.pending else None
        )
        self._listings[name] = listing
        self._listings.move_to_end(name)
        while len(self._listings) > MAX_LISTINGS:
            self._listings.popitem(last=False)
        return listing.page


def _next(index: Index, events: CacheEvents, listing: _Listing, limit: int) -> list[BlockAnswer]:
    blocks: list[BlockAnswer] = []
    while listing.pending and len(blocks) < limit:
        node = listing.pending.pop()
        if _is_attached(node):
            stop = min(node.num_blocks, listing.at + limit - len(blocks))
            blocks += _block_answers(index, events, node, listing.at, stop)
            if stop < node.num_blocks:  # the page is full
                listing.pending.append(node)
                listing.at = stop
                break
            listing.pending += node.children.values()
        listing.at = 0
    return blocks


def _is_attached(node: IndexNode) -> bool:
    parent = node.parent
    return parent is not None and parent.children.get(node.key) is node


def _block_answers(
    index: Index, events: CacheEvents, node: IndexNode, start: int, stop: int
) -> list[BlockAnswer]:
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
            is_stored=bool(stored[i]) or (i < len(digests) and events.is_stored(digests[i])),
            is_held=node.holders > 0,
            hits=node.hits,
        )
        for i in range(stop - start)
    ]


_PATH = "/v1/quotas/{id}"  # a tenant's name


class QuotaRoutes(Routes):
    @Route("PUT", _PATH, Access.ADMIN, body=QuotaBody, answer=QuotaAnswer)
    async def put(self, request: web.BaseRequest) -> QuotaAnswer:
        """Limit the number of blocks that a tenant may have on each tier."""
        async with self._node.work():
            tenant = self._tenant(request)
            body = await self._node.bodies.read(request, QuotaBody)
            space = self._node.space(tenant)
            self._node.service.set_quota(space, (body.device_blocks, body.host_blocks))
        return self._answer(request, space)

    @Route("GET", _PATH, Access.ADMIN, answer=QuotaAnswer)
    async def get(self, request: web.BaseRequest) -> QuotaAnswer:
        """Return the largest number of blocks that a tenant may have on each tier."""
        self._node.check_started()
        return self._answer(request, self._known_space(request))

    @Route("DELETE", _PATH, Access.ADMIN, answer=QuotaAnswer)
    async def remove(self, request: web.BaseRequest) -> QuotaAnswer:
        """Remove the limits on a tenant's blocks."""
        self._node.check_started()
        space = self._known_space(request)
        self._node.service.set_quota(space, (None, None))
        return self._answer(request, space)

    def _tenant(self, request: web.BaseRequest) -> str:
        return bodies.check_id(in_path(request, "id"), "the tenant")

    def _known_space(self, request: web.BaseRequest) -> str:
        space = self._node.service.tenants.known_space_of(self._tenant(request))
        if space is None:
            raise UnknownIdError(
                "this tenant has no quota here and has sent no request: check its name"
            )
        return space

    def _answer(self, request: web.BaseRequest, space: str) -> QuotaAnswer:
        service = self._node.service
        device, host = service.quota_of(space)
        return QuotaAnswer(
            tenant=self._tenant(request),
            stored_under=service.stored_under(space),
            device_blocks=device,
            host_blocks=host,
        )
