"""The routes for who runs the node: tiers, blocks and configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.listing import Listings
from tierkv.api.masked import masked, masked_url
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.refusals import WrongStateError
from tierkv.api.route import Disconnect, Route
from tierkv.api.routes_base import Routes
from tierkv.api.types_node import (
    BlocksAnswer,
    ConfigAnswer,
    ResetAnswer,
    ResizeBody,
    StorageBody,
    TierAnswer,
    TierName,
    TiersAnswer,
)
from tierkv.cache.node import Tier
from tierkv.cache.pool import PoolStats
from tierkv.errors import BadRequestError, ConfigError, OutOfBlocksError, OwnershipError
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
    async def resize(self, request: web.Request) -> TiersAnswer:
        """Change the capacity of the device or host tier while running."""
        async with self._node.work():
            body = await self._read(request, ResizeBody)
            tier = _TIERS[body.tier]

            def late() -> OutOfBlocksError:
                capacity = self._node.service.tiers.pools[tier].capacity
                return OutOfBlocksError(body.tier.value, needed=capacity - body.blocks, available=0)

            try:
                async with deadline(body.deadline_s, late):
                    await self._node.service.resize(tier, body.blocks)
            except ConfigError as error:
                raise BadRequestError(str(error)) from error
            except OwnershipError as error:
                raise WrongStateError(str(error)) from error
        return self._tiers()

    @Route("POST", "/v1/reset", Access.ADMIN, answer=ResetAnswer, on_disconnect=Disconnect.DETACH)
    async def reset(self, _: web.Request) -> ResetAnswer:
        """Forget all cached blocks that nobody holds; storage keeps its own."""
        self._node.check_started()
        return ResetAnswer(await self._node.service.forget())

    @Route(
        "GET",
        "/v1/blocks",
        Access.ADMIN,
        answer=BlocksAnswer,
        query=(("cursor", str), ("limit", Limit)),
    )
    async def blocks(self, request: web.Request) -> BlocksAnswer:
        """List all cached blocks, of all tenants, in pages."""
        self._node.check_started()
        page = bodies.from_query(request, _Page)
        index = self._node.service.index
        return self._listings.page(index, page.cursor, limit=page.limit)

    @Route("DELETE", "/v1/blocks", Access.ADMIN, answer=ResetAnswer, query=(("storage", bool),))
    async def free(self, request: web.Request) -> ResetAnswer:
        """As /v1/reset; with ?storage=true also what the common store has of this node's
        fingerprints, for all nodes that share it."""
        async with self._node.work():
            chosen = bodies.from_query(request, _Free)
            service = self._node.service
            held = await service.forget()
            removed = await service.free(clears_storage=chosen.storage)
        return ResetAnswer(held, removed)

    @Route("GET", "/v1/config", Access.ADMIN, answer=ConfigAnswer)
    async def config(self, _: web.Request) -> ConfigAnswer:
        """The node's settings, secrets masked."""
        self._node.check_started()
        roots = self._node.service.roots()
        told = {space: digest.hex() for space, digest in roots.items()}
        return ConfigAnswer(masked(self._node.settings), told)

    @Route("GET", "/v1/tiers", Access.READ, answer=TiersAnswer)
    async def tiers(self, _: web.Request) -> TiersAnswer:
        """Tell each tier's capacity and state."""
        self._node.check_started()
        return self._tiers()

    @Route("PUT", "/v1/tiers/storage", Access.ADMIN, body=StorageBody, answer=TiersAnswer)
    async def attach(self, request: web.Request) -> TiersAnswer:
        """Use a store from now on, instead of the one there."""
        async with self._node.work():
            body = await self._read(request, StorageBody)
            try:
                await self._node.service.attach_storage(body.url)
            except ConfigError as error:
                raise BadRequestError(str(error)) from error
        return self._tiers()

    @Route("DELETE", "/v1/tiers/storage", Access.ADMIN, answer=TiersAnswer)
    async def detach(self, _: web.Request) -> TiersAnswer:
        """Go on without a store."""
        self._node.check_started()
        self._node.service.detach_storage()
        return self._tiers()

    def _tiers(self) -> TiersAnswer:
        service = self._node.service
        stats, block_bytes = service.stats(), service.fingerprint.layout.block_bytes
        return TiersAnswer(
            device=_tier(stats.device, block_bytes),
            host=_tier(stats.host, block_bytes),
            storage=[
                msgspec.structs.replace(
                    state, url=masked_url(state.url), part=masked_url(state.part)
                )
                for state in service.storage_state()
            ],
        )


def _tier(pool: PoolStats, block_bytes: int) -> TierAnswer:
    return TierAnswer(capacity_blocks=pool.capacity, used_blocks=pool.used, block_bytes=block_bytes)
