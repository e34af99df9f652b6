"""Who may do what: every route of the table, tried by every kind of caller."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta

import pytest
from multidict import CIMultiDict

from tests.api.guarded import Callers, Guarded, bearer, guarded
from tests.api.nodes import Answer, route_table
from tierkv.http.callers import Access, RoleName, digest_of, new_token
from tierkv.http.route import Route

Headers = Mapping[str, str]
REFUSED = (401, 403)


TABLE = route_table()
GUARDED = [row for row in TABLE if row.access is not Access.PUBLIC]
PUBLIC = [row for row in TABLE if row.access is Access.PUBLIC]


def path_of(row: Route) -> str:
    """With something in the place of names, which nothing is called."""
    parts = ["nothing" if part.startswith("{") else part for part in row.path.split("/")]
    return "/".join(parts)


async def call(on: Guarded, row: Route, headers: Headers, method: str = "") -> Answer:
    """Without a body: who gets past the guard is told so, by anything but 401 and 403."""
    async with asyncio.timeout(20):
        return await on.client.ask(method or row.method, path_of(row), headers=headers)


def disguises(good: str, late: str, other: str) -> dict[str, Headers]:
    """Every way to be nobody, with a good token, an expired one and one of another node at hand."""
    return {
        "none": {},
        "unknown": bearer(other),
        "expired": bearer(late),
        "wrong secret": bearer(good[:-1] + ("A" if good[-1] != "A" else "B")),
        "secret cut": bearer(good[:-1]),
        "secret longer": bearer(good + "A"),
        "id only": bearer(good[:21]),
        "other case of the token": bearer(good.swapcase()),
        "digest for the token": bearer(digest_of(good.encode())),
        "non-ASCII": bearer("tkv_ümläut_€"),
        "non-ASCII beside it": bearer(good + "é"),
        "very long": bearer("tkv_" + "a" * 7000),
        "empty": {"Authorization": ""},
        "no token": {"Authorization": "Bearer"},
        "only the token": {"Authorization": good},
        "other scheme": {"Authorization": f"Basic {good}"},
        "scheme in part": {"Authorization": f"Bear {good}"},
        "two tokens": {"Authorization": f"Bearer {good} {good}"},
        "comma": {"Authorization": f"Bearer {good}, Bearer {good}"},
        "twice": CIMultiDict([*bearer(good).items()] * 2),
        "good then bad": CIMultiDict([*bearer(good).items(), *bearer("x").items()]),
        "other header": {"X-Authorization": f"Bearer {good}"},
        "proxy header": {"Proxy-Authorization": f"Bearer {good}"},
        "cookie": {"Cookie": f"token={good}"},
        "tenant header": {"X-Tenant": "acme", "X-Principal": "admin"},
    }


EVERYWHERE = {"none", "unknown", "twice"}  # the others on one route: the guard does not see which


@pytest.mark.promise("A caller without credentials gets only probes.")
async def test_a_stranger_gets_nothing_from_any_route(callers: Callers) -> None:
    good = await callers.token(RoleName.ADMIN)
    late = await callers.token(RoleName.ADMIN, expires_in=timedelta(seconds=-1))
    async with guarded(callers) as on:
        for disguise, headers in disguises(good, late, new_token()[0]).items():
            for row in GUARDED if disguise in EVERYWHERE else GUARDED[:1]:
                where = (disguise, row.method, row.path)
                answer = await call(on, row, headers)
                assert (answer.status, answer.code) == (401, "unauthenticated"), where
                assert answer.headers["WWW-Authenticate"].startswith('Bearer realm="tierkv"'), where
                for method in ("OPTIONS", "HEAD", "TRACE", "PROPFIND"):
                    answer = await call(on, row, headers, method)
                    assert answer.status == 401, (method, *where)


@pytest.mark.parametrize("role", RoleName)
async def test_each_role_gets_as_far_as_each_route_allows(role: RoleName, callers: Callers) -> None:
    token = await callers.token(role)
    async with guarded(callers) as on:
        for row in GUARDED:
            answer = await call(on, row, bearer(token))
            if role.access >= row.access:
                assert answer.status not in REFUSED, (row.method, row.path, answer.body)
            else:
                assert (answer.status, answer.code) == (403, "forbidden"), (row.method, row.path)
                assert "insufficient_scope" in answer.headers["WWW-Authenticate"]


async def test_probes_ask_nobody_and_do_not_look_at_tokens(callers: Callers) -> None:
    async with guarded(callers) as on:
        for row in PUBLIC:
            for headers in ({}, bearer("wrong")):
                assert (await call(on, row, headers)).status == 200, row.path
                assert (await call(on, row, headers, "HEAD")).status == 200, row.path
                assert (await call(on, row, headers, "OPTIONS")).status == 401, row.path


async def test_a_stranger_does_not_learn_which_paths_there_are(callers: Callers) -> None:
    token = await callers.token(RoleName.READ)
    async with guarded(callers) as on:
        for path in ("/v1", "/v1/nothing", "/v1/requests/a/b"):
            assert (await on.client.get(path)).code == "unauthenticated"
            assert (await on.client.get(path, headers=bearer(token))).code == "not_found"
        assert (await on.client.ask("PATCH", "/v1/stats")).code == "unauthenticated"
        known = await on.client.ask("PATCH", "/v1/stats", headers=bearer(token))
        assert (known.status, known.code) == (405, "method_not_allowed")


@pytest.mark.promise("A caller without credentials gets only probes.")
async def test_every_route_says_what_it_needs_and_only_probes_are_public() -> None:
    public = {row.path for row in TABLE if row.access is Access.PUBLIC}
    assert public <= {"/livez", "/readyz", "/healthz", "/version", "/openapi.json"}
    assert {"/livez", "/readyz"} <= public


async def test_a_node_without_an_auth_file_asks_nobody() -> None:
    async with guarded(None) as on:
        for row in TABLE:
            assert (await call(on, row, {})).status not in REFUSED, row.path
