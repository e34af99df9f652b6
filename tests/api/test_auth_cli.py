"""The command line as a caller: tokens from the environment, TLS, the Unix socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.api.guarded import Authority, Callers, guarded
from tests.api.nodes import run_to_end
from tierkv.http.callers import RoleName
from tierkv.http.settings import TlsSection


async def test_commands_bring_the_token_of_the_environment(
    callers: Callers, tmp_path: Path
) -> None:
    token = await callers.token(RoleName.READ)
    async with guarded(callers) as on:
        url = ("--url", on.url)
        status, out, err = await run_to_end(tmp_path, "stats", *url)
        assert (status, out) == (1, "")
        assert "unauthenticated" in err
        assert "set the variable TIERKV_TOKEN to the token" in err
        assert err.count("\n") == 1
        status, out, err = await run_to_end(tmp_path, "stats", *url, "--json", TIERKV_TOKEN=token)
        assert (status, err) == (0, "")
        assert json.loads(out)["running_requests"] == 0
        status, _, err = await run_to_end(tmp_path, "verify", *url, TIERKV_TOKEN=token)
        assert status == 1
        assert "forbidden" in err
        assert token not in err


async def test_commands_speak_tls_and_over_the_socket(tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    tls = TlsSection(cert=str(await asyncio.to_thread(authority.issue, "node")))
    path = tmp_path / "node.sock"
    async with guarded(None, tls=tls, unix_socket=path) as on:
        url = ("--url", on.url)
        assert (await run_to_end(tmp_path, "verify", *url, "--ca", authority.path))[0] == 0
        status, _, err = await run_to_end(tmp_path, "verify", *url)
        assert status == 1
        assert "certificate" in err
        assert err.count("\n") == 1
        status, _, err = await run_to_end(tmp_path, "verify", *url, "--ca", tmp_path / "none")
        assert (status, err.count("\n")) == (1, 1)
        assert (await run_to_end(tmp_path, "verify", "--url", f"unix:{path}"))[0] == 0
