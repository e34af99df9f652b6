"""The routes of prefetches."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote

from aiohttp import web

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.prefetches import Prefetch
from tierkv.api.route import Disconnect, Route
from tierkv.api.routes_base import Routes, principal_of
from tierkv.api.routes_requests import content_of
from tierkv.api.types_cache import PrefetchAnswer, PrefetchBody

_PATH = "/v1/prefetches/{id}"


class PrefetchRoutes(Routes):
    @Route(
        "POST",
        "/v1/prefetches",
        Access.WRITE,
        body=PrefetchBody,
        answer=PrefetchAnswer,
        status=HTTPStatus.ACCEPTED,
        on_disconnect=Disconnect.DETACH,
    )
    async def begin(self, request: web.Request) -> web.Response:
        """Begin to bring what storage has of a prompt to the host."""
        node = self._node
        async with node.work():
            body = await self._read(request, PrefetchBody)
            prompt = self._prompt(request, body)
            key = (principal_of(request).tenant, self._name(request, body.request_id))
            prefetch = await node.prefetches.begin(
                key, content_of(body, prompt.tokens), prompt, deadline_s=body.deadline_s
            )
        response = bodies.answer(request, _answer(prefetch), status=HTTPStatus.ACCEPTED)
        response.headers["Location"] = "/v1/prefetches/" + quote(key[1], safe="")
        return response

    @Route("GET", _PATH, Access.WRITE, answer=PrefetchAnswer)
    async def look(self, request: web.Request) -> PrefetchAnswer:
        """Tell how a prefetch stands."""
        self._node.check_started()
        return _answer(self._node.prefetches.find(self._key(request)))

    @Route("DELETE", _PATH, Access.WRITE, answer=PrefetchAnswer)
    async def cancel(self, request: web.Request) -> PrefetchAnswer:
        """Give a prefetch up."""
        self._node.check_started()
        prefetch = self._node.prefetches.find(self._key(request))
        self._node.prefetches.cancel(prefetch)
        return _answer(prefetch)


def _answer(prefetch: Prefetch) -> PrefetchAnswer:
    return PrefetchAnswer(
        prefetch_id=prefetch.key[1],
        state=prefetch.state,
        prompt_tokens=prefetch.prompt_tokens,
        first_token=prefetch.tokens.start,
        fetched_tokens=len(prefetch.tokens),
        problem=prefetch.problem,
    )
