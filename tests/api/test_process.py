"""`tierkv serve` as a process: signals, addresses, settings, and two nodes over one store."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.api.nodes import Answer, Client, Json, Process, planted, process, run_to_end
from tests.latch import PATIENCE_S, finish, until
from tests.redis_server import free_port

LONG = {"prompt": "hello", "max_tokens": 20_000}
SOME = {"prompt": "hello", "max_tokens": 600}
Working = tuple[Process, asyncio.Task[Answer]]


async def running(of: Process, count: int) -> None:
    """Return when so many requests hold blocks."""
    async with asyncio.timeout(30):
        while await of.client.running_requests() != count:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.005)


async def unready(of: Process) -> Answer:
    """Return the answer to a probe once the node is not ready."""
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await of.client.get("/readyz")).status == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return answer


@asynccontextmanager
async def working(folder: Path, body: Json, *, grace_s: float) -> AsyncIterator[Working]:
    """A node, and the task of a request that it computes."""
    grace = {"TIERKV_NODE__DRAIN_GRACE_S": str(grace_s)}
    async with process(folder, **grace) as node, asyncio.TaskGroup() as group:
        work = group.create_task(node.client.post("/v1/generate", body))
        await running(node, 1)
        yield node, work


async def test_sigterm_lets_work_finish_and_says_meanwhile_that_it_is_not_ready(
    tmp_path: Path,
) -> None:
    async with working(tmp_path, SOME, grace_s=200) as (node, work):
        node.terminate()
        assert (await unready(node)).code == "not_ready"
        assert (await node.client.get("/livez")).status == 200
        assert (await node.client.post("/v1/generate", SOME)).code == "shutting_down"
        assert len((await work).body["tokens"]) == SOME["max_tokens"]
        assert await node.ended() == 0


@pytest.mark.promise("SIGTERM cuts off work longer than the grace period.")
async def test_work_longer_than_the_grace_is_cut_off_and_the_exit_is_clean(tmp_path: Path) -> None:
    async with working(tmp_path, LONG, grace_s=0.05) as (node, work):
        node.terminate()
        assert (await work).code == "shutting_down"
        assert await node.ended() == 0


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async with working(tmp_path, LONG, grace_s=3600) as (node, work):
        node.process.send_signal(signal.SIGINT)
        await unready(node)
        node.process.send_signal(signal.SIGINT)
        assert (await work).code == "shutting_down"
        assert await node.ended() == 0
    assert "second signal" in await asyncio.to_thread(node.log_text)


PLANTED = """
import asyncio, pathlib
from contextlib import asynccontextmanager
from tierkv.service.service import Publishings
from tierkv.tasks import background, task_group

async def fails():
    while not pathlib.Path({now!r}).exists():
        await asyncio.sleep(0.01)
    raise RuntimeError("nobody thought of this")

async def goes_on():
    while True:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            if not {hangs}:
                raise

async def owner():
    async with task_group() as tasks:
        tasks.create_task(fails())
        tasks.create_task(goes_on())

running = Publishings.running

@asynccontextmanager
async def beside(self):
    async with background({{"tierkv-owner": owner()}}), running(self):
        yield

