"""The routes that look something up for a prompt and change nothing."""

from __future__ import annotations

import msgspec
from aiohttp import web

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes
from tierkv.api.types import LookupAnswer, LookupBody
from tierkv.cache.keys import Prompt
from tierkv.sched.explain import Explanation, Miss


class LookRoutes(Routes):
    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST",
                path="/v1/lookup",
                handler=self.lookup,
                access=Access.READ,
                summary="Tell where a prompt's leading tokens are cached.",
                body=LookupBody,
                answer=LookupAnswer,
            ),
            Route(
                method="POST",
                path="/v1/explain",
                handler=self.explain,
                access=Access.READ,
                summary="Tell which block of a prompt is where, what is missing first, and why.",
                body=LookupBody,
                answer=Explanation,
            ),
            Route(
                method="GET",
                path="/v1/requests/{id}/explain",
                handler=self.explain_request,
                access=Access.WRITE,
                summary="Explain what of a running request's prompt is cached now.",
                answer=Explanation,
            ),
        ]

    async def lookup(self, request: web.Request) -> web.Response:
        async with self._node.work():
            body = await self._read(request, LookupBody)
            request_id = self._name(request, body.request_id)
            found = await self._node.service.lookup(self._prompt(request, body))
        return bodies.answer(request, LookupAnswer.of(request_id, found))

    async def explain(self, request: web.Request) -> web.Response:
        async with self._node.work():
            body = await self._read(request, LookupBody)
            self._name(request, body.request_id)
            answer = await self._explain(self._prompt(request, body))
        return bodies.answer(request, answer)

    async def explain_request(self, request: web.Request) -> web.Response:
        async with self._node.call():
            answer = await self._explain(self._held(request).running().whole_prompt)
        return bodies.answer(request, answer)

    async def _explain(self, prompt: Prompt) -> Explanation:
        """What others have cached is no fact of the caller's, so it is not told here."""
        deadline_s = self._node.settings.handoff.lookup_deadline_s
        found = await self._node.service.explain_with_storage(prompt, deadline_s=deadline_s)
        if found.reason != Miss.OTHER_FINGERPRINT.value:
            return found
        return msgspec.structs.replace(found, reason=Miss.NEVER_STORED.value, detail="")
