"""The routes of quotas: how much of the device and host tiers a tenant may have."""

from __future__ import annotations

from aiohttp import web

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.refusals import UnknownIdError
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes
from tierkv.api.types_node import QuotaAnswer, QuotaBody

_PATH = "/v1/quotas/{id}"  # a tenant's name


class QuotaRoutes(Routes):
    @Route("PUT", _PATH, Access.ADMIN, body=QuotaBody, answer=QuotaAnswer)
    async def put(self, request: web.Request) -> QuotaAnswer:
        """Limit what a tenant has cached and in use."""
        async with self._node.work():
            tenant = self._tenant(request)
            body = await self._read(request, QuotaBody)
            space = self._node.space(tenant)
            self._node.service.set_quota(space, (body.device_blocks, body.host_blocks))
        return self._answer(request, space)

    @Route("GET", _PATH, Access.ADMIN, answer=QuotaAnswer)
    async def look(self, request: web.Request) -> QuotaAnswer:
        """Tell a tenant's quota; null is no limit."""
        self._node.check_started()
        return self._answer(request, self._known_space(request))

    @Route("DELETE", _PATH, Access.ADMIN, answer=QuotaAnswer)
    async def remove(self, request: web.Request) -> QuotaAnswer:
        """Let a tenant have as much as there is."""
        self._node.check_started()
        space = self._known_space(request)
        self._node.service.set_quota(space, (None, None))
        return self._answer(request, space)

    def _tenant(self, request: web.Request) -> str:
        return bodies.check_id(request.match_info["id"], "the tenant")

    def _known_space(self, request: web.Request) -> str:
        """Looking opens no space. Raises UnknownIdError."""
        space = self._node.service.tenants.known_space_of(self._tenant(request))
        if space is None:
            raise UnknownIdError("no such tenant has asked for anything here, or was given a quota")
        return space

    def _answer(self, request: web.Request, space: str) -> QuotaAnswer:
        service = self._node.service
        device, host = service.quota_of(space)
        return QuotaAnswer(
            tenant=self._tenant(request),
            stored_under=service.stored_under(space),
            device_blocks=device,
            host_blocks=host,
        )
