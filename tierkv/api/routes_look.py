"""The routes that look something up for a prompt and change nothing."""

from __future__ import annotations

import msgspec
from aiohttp import web

from tierkv.api.access import Access
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes, principal_of
from tierkv.api.types import LookupAnswer, LookupBody
from tierkv.cache.keys import Prompt
from tierkv.sched.explain import Explanation, Miss


class LookRoutes(Routes):
    @Route("POST", "/v1/lookup", Access.READ, body=LookupBody, answer=LookupAnswer)
    async def lookup(self, request: web.Request) -> LookupAnswer:
        """Tell where a prompt's leading tokens are cached."""
        async with self._node.work():
            body = await self._read(request, LookupBody)
            request_id = self._name(request, body.request_id)
            found = await self._node.service.lookup(self._prompt(request, body))
        return LookupAnswer.of(request_id, found)

    @Route("POST", "/v1/explain", Access.READ, body=LookupBody, answer=Explanation)
    async def explain(self, request: web.Request) -> Explanation:
        """Tell which block of a prompt is where, what is missing first, and why."""
        async with self._node.work():
            body = await self._read(request, LookupBody)
            self._name(request, body.request_id)
            return await self._explain(request, self._prompt(request, body))

    @Route("GET", "/v1/requests/{id}/explain", Access.WRITE, answer=Explanation)
    async def explain_request(self, request: web.Request) -> Explanation:
        """Explain what of a running request's prompt is cached now."""
        async with self._node.call():
            return await self._explain(request, self._held(request).running().whole_prompt)

    async def _explain(self, request: web.Request, prompt: Prompt) -> Explanation:
        """What others have cached is told to those only who may see the blocks of all."""
        is_admin = principal_of(request).access >= Access.ADMIN
        found = await self._node.service.explain_with_storage(
            prompt,
            deadline_s=self._node.settings.handoff.lookup_deadline_s,
            names_fields=is_admin,
        )
        if is_admin or found.reason != Miss.OTHER_FINGERPRINT.value:
            return found
        return msgspec.structs.replace(found, reason=Miss.NEVER_STORED.value, detail="")
