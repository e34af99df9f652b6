"""No tenant learns of another's cache, requests, pins, prefetches or tickets, on any tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.guarded import Callers, Guarded, callers_in, guarded
from tests.api.nodes import Answer, compute
from tierkv.http.callers import RoleName, ticket_name

Json = dict[str, Any]


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return callers_in(tmp_path)


class Tenant:
    def __init__(self, on: Guarded, token: str, name: str = "") -> None:
        self._on, self._name = on, name
        self._headers = {"Authorization": f"Bearer {token}"}

    async def ask(self, method: str, path: str, body: Json | None = None) -> Answer:
        return await self._on.client.ask(method, path, json=body, headers=self._headers)

    async def cache(self, tokens: list[int], ticket_id: str | None = None) -> None:
        """Leave `tokens` in the cache, and in storage if there is a ticket."""
        await compute(self._on.node, tokens, tenant=self._name, ticket_id=ticket_id)

    async def forget_all(self) -> None:
        """Of an administrator: what a copy on its way down holds is forgotten when it is done."""
        while (await self.ask("POST", "/v1/reset")).body["held_copies"]:
            pass

    async def found(self, tokens: list[int]) -> tuple[int, int, int]:
        body = (await self.ask("POST", "/v1/lookup", {"tokens": tokens})).body
        return body["device_tokens"], body["host_tokens"], body["storage_tokens"]


@pytest.mark.parametrize(
    "num_pairs", [10, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
async def test_one_tenants_blocks_are_never_anothers_hit_on_any_tier(
    num_pairs: int, callers: Callers
) -> None:
    tokens = [await callers.token(RoleName.WRITE, name) for name in ("one", "two")]
    admin_token = await callers.token(RoleName.ADMIN)
    async with guarded(callers) as on:
        one, two = (Tenant(on, *pair) for pair in zip(tokens, ("one", "two"), strict=True))
        admin = Tenant(on, admin_token)
        for pair in range(num_pairs):
            prompt = [pair % 251, pair // 251, *range(46)]
            await one.cache(prompt, f"t{pair}")
            assert await one.found(prompt) == (48, 0, 0)  # the paired check: same tenant, a hit
            assert await two.found(prompt) == (0, 0, 0)
            assert await admin.found(prompt) == (0, 0, 0)
            await admin.forget_all()
            assert await one.found(prompt) == (0, 0, 48)
            assert await two.found(prompt) == (0, 0, 0)
            body: Json = {"tokens": prompt, "request_id": f"p{pair}"}
            await one.ask("POST", "/v1/prefetches", body)
            while (await one.ask("GET", f"/v1/prefetches/p{pair}")).body["state"] == "running":
                pass
            assert await one.found(prompt) == (0, 48, 0)
            assert await two.found(prompt) == (0, 0, 0)
            told = (await two.ask("POST", "/v1/explain", {"tokens": prompt})).body
            assert (told["runs"], told["reason"]) == ([], "never stored")
            assert told["detail"] == ""
            told = (await admin.ask("POST", "/v1/explain", {"tokens": prompt})).body
            assert (told["runs"], told["reason"]) == ([], "fingerprint differs")
            assert "tenant" in told["detail"]
            answer = await two.ask("POST", "/v1/generate", {"tokens": prompt, "max_tokens": 1})
            assert answer.body["computed_tokens"] == len(prompt)
            await admin.forget_all()
        assert on.node.service.verify() == []


async def test_what_a_tenant_has_is_not_there_for_another(callers: Callers) -> None:
    tokens = [await callers.token(RoleName.WRITE, name) for name in ("one", "two", "")]
    async with guarded(callers) as on:
        one, two, none = (
            Tenant(on, *pair) for pair in zip(tokens, ("one", "two", ""), strict=True)
        )
        prompt = list(range(48))
        await one.cache(prompt, "t")
        await one.ask("PUT", "/v1/pins/p", {"tokens": prompt})
        await one.ask("POST", "/v1/prefetches", {"tokens": prompt, "request_id": "f"})
        private = (
            ("DELETE", "/v1/requests/r"),
            ("GET", "/v1/pins/p"),
            ("DELETE", "/v1/pins/p"),
            ("GET", "/v1/prefetches/f"),
            ("DELETE", "/v1/prefetches/f"),
            ("GET", "/v1/tickets/t"),
            ("POST", "/v1/tickets/t/ack"),
            ("DELETE", "/v1/tickets/t"),
        )
        for other in (two, none):
            for method, path in private:
                answer = await other.ask(method, path)
                assert (answer.status, answer.code) == (404, "unknown_id"), (method, path)
            assert (await other.ask("GET", "/v1/pins")).body == {"pins": []}
            claim = {"tokens": prompt, "ticket_id": "t", "deadline_s": 1.0}
            refused = await other.ask("POST", "/v1/decode", claim)
            assert (refused.status, refused.body["reason"]) == (503, "not_yet")
        for method, path in private:
            if method == "GET":
                assert (await one.ask(method, path)).status == 200, path
        await one.ask("DELETE", "/v1/pins/p")
        crafted = ticket_name("t", "one")
        refused = await none.ask("GET", f"/v1/tickets/{crafted}")
        assert (refused.status, refused.code) == (400, "bad_request")


async def test_tickets_of_the_same_id_are_each_tenants_own(callers: Callers) -> None:
    names = ("one", "two")
    tokens = [await callers.token(RoleName.WRITE, name) for name in names]
    prompts = [list(range(48)), list(range(100, 141))]
    async with guarded(callers) as on:
        tenants = [Tenant(on, *pair) for pair in zip(tokens, names, strict=True)]
        for tenant, prompt in zip(tenants, prompts, strict=True):
            await tenant.ask("POST", "/v1/prefill", {"tokens": prompt, "ticket_id": "same"})
        for at, (tenant, prompt) in enumerate(zip(tenants, prompts, strict=True)):
            body = {"ticket_id": "same", "deadline_s": 5, "max_tokens": 2}
            other = await tenant.ask("POST", "/v1/decode", body | {"tokens": prompts[1 - at]})
            assert (other.status, other.body["reason"]) == (409, "other_prompt")
            claimed = await tenant.ask("POST", "/v1/decode", body | {"tokens": prompt})
            assert (claimed.status, claimed.body["computed_tokens"]) == (200, 0)
            assert (await tenant.ask("DELETE", "/v1/tickets/same")).status == 200
        assert on.node.service.verify() == []
