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

    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST",
                path="/v1/resize",
                handler=self.resize,
                access=Access.ADMIN,
                summary="Change the capacity of the device or host tier while running.",
                body=ResizeBody,
                answer=TiersAnswer,
            ),
            Route(
                method="POST",
                path="/v1/reset",
                handler=self.reset,
                access=Access.ADMIN,
                summary="Forget all cached blocks that nobody holds; storage keeps its own.",
                answer=ResetAnswer,
                on_disconnect=Disconnect.DETACH,
            ),
            Route(
                method="GET",
                path="/v1/blocks",
                handler=self.blocks,
                access=Access.ADMIN,
                summary="List all cached blocks, of all tenants, in pages.",
                answer=BlocksAnswer,
                query=(("cursor", str), ("limit", Limit)),
            ),
            Route(
                method="DELETE",
                path="/v1/blocks",
                handler=self.free,
                access=Access.ADMIN,
                summary="As /v1/reset; with ?storage=true also what the common store has of this "
                "node's fingerprints, for all nodes that share it.",
                answer=ResetAnswer,
                query=(("storage", bool),),
            ),
            Route(
                method="GET",
                path="/v1/config",
                handler=self.config,
                access=Access.ADMIN,
                summary="The node's settings, secrets masked.",
                answer=ConfigAnswer,
            ),
            *self._tier_routes(),
        ]

    def _tier_routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/v1/tiers",
                handler=self.tiers,
                access=Access.READ,
                summary="Tell each tier's capacity and state.",
                answer=TiersAnswer,
            ),
            Route(
                method="PUT",
                path="/v1/tiers/storage",
                handler=self.attach,
                access=Access.ADMIN,
                summary="Use a store from now on, instead of the one there.",
                body=StorageBody,
                answer=TiersAnswer,
            ),
            Route(
                method="DELETE",
                path="/v1/tiers/storage",
                handler=self.detach,
                access=Access.ADMIN,
                summary="Go on without a store.",
                answer=TiersAnswer,
            ),
        ]

    async def reset(self, request: web.Request) -> web.Response:
        self._node.check_started()
        return bodies.answer(request, ResetAnswer(await self._node.service.forget()))

    async def free(self, request: web.Request) -> web.Response:
        async with self._node.work():
            chosen = bodies.from_query(request, _Free)
            service = self._node.service
            held = await service.forget()
            removed = await service.free(clears_storage=chosen.storage)
        return bodies.answer(request, ResetAnswer(held, removed))

    async def resize(self, request: web.Request) -> web.Response:
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
        return self._tiers(request)

    # What there is

    async def blocks(self, request: web.Request) -> web.Response:
        self._node.check_started()
        page = bodies.from_query(request, _Page)
        index = self._node.service.index
        return bodies.answer(request, self._listings.page(index, page.cursor, limit=page.limit))

    async def config(self, request: web.Request) -> web.Response:
        self._node.check_started()
        roots = self._node.service.roots()
        told = {space: digest.hex() for space, digest in roots.items()}
        return bodies.answer(request, ConfigAnswer(masked(self._node.settings), told))

    async def tiers(self, request: web.Request) -> web.Response:
        self._node.check_started()
        return self._tiers(request)

    async def attach(self, request: web.Request) -> web.Response:
        async with self._node.work():
            body = await self._read(request, StorageBody)
            try:
                await self._node.service.attach_storage(body.url)
            except ConfigError as error:
                raise BadRequestError(str(error)) from error
        return self._tiers(request)

    async def detach(self, request: web.Request) -> web.Response:
        self._node.check_started()
        self._node.service.detach_storage()
        return self._tiers(request)

    def _tiers(self, request: web.Request) -> web.Response:
        service = self._node.service
        stats, block_bytes = service.stats(), service.fingerprint.layout.block_bytes
        return bodies.answer(
            request,
            TiersAnswer(
                device=_tier(stats.device, block_bytes),
                host=_tier(stats.host, block_bytes),
                storage=[
                    msgspec.structs.replace(
                        state, url=masked_url(state.url), part=masked_url(state.part)
                    )
                    for state in service.storage_state()
                ],
            ),
        )


def _tier(pool: PoolStats, block_bytes: int) -> TierAnswer:
    return TierAnswer(capacity_blocks=pool.capacity, used_blocks=pool.used, block_bytes=block_bytes)
