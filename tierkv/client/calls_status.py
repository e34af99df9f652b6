"""Calls that ask how a node is."""

from __future__ import annotations

import msgspec

from tierkv.api.types import LiveAnswer, ReadyAnswer, VerifyAnswer, VersionAnswer
from tierkv.client import routes
from tierkv.client.calls import Calls, Question
from tierkv.client.errors import NotANodeError
from tierkv.observe import Stats

_VERBOSE = Question(query="?verbose")


class StatusCalls(Calls):
    async def livez(self) -> LiveAnswer:
        """An answer at all is the point."""
        return await self._call(routes.LIVEZ)

    async def readyz(self) -> ReadyAnswer:
        """With each part of the node. Raises NotReadyError if the node takes no requests now."""
        return await self._call(routes.READYZ, _VERBOSE)

    async def healthz(self) -> ReadyAnswer:
        """The same as `readyz`, under the name that some balancers ask for."""
        return await self._call(routes.HEALTHZ, _VERBOSE)

    async def version(self) -> VersionAnswer:
        return await self._call(routes.VERSION)

    async def metrics(self) -> str:
        """What Prometheus scrapes, in its text format."""
        question = Question(headers={"Accept": "text/plain"})
        return (await self._call(routes.METRICS, question)).decode("utf-8", "replace")

    async def stats(self) -> Stats:
        return await self._call(routes.STATS)

    async def verify(self) -> VerifyAnswer:
        """Let the node recount its blocks and leases."""
        return await self._call(routes.VERIFY)

    async def openapi(self) -> dict[str, object]:
        """The OpenAPI document of this node's routes."""
        raw = await self._call(routes.OPENAPI, Question(headers={"Accept": "application/json"}))
        try:
            return msgspec.json.decode(raw, type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotANodeError(f"the document cannot be read: {error}", status=200) from error
