"""Callers come and go while a node runs: tokens, certificates, users of the Unix socket."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import stat
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import aiohttp.test_utils
import pytest
from cryptography import x509
from msgspec.structs import replace

from tests.api.guarded import Authority, Callers, Guarded, callers_in, guarded
from tests.api.nodes import Answer, Client, process, run_to_end
from tests.latch import until
from tierkv.api.settings import NodeSection, NodeSettings
from tierkv.errors import ConfigError
from tierkv.http.callers import (
    Access,
    AuthFile,
    Guard,
    Keyring,
    RoleName,
    TokenRow,
    UnauthenticatedError,
    digest_of,
    new_token,
    read,
    write,
)
from tierkv.http.server import bind, unix_listener
from tierkv.http.settings import TlsSection


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return callers_in(tmp_path)


async def stats(on: Guarded, token: str | None = None) -> Answer:
    headers = {"Authorization": f"Bearer {token}"} if token else None
    return await on.client.get("/v1/stats", headers=headers)


async def until_status(on: Guarded, token: str, status: int) -> None:
    async with asyncio.timeout(20):
        while (await stats(on, token)).status != status:  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.01)


# Tokens


async def test_a_new_token_works_without_a_restart_and_a_revoked_one_ends(
    callers: Callers,
) -> None:
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


@pytest.mark.parametrize("broken", [b"", b"{", b'{"version": 2}', b'{"tokens": [{}]}', b"\xff"])
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


async def test_a_token_ends_at_its_time() -> None:
    text, token_id = new_token()
    now = datetime.now(UTC)
    row = TokenRow(
        id=token_id,
        name="a",
        role=RoleName.READ,
        sha256=digest_of(text.encode()),
        created=now,
        expires=now + timedelta(seconds=100),
    )
    keyring = Keyring(AuthFile(tokens=(row,)))
    expiry = row.expires.timestamp() if row.expires else 0.0
    assert keyring.by_token(text.encode(), now=expiry - 0.001).access is Access.READ
    for late in (expiry, expiry + 1e9):
        with pytest.raises(UnauthenticatedError):
            keyring.by_token(text.encode(), now=late)


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


async def test_a_guard_that_is_not_running_knows_nobody(callers: Callers) -> None:
    guard = Guard(callers.path)
    request = aiohttp.test_utils.make_mocked_request("GET", "/v1/stats")
    with pytest.raises(UnauthenticatedError):
        guard.principal_of(request)


# The file


def test_the_file_holds_no_secret_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        callers = callers_in(tmp_path)
    finally:
        os.umask(umask)
    text, _ = new_token()
    write(callers.path, AuthFile())
    assert stat.S_IMODE(callers.path.stat().st_mode) == 0o600
    assert text.split("_", 2)[2] not in callers.path.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["auth.json"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
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
        ({"users": [{"uid": -1, "name": "a", "role": "read"}]}, "uid"),
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


def test_of_a_file_that_is_not_there_it_is_said_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: make it with `tierkv token new`"):
        read(tmp_path / "auth.json")


async def test_tokens_are_made_listed_and_revoked_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    file = ("--file", path)
    made = ("token", "new", *file, "--role", "write", "--name")
    status, out, err = await run_to_end(tmp_path, *made, "gw", "--tenant", "acme")
    assert (status, err) == (0, "")
    token = out.strip()
    assert stat.S_IMODE((await asyncio.to_thread(path.stat)).st_mode) == 0o600
    assert token not in await asyncio.to_thread(path.read_text)
    _, out, _ = await run_to_end(tmp_path, *made, "gw", "--expires", "30m", "--json")
    second = json.loads(out)
    lifetime = datetime.fromisoformat(second["expires"]) - datetime.fromisoformat(second["created"])
    assert lifetime == timedelta(minutes=30)
    _, out, _ = await run_to_end(tmp_path, "token", "list", *file, "--json")
    assert [row["tenant"] for row in json.loads(out)] == ["acme", ""]
    assert token not in out
    keyring = Keyring(await asyncio.to_thread(read, path))
    assert keyring.by_token(token.encode(), now=0).tenant == "acme"
    status, out, _ = await run_to_end(tmp_path, "token", "revoke", *file, second["id"])
    assert (status, out) == (0, "revoked 1\n")
    status, _, err = await run_to_end(tmp_path, "token", "revoke", *file, second["id"])
    assert (status, err.count("\n")) == (1, 1)
    for wrong in (("--expires", "soon"), ("--expires", "0d"), ("--role", "king")):
        assert (await run_to_end(tmp_path, *made, "x", *wrong))[0] == 2


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


def test_an_address_others_can_reach_needs_callers_that_are_asked(tmp_path: Path) -> None:
    section = NodeSection(host="0.0.0.0", port=0)
    with pytest.raises(ConfigError, match="callers are not authenticated"):
        bind(section)
    bind(section, asks_callers=True).close()


@pytest.mark.parametrize("scheme", ["Bearer  ", "Bearer   ", "bearer ", "BEARER "])
async def test_one_space_or_more_is_between_bearer_and_the_token(
    callers: Callers, scheme: str
) -> None:
    """RFC 6750 has "Bearer" 1*SP b64token, and the case of a scheme does not matter."""
    headers = {"Authorization": scheme + await callers.token(RoleName.READ)}
    async with guarded(callers) as on:
        assert (await on.client.get("/v1/stats", headers=headers)).status == 200


@pytest.mark.parametrize("separator", ["", "\t", " \t", "\xa0"])
async def test_nothing_but_spaces_is_between_bearer_and_the_token(
    callers: Callers, separator: str
) -> None:
    headers = {"Authorization": f"Bearer{separator}{await callers.token(RoleName.READ)}"}
    async with guarded(callers) as on:
        assert (await on.client.get("/v1/stats", headers=headers)).code == "unauthenticated"


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
        headers = {"Authorization": f"Bearer {token}"}
        assert (await client.get("/v1/stats", headers=headers)).status == 200
        assert "unencrypted" in node.log_text()
        assert token not in node.log_text()
        node.terminate()
        assert await node.ended() == 0


async def test_a_wrong_auth_file_or_certificate_stops_the_start(tmp_path: Path) -> None:
    status, _, err = await run_to_end(tmp_path, "serve", "--port", "0", "--auth", "/nonexistent")
    assert (status, err.count("\n")) == (1, 1)
    assert "does not exist" in err
    status, _, err = await run_to_end(
        tmp_path, "serve", "--port", "0", "--tls-cert", "/nonexistent"
    )
    assert status == 1
    assert "error: the certificate /nonexistent" in err.splitlines()[-1]


# TLS


async def test_a_token_over_tls(callers: Callers, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = TlsSection(cert=str(authority.issue("node")))
    token = await callers.token(RoleName.READ)
    trusting, stranger = authority.trusted_by(), ssl.create_default_context()
    async with guarded(callers, tls=tls) as on:
        assert on.url.startswith("https://")
        connector = aiohttp.TCPConnector(ssl=trusting)
        async with aiohttp.ClientSession(connector=connector) as session:
            client = Client(on.url, session)
            headers = {"Authorization": f"Bearer {token}"}
            assert (await client.get("/v1/stats", headers=headers)).status == 200
            assert (await client.get("/v1/stats")).code == "unauthenticated"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=stranger)) as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await Client(on.url, session).get("/livez")


@pytest.mark.parametrize("subject", ["DNS:prefill-1", "URI:spiffe://a/b", "CN:worker"])
async def test_a_certificate_is_its_caller(subject: str, callers: Callers, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mine = authority.issue(
        "worker", x509.DNSName("prefill-1"), x509.UniformResourceIdentifier("spiffe://a/b")
    )
    unknown = authority.issue("prefill-1", x509.DNSName("worker"))  # the kinds are not mixed up
    server = authority.issue("node")
    tls = TlsSection(cert=str(server), client_ca=str(authority.path))
    await callers.certificate(subject, RoleName.WRITE)
    token = await callers.token(RoleName.ADMIN)
    contexts = [authority.trusted_by(one) for one in (mine, unknown)]
    async with guarded(callers, tls=tls) as on:
        for context, status in zip(contexts, (200, 401), strict=True):
            connector = aiohttp.TCPConnector(ssl=context)
            async with aiohttp.ClientSession(connector=connector) as session:
                client = Client(on.url, session)
                assert (await client.get("/v1/stats")).status == status
                assert (await client.get("/livez")).status == 200
                headers = {"Authorization": f"Bearer {token}"}
                assert (await client.get("/v1/stats", headers=headers)).status == 200
                headers = {"Authorization": "Bearer wrong"}  # a good certificate does not excuse it
                assert (await client.get("/v1/stats", headers=headers)).status == 401


async def test_without_a_certificate_of_the_right_authority_there_is_no_connection(
    callers: Callers, tmp_path: Path
) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls = TlsSection(cert=str(authority.issue("node")), client_ca=str(authority.path))
    await callers.certificate("CN:worker", RoleName.ADMIN)
    forged = other.issue("worker")
    contexts = [authority.trusted_by(), authority.trusted_by(forged)]
    async with guarded(callers, tls=tls) as on:
        for context in contexts:
            connector = aiohttp.TCPConnector(ssl=context)
            async with aiohttp.ClientSession(connector=connector) as session:
                with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
                    await Client(on.url, session).get("/livez")


@pytest.mark.promise("Renewed certificates take effect without a restart or failed handshake.")
async def test_a_new_certificate_is_used_without_a_restart(
    callers: Callers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Authority(tmp_path), Authority(tmp_path, "new")
    live = tmp_path / "live.pem"
    live.write_bytes(old.issue("node").read_bytes())
    second = new.issue("node").read_bytes()
    contexts = (old.trusted_by(), new.trusted_by())
    tls = TlsSection(cert=str(live), reload_s=0.02)
    async with guarded(callers, tls=tls) as on:

        async def trusts(context: ssl.SSLContext) -> bool:
            connector = aiohttp.TCPConnector(ssl=context)
            async with aiohttp.ClientSession(connector=connector) as session:
                try:
                    return (await Client(on.url, session).get("/livez")).status == 200
                except aiohttp.ClientConnectorCertificateError:
                    return False

        assert await trusts(contexts[0])
        await asyncio.to_thread(live.write_bytes, b"nonsense")
        await until(lambda: "stays in force" in caplog.text, "a line of the log")
        assert await trusts(contexts[0])
        await asyncio.to_thread(live.write_bytes, second)
        async with asyncio.timeout(20):
            while not await trusts(contexts[1]):  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.02)
        assert not await trusts(contexts[0])


@pytest.mark.promise("Renewed certificates take effect without a restart or failed handshake.")
async def test_an_authority_that_is_taken_out_is_not_trusted_any_more(
    callers: Callers, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path), Authority(tmp_path, "new")
    live = tmp_path / "live-ca.pem"
    live.write_bytes(old.path.read_bytes())
    tls = TlsSection(cert=str(old.issue("node")), client_ca=str(live), reload_s=0.02)
    of_old, of_new = (old.trusted_by(one.issue("caller")) for one in (old, new))
    async with guarded(callers, tls=tls) as on:

        async def is_trusted(caller: ssl.SSLContext) -> bool:
            connector = aiohttp.TCPConnector(ssl=caller)
            async with aiohttp.ClientSession(connector=connector) as session:
                try:
                    return (await Client(on.url, session).get("/livez")).status == 200
                except aiohttp.ClientError:
                    return False

        assert await is_trusted(of_old)
        assert not await is_trusted(of_new)
        await asyncio.to_thread(live.write_bytes, new.path.read_bytes())
        async with asyncio.timeout(20):
            while not await is_trusted(of_new):  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.02)
        assert not await is_trusted(of_old)


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
        for turn in range(100):
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


async def over(path: Path, token: str | None = None) -> Answer:
    headers = {"Authorization": f"Bearer {token}"} if token else None
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession(connector=connector) as session:
        return await Client("http://localhost", session).get("/v1/verify", headers=headers)


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


async def test_a_row_says_what_a_user_may_do_over_the_socket(
    callers: Callers, tmp_path: Path
) -> None:
    path = tmp_path / "node.sock"
    await callers.user(os.geteuid(), RoleName.READ)
    async with guarded(callers, unix_socket=path):
        assert (await over(path)).code == "forbidden"


async def test_another_user_of_the_socket_needs_a_row(
    callers: Callers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.sock"
    here = os.geteuid()
    async with guarded(callers, unix_socket=path):
        monkeypatch.setattr(os, "geteuid", lambda: here + 1)  # whom the node runs as
        answer = await over(path)
        assert (answer.status, answer.code) == (401, "unauthenticated")


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
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tierkv", "serve", "--no-tcp", "--unix-socket", str(path)),
        *("--storage", "none"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(60):
            line = await child.stdout.readline()
        assert line.decode() == f"tierkv both listening on unix:{path}\n"
        assert (await over(path)).status == 200
        child.terminate()
        async with asyncio.timeout(30):
            await child.communicate()
        assert child.returncode == 0
        assert not await asyncio.to_thread(path.exists)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
