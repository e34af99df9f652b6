"""Callers come and go while a node runs: tokens, certificates, users of the Unix socket."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import aiohttp.test_utils
import pytest
from click.testing import CliRunner
from cryptography import x509
from msgspec.structs import replace

from tests.api.guarded import Authority, Callers, Guarded, bearer, callers_in, guarded
from tests.api.nodes import Answer, Client, process, run_to_end
from tests.latch import until
from tierkv.api.settings import NodeSettings
from tierkv.cli import main
from tierkv.errors import ConfigError
from tierkv.http.callers import (
    Access,
    AuthFile,
    Keyring,
    RoleName,
    TokenRow,
    UnauthenticatedError,
    digest_of,
    read,
)
from tierkv.http.server import unix_listener
from tierkv.http.settings import TlsSection


async def stats(on: Guarded, token: str = "") -> Answer:
    return await on.client.get("/v1/stats", headers=bearer(token))


async def until_status(on: Guarded, token: str, status: int) -> None:
    async with asyncio.timeout(20):
        while (await stats(on, token)).status != status:  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.01)


# Tokens


async def test_a_new_token_works_without_a_restart_and_a_revoked_one_ends(callers: Callers) -> None:
    first = await callers.token(RoleName.READ)
    async with guarded(callers) as on:
        assert (await stats(on, first)).status == 200
        second = await callers.token(RoleName.READ)
        await until_status(on, second, 200)
        assert (await stats(on, first)).status == 200
        kept = callers.content.tokens[1:]
        await callers.save(replace(callers.content, tokens=kept))
        await until_status(on, first, 401)
        assert (await stats(on, second)).status == 200


@pytest.mark.parametrize("broken", [b"", b'{"version": 2}', b"\xff"])
async def test_a_broken_new_file_is_logged_once_and_changes_nothing(
    broken: bytes, callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    token = await callers.token(RoleName.READ)
    async with guarded(callers) as on:
        other_file = callers.path.with_suffix(".new")
        await asyncio.to_thread(other_file.write_bytes, broken)
        await asyncio.to_thread(other_file.replace, callers.path)  # whole, as it is looked at often
        await until(lambda: "stays in force" in caplog.text, "a line of the log")
        for _ in range(20):
            assert (await stats(on, token)).status == 200
        assert caplog.text.count("stays in force") == 1
        await asyncio.to_thread(callers.path.unlink)
        await until(lambda: "does not exist" in caplog.text, "a line of the log")
        assert (await stats(on, token)).status == 200
        other = await callers.token(RoleName.READ)
        await until_status(on, other, 200)


def test_a_token_with_more_behind_its_longest_length_is_another_one() -> None:
    token = b"tkv_" + b"0123456789abcdef" + b"_" + b"s" * (512 - 21)
    row = TokenRow(
        id="0123456789abcdef",
        name="a",
        role=RoleName.READ,
        sha256=digest_of(token),
        created=datetime.now(UTC),
    )
    keyring = Keyring(AuthFile(tokens=(row,)))
    assert keyring.by_token(token, now=0).access is Access.READ
    with pytest.raises(UnauthenticatedError):
        keyring.by_token(token + b"x", now=0)


# The file


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    callers = callers_in(tmp_path)
    callers.path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read(callers.path)


TOKEN = {"id": "0" * 16, "name": "a", "role": "read", "sha256": "0" * 64}
CREATED = {"created": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"tokens": [TOKEN]}, "created"),
        ({"tokens": [TOKEN | CREATED, TOKEN | CREATED]}, "two rows with the token id"),
        ({"tokens": [TOKEN | CREATED | {"role": "king"}]}, "king"),
        ({"tokens": [TOKEN | CREATED | {"sha256": "0"}]}, "sha256"),
        ({"tokens": [TOKEN | CREATED | {"name": ""}]}, "needs a name"),
        ({"tokens": [TOKEN | CREATED | {"tenant": "a\nb"}]}, "visible ASCII"),
        ({"tokens": [TOKEN | {"created": "2026-01-01T00:00:00"}]}, "timezone"),
        ({"tokens": [TOKEN | CREATED | {"secret": "x"}]}, "secret"),
        ({"certificates": [{"subject": "anyone", "name": "a", "role": "read"}]}, "subject"),
        ({"tokenz": []}, "tokenz"),
        ([], "object"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_says_what(
    content: object, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "auth.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


def command(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    found = CliRunner().invoke(main, list(map(str, arguments)))
    return found.exit_code, found.stdout, found.stderr


def test_tokens_are_made_listed_and_revoked_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    file = ("--file", path)
    made = ("token", "new", *file, "--role", "write", "--name")
    status, out, err = command(*made, "gw", "--tenant", "acme")
    assert (status, err) == (0, "")
    token = out.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token not in path.read_text()
    _, out, _ = command(*made, "gw", "--expires", "30m", "--json")
    second = json.loads(out)
    lifetime = datetime.fromisoformat(second["expires"]) - datetime.fromisoformat(second["created"])
    assert lifetime == timedelta(minutes=30)
    _, out, _ = command("token", "list", *file, "--json")
    assert [row["tenant"] for row in json.loads(out)] == ["acme", ""]
    assert token not in out
    keyring = Keyring(read(path))
    assert keyring.by_token(token.encode(), now=0).tenant == "acme"
    status, out, _ = command("token", "revoke", *file, second["id"])
    assert (status, out) == (0, "revoked 1\n")
    status, _, err = command("token", "revoke", *file, second["id"])
    assert (status, err.count("\n")) == (1, 1)
    for wrong in (("--expires", "soon"), ("--expires", "0d"), ("--role", "king")):
        assert command(*made, "x", *wrong)[0] == 2


async def test_two_commands_at_a_time_lose_no_token(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"

    async def make(name: str) -> None:
        made = await run_to_end(
            tmp_path, "token", "new", "--file", path, "--role", "read", "--name", name
        )
        assert made[0] == 0, made

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(make(f"n{number}"))
    content = await asyncio.to_thread(read, path)
    assert {row.name for row in content.tokens} == {"n0", "n1", "n2", "n3"}


# Addresses


@pytest.mark.parametrize(
    ("before", "status"),
    [("bEaReR   ", 200), ("Bearer", 401), ("Bearer \t", 401), ("Bearer\xa0", 401)],
)
async def test_bearer_in_any_case_and_one_space_or_more_are_before_a_token(
    before: str, status: int, callers: Callers
) -> None:
    """RFC 6750 has "Bearer" 1*SP b64token, and the case of a scheme does not matter."""
    headers = {"Authorization": before + await callers.token(RoleName.READ)}
    async with guarded(callers) as on:
        assert (await on.client.get("/v1/stats", headers=headers)).status == status


async def test_a_process_with_an_auth_file_may_listen_on_all_addresses(
    callers: Callers, tmp_path: Path
) -> None:
    token = await callers.token(RoleName.READ)
    arguments = ("--host", "0.0.0.0", "--auth", callers.path)
    async with process(tmp_path, *arguments) as node:
        url = node.url.replace("0.0.0.0", "127.0.0.1")
        client = Client(url, node.client.session)
        assert (await client.get("/livez")).status == 200
        assert (await client.get("/v1/stats")).code == "unauthenticated"
        assert (await client.get("/v1/stats", headers=bearer(token))).status == 200
        assert "unencrypted" in node.log_text()
        assert token not in node.log_text()
        node.terminate()
        assert await node.ended() == 0


async def test_a_wrong_auth_file_or_certificate_stops_the_start(tmp_path: Path) -> None:
    status, _, err = await run_to_end(tmp_path, "serve", "--port", "0", "--auth", "/nonexistent")
    assert (status, err.count("\n")) == (1, 1)
    assert "does not exist: make it with `tierkv token new`" in err
    status, _, err = await run_to_end(
        tmp_path, "serve", "--port", "0", "--tls-cert", "/nonexistent"
    )
    assert status == 1
    assert "error: the certificate /nonexistent" in err.splitlines()[-1]


# TLS


async def status_of(
    url: str, context: ssl.SSLContext, token: str = "", path: str = "/v1/stats"
) -> int | None:
    """Return the status of a call over a connection of its own; None where TLS refuses that."""
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            return (await Client(url, session).get(path, headers=bearer(token))).status
        except (aiohttp.ClientError, OSError):
            return None


@pytest.mark.parametrize("subject", ["DNS:prefill-1", "URI:spiffe://a/b", "CN:worker"])
async def test_a_certificate_is_its_caller(subject: str, callers: Callers, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    names = x509.DNSName("prefill-1"), x509.UniformResourceIdentifier("spiffe://a/b")
    mine = authority.trusted_by(authority.issue("worker", *names))
    # The kinds of names are not mixed up.
    unknown = authority.trusted_by(authority.issue("prefill-1", x509.DNSName("worker")))
    forged, none = authority.trusted_by(other.issue("worker", *names)), authority.trusted_by()
    tls = TlsSection(cert=str(authority.issue("node")), client_ca=str(authority.path))
    await callers.certificate(subject, RoleName.WRITE)
    token = await callers.token(RoleName.ADMIN)
    async with guarded(callers, tls=tls) as on:
        for context, status in ((mine, 200), (unknown, 401)):
            assert await status_of(on.url, context) == status
            assert await status_of(on.url, context, path="/livez") == 200
            assert await status_of(on.url, context, token) == 200
            assert await status_of(on.url, context, "wrong") == 401  # whatever the certificate
        for context in (forged, none):
            assert await status_of(on.url, context, token) is None


@pytest.mark.promise("Renewed certificates take effect without a restart or failed handshake.")
async def test_a_new_certificate_and_a_new_authority_are_used_without_a_restart(
    callers: Callers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Authority(tmp_path), Authority(tmp_path, "new")
    live, live_ca = tmp_path / "live.pem", tmp_path / "live-ca.pem"
    first, second = (one.issue("node").read_bytes() for one in (old, new))
    live.write_bytes(first)
    live_ca.write_bytes(old.path.read_bytes())
    tls = TlsSection(cert=str(live), client_ca=str(live_ca), reload_s=0.02)

    async def is_trusted(url: str, server: Authority, caller: Authority) -> bool:
        context = server.trusted_by(caller.issue("caller"))
        return await status_of(url, context, path="/livez") == 200

    async def until_trusted(url: str, server: Authority, caller: Authority) -> None:
        async with asyncio.timeout(20):
            while not await is_trusted(url, server, caller):  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.02)

    async with guarded(callers, tls=tls) as on:
        assert await is_trusted(on.url, old, old)
        assert not await is_trusted(on.url, old, new)
        await asyncio.to_thread(live.write_bytes, b"nonsense")
        await until(lambda: "stays in force" in caplog.text, "a line of the log")
        assert await is_trusted(on.url, old, old)
        await asyncio.to_thread(live.write_bytes, second)
        await until_trusted(on.url, new, old)
        assert not await is_trusted(on.url, old, old)
        await asyncio.to_thread(live_ca.write_bytes, new.path.read_bytes())
        await until_trusted(on.url, new, new)
        assert not await is_trusted(on.url, new, old)


@pytest.mark.promise("Renewed certificates take effect without a restart or failed handshake.")
async def test_no_handshake_fails_while_certificates_are_renewed(
    callers: Callers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority = Authority(tmp_path)
    pems = [authority.issue(f"node{n}").read_bytes() for n in range(2)]
    live = tmp_path / "live.pem"
    live.write_bytes(pems[0])
    over = asyncio.Event()

    async def renew() -> None:
        for turn in range(40):
            await asyncio.to_thread(tmp_path.joinpath("next.pem").write_bytes, pems[turn % 2])
            await asyncio.to_thread(tmp_path.joinpath("next.pem").rename, live)
            await asyncio.sleep(0.005)
        over.set()

    async def connect(url: str, context: ssl.SSLContext) -> None:
        while not over.is_set():
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as one:
                assert (await Client(url, one).get("/livez")).status == 200

    tls = TlsSection(cert=str(live), reload_s=0.001)
    async with guarded(callers, tls=tls) as on, asyncio.TaskGroup() as group:
        group.create_task(renew())
        for _ in range(4):
            group.create_task(connect(on.url, authority.trusted_by()))
    assert caplog.text.count("is in use") > 10


def test_client_certificates_without_a_list_of_callers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"auth\.file"):
        NodeSettings(tls=TlsSection(cert="a", client_ca="b"))
    with pytest.raises(ConfigError, match=r"tls\.cert"):
        TlsSection(key="a")


# The Unix socket


async def over(path: Path, token: str = "") -> Answer:
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client("http://localhost", session)
        return await client.get("/v1/verify", headers=bearer(token))


async def test_the_nodes_own_user_is_an_admin_over_its_socket(
    callers: Callers, tmp_path: Path
) -> None:
    path = tmp_path / "node.sock"
    read_only = await callers.token(RoleName.READ)
    async with guarded(callers, unix_socket=path) as on:
        mode = (await asyncio.to_thread(path.stat)).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        assert (await over(path)).status == 200
        assert (await over(path, read_only)).code == "forbidden"  # who brings a token is its caller
        assert (await over(path, "wrong")).code == "unauthenticated"
        assert (await stats(on)).code == "unauthenticated"  # TCP of the same node
    assert not await asyncio.to_thread(path.exists)


async def test_another_user_of_the_socket_needs_a_token(
    callers: Callers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.sock"
    here = os.geteuid()
    token = await callers.token(RoleName.ADMIN)
    async with guarded(callers, unix_socket=path):
        monkeypatch.setattr(os, "geteuid", lambda: here + 1)  # whom the node runs as
        answer = await over(path)
        assert (answer.status, answer.code) == (401, "unauthenticated")
        assert (await over(path, token)).status == 200


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with unix_listener(path):
        with pytest.raises(ConfigError, match="used by another process"), unix_listener(path):
            pass
        assert path.exists()
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(ConfigError, match="is not a socket"), unix_listener(path):
        pass
    assert path.read_text() == "a file"
    with pytest.raises(ConfigError), unix_listener(tmp_path / ("x" * 200)):
        pass


async def test_a_process_may_listen_on_its_socket_only(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    async with process(tmp_path, "--no-tcp", "--unix-socket", path, "--storage", "none") as node:
        assert node.url == f"unix:{path}"
        assert (await over(path)).status == 200
        node.terminate()
        assert await node.ended() == 0
    assert not await asyncio.to_thread(path.exists)