Publishings.running = beside
"""


@pytest.mark.promise("A node whose main task fails logs why and exits with 1.")
@pytest.mark.parametrize("hangs", [False, True], ids=["others end", "another one hangs"])
async def test_a_node_whose_lifetime_fails_says_why_before_it_closes_and_ends_with_1(
    hangs: bool, tmp_path: Path
) -> None:
    now = tmp_path / "now"
    environ = planted(tmp_path, PLANTED.format(now=str(now), hangs=hangs))
    if hangs:
        environ["TIERKV_NODE__CLOSE_LIMIT_S"] = "5"
    async with process(tmp_path, **environ) as node, asyncio.TaskGroup() as group:
        work = group.create_task(node.client.post("/v1/generate", LONG))
        await running(node, 1)
        now.touch()
        assert "nobody thought of this" in (await work).body["detail"]
        async with asyncio.timeout(40):  # below node.close_limit_s
            assert await node.process.wait() == 1
    said = await asyncio.to_thread(node.log_text)
    assert "CRITICAL tierkv.service" in said[: said.index("nobody thought of this")]
    assert ("still uses memory of this node" in said) == hangs


async def test_an_idle_node_ends_at_once_even_with_open_connections(tmp_path: Path) -> None:
    async with process(tmp_path) as node:
        await node.client.get("/livez")  # the session keeps its connection
        _, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rsplit(":", 1)[1]))
        node.terminate()
        assert await node.ended() == 0
        writer.close()


async def test_sighup_ends_nothing(tmp_path: Path) -> None:
    async with process(tmp_path) as on:
        on.process.send_signal(signal.SIGHUP)
        await until(lambda: "SIGHUP" in on.log_text(), "the signal to be seen")
        assert (await on.client.get("/livez")).status == 200
        on.terminate()
        assert await on.ended() == 0


async def test_nodes_without_settings_share_the_users_cache_directory(tmp_path: Path) -> None:
    body = {"prompt": "hello there", "ticket_id": "t"}
    async with process(tmp_path) as one:
        await one.client.post("/v1/prefill", body)
    async with process(tmp_path) as other:
        assert (await other.client.post("/v1/decode", body)).status == 200
    assert (tmp_path / "cache" / "tierkv" / "store").is_dir()


# What cannot be started


async def refused(folder: Path, *arguments: str | Path, **environ: str) -> str:
    """The one sentence with which `tierkv serve` ends, with exit code 1."""
    status, out, err = await finish(run_to_end(folder, "serve", *arguments, **environ))
    assert (status, out) == (1, "")
    lines = [line for line in err.splitlines() if " INFO " not in line]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.promise("A port in use or an unusable store gives one error sentence.")
async def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = await refused(tmp_path, "--port", str(port))
        assert f"127.0.0.1:{port} is used" in said


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("0.0.0.0", "--insecure"),
        ("a" * 300, "cannot be resolved"),
        ("192.0.2.1 --insecure", "is not an address of this machine"),
    ],
)
async def test_an_address_that_cannot_be_used_is_one_sentence(
    host: str, words: str, tmp_path: Path
) -> None:
    host, *options = host.split(" ")
    said = await refused(tmp_path, "--host", host, "--port", "0", *options)
    assert words in said
    assert "Errno" not in said


async def test_insecure_allows_every_address(tmp_path: Path) -> None:
    async with process(tmp_path, "--host", "0.0.0.0", "--insecure") as node:
        url = node.url.replace("0.0.0.0", "127.0.0.1")
        assert (await Client(url, node.client.session).get("/livez")).status == 200


@pytest.mark.promise("A port in use or an unusable store gives one error sentence.")
async def test_a_store_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    address = f"127.0.0.1:{free_port()}"
    for url, words in (
        (f"file://{tmp_path / 'file' / 'store'}", "file"),
        ("file:///proc/nobody/may/write", "/proc/nobody/may/write"),
        (f"redis://user:secret@{address}/0", address),
        ("gopher://", "starts with 'gopher'"),
    ):
        said = await refused(tmp_path, "--port", "0", "--storage", url)
        assert words in said
        assert "secret" not in said


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[node]\nprot = 1\n", "there is no setting node.prot"),
        ("[node]\nport = 70000\n", "node.port must be in 0..65535"),
        ('[node]\ndevice = "abacus"\n', "there is no device 'abacus'"),
        ("[storage.file]\ncapacity_bytes = -1\n", "capacity_bytes must be above 0, not -1"),
        ('[node]\nname = "two\\nlines"\n', "node.name must be one line"),
        ('[node]\nengine = "nobody"\n', "set node.engine to one of reference"),
        ("[handoff]\nticket_ttl_s = nan\n", "handoff.ticket_ttl_s"),
    ],
)
async def test_a_wrong_setting_is_one_sentence_that_names_it(
    config: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "node.toml"
    path.write_text(config)
    options = () if "\nport" in config else ("--port", "0")  # which would win
    said = await refused(tmp_path, *options, "--config", path)
    assert words in said
