"""No tenant learns of another's cache, requests, pins, prefetches or tickets, on any tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.guarded import Callers, Guarded, callers_in, guarded
from tests.api.nodes import Answer
from tierkv.http.callers import RoleName, ticket_name

Json = dict[str, Any]


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return callers_in(tmp_path)


class Tenant:
    def __init__(self, on: Guarded, token: str) -> None:
        self._on = on
        self._headers = {"Authorization": f"Bearer {token}"}

    async def ask(self, method: str, path: str, body: Json | None = None) -> Answer:
        return await self._on.client.ask(method, path, json=body, headers=self._headers)

    async def cache(self, tokens: list[int], name: str, ticket_id: str | None = None) -> None:
        """Compute `tokens` and leave them in the cache, and in storage if there is a ticket."""
        body = {"tokens": tokens, "request_id": name}
        assert (await self.ask("POST", "/v1/requests", body)).status == 200
        assert (await self.ask("POST", f"/v1/requests/{name}/commit")).status == 200
        if ticket_id is not None:
            publish = {"ticket_id": ticket_id}
            answer = await self.ask("POST", f"/v1/requests/{name}/publish", publish)
            assert answer.status == 200
        assert (await self.ask("POST", f"/v1/requests/{name}/finish")).status == 200

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
        one, two = (Tenant(on, token) for token in tokens)
        admin = Tenant(on, admin_token)
        for pair in range(num_pairs):
            prompt = [pair % 251, pair // 251, *range(46)]
            await one.cache(prompt, f"r{pair}", f"t{pair}")
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
            admitted = await two.ask(
                "POST", "/v1/requests", {"tokens": prompt, "request_id": f"x{pair}"}
            )
            assert admitted.body["cached_tokens"] == 0
            await two.ask("DELETE", f"/v1/requests/x{pair}")
            told = (await two.ask("POST", "/v1/explain", {"tokens": prompt})).body
            assert (told["runs"], told["reason"]) == ([], "never stored")
            assert told["detail"] == ""
            told = (await admin.ask("POST", "/v1/explain", {"tokens": prompt})).body
            assert (told["runs"], told["reason"]) == ([], "fingerprint differs")
            assert "tenant" in told["detail"]
            await admin.forget_all()
        assert on.node.service.verify() == []


async def test_what_a_tenant_has_is_not_there_for_another(callers: Callers) -> None:
    tokens = [await callers.token(RoleName.WRITE, name) for name in ("one", "two", "")]
    async with guarded(callers) as on:
        one, two, none = (Tenant(on, token) for token in tokens)
        prompt = list(range(48))
        await one.cache(prompt, "r0", "t")
        await one.ask("POST", "/v1/requests", {"tokens": prompt, "request_id": "r"})
        await one.ask("PUT", "/v1/pins/p", {"tokens": prompt})
        await one.ask("POST", "/v1/prefetches", {"tokens": prompt, "request_id": "f"})
        private = (
            ("GET", "/v1/requests/r"),
            ("POST", "/v1/requests/r/commit"),
            ("POST", "/v1/requests/r/finish"),
            ("POST", "/v1/requests/r/publish"),
            ("POST", "/v1/requests/r/preempt"),
            ("DELETE", "/v1/requests/r"),
            ("GET", "/v1/requests/r/explain"),
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
            refused = await other.ask("POST", "/v1/claims", claim)
            assert (refused.status, refused.body["reason"]) == (503, "not_yet")
        for method, path in private[:1] + private[7:8] + private[9:10] + private[11:12]:
            assert (await one.ask(method, path)).status == 200, path
        same_id = await two.ask("POST", "/v1/requests", {"tokens": prompt, "request_id": "r"})
        assert same_id.body["cached_tokens"] == 0
        for tenant in (one, two):
            assert (await tenant.ask("DELETE", "/v1/requests/r")).status == 200
        await one.ask("DELETE", "/v1/pins/p")
        crafted = ticket_name("t", "one")
        refused = await none.ask("GET", f"/v1/tickets/{crafted}")
        assert (refused.status, refused.code) == (400, "bad_request")


async def test_tickets_of_the_same_id_are_each_tenants_own(callers: Callers) -> None:
    tokens = [await callers.token(RoleName.WRITE, name) for name in ("one", "two")]
    prompts = [list(range(48)), list(range(100, 141))]
    async with guarded(callers) as on:
        tenants = [Tenant(on, token) for token in tokens]
        for tenant, prompt in zip(tenants, prompts, strict=True):
            await tenant.cache(prompt, "r", "same")
        for at, (tenant, prompt) in enumerate(zip(tenants, prompts, strict=True)):
            body = {"ticket_id": "same", "request_id": "c", "deadline_s": 5}
            other = await tenant.ask("POST", "/v1/claims", body | {"tokens": prompts[1 - at]})
            assert (other.status, other.body["reason"]) == (409, "other_prompt")
            claimed = await tenant.ask("POST", "/v1/claims", body | {"tokens": prompt})
            assert (claimed.status, claimed.body["cached_tokens"]) == (200, len(prompt))
            assert (await tenant.ask("POST", "/v1/requests/c/finish")).status == 200
            assert (await tenant.ask("DELETE", "/v1/tickets/same")).status == 200
        assert on.node.service.verify() == []
