"""A node for engines in other processes: they share its host tier, and who dies takes nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tests.embed.driver import Driver
from tests.embed.engine import until
from tests.embed.engine_of_node import BASES, MODEL
from tests.embed.engine_rank import StepMessage
from tests.embed.test_groups import FULL, MODELS, hybrid
from tests.embed.tp_engine import Rank, TpEngine
from tests.latch import PATIENCE_S
from tests.preloaded import ForkedProgram, output_of
from tests.redis_server import redis_server
from tests.world import BLOCK, GQA
from tierkv.api.types import GenerateBody
from tierkv.cache.groups import as_groups
from tierkv.cache.keys import Fingerprint
from tierkv.client import Client, RemoteError
from tierkv.embed import EngineCache, NodeHost, RankSocket
from tierkv.embed.engine_cache import Found
from tierkv.embed.external import MAGIC, VERSION, EngineHello
from tierkv.embed.host_side import HostSide
from tierkv.errors import ConfigError
from tierkv.gpu.protocol import Direction
from tierkv.ranks.link import Plan, close_all, connect
from tierkv.ranks.memory import side_by_side
from tierkv.storage.codec import seal

TOKENS = list(range(3 * BLOCK + 1))
HERE, THERE = [0, 1, 2, 3], [8, 9, 10, 11]
SLOTS = 128
ENGINE = "tests.embed.engine_of_node"


@dataclass
class NodeProcess:
    folder: Path
    process: ForkedProgram

    @property
    def path(self) -> str:
        return str(self.folder / "engines")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def client(self) -> Client:
        return Client(f"unix:{self.folder}/http")


@contextmanager
def node(
    folder: Path, *, store: str = "none", ends_with: int = 0, **environ: str
) -> Iterator[NodeProcess]:
    folder.mkdir(exist_ok=True)
    program = ["serve", "--engine", "external"]
    options = ["--engine-socket", str(folder / "engines"), "--storage", store]
    listening = ["--no-tcp", "--unix-socket", str(folder / "http")]
    sizes = {"TIERKV_CACHE__HOST_BLOCKS": str(SLOTS)}
    with (folder / "log").open("wb") as log:
        process = ForkedProgram(
            "tierkv",
            *(*program, *options, *listening),
            stderr=log.fileno(),
            environ=sizes | environ,
        )
    try:
        at = NodeProcess(folder, process)
        yield at
        until(lambda: bool(at.log), "it listens to signals")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == ends_with, (folder / "log").read_text()
    finally:
        process.kill()
        process.communicate()


@contextmanager
def engine(
    at: NodeProcess, name: str, num_ranks: int = 1, *, key: str = "", model: str = "model"
) -> Iterator[TpEngine]:
    folder = at.folder / name
    folder.mkdir()
    layout = side_by_side([GQA] * num_ranks)
    with ExitStack() as stack:
        ranks = []
        for number in range(num_ranks):
            rank = Rank(folder / "ranks", number)
            stack.callback(rank.process.communicate)
            stack.callback(rank.process.kill)
            ranks.append(rank)
        cache = EngineCache(
            Fingerprint(model, layout),
            [layout],
            node=NodeHost(at.path, name=name, key=key),
            ranks=RankSocket(str(folder / "ranks"), [GQA] * num_ranks),
        )
        with cache:
            on = TpEngine(cache, ranks)
            yield on
            assert on.findings() == []


@pytest.mark.promise("Engines load each other's saved blocks from a node's host tier.")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_one_engine_saved_another_loads_from_the_host_tier_they_share(
    tmp_path: Path, num_ranks: int
) -> None:
    with (
        node(tmp_path / "node") as at,
        engine(at, "one", num_ranks) as one,
        engine(at, "two", num_ranks) as two,
    ):
        one.save("a", TOKENS, HERE)
        for on, key in ((two, "b"), (one, "c"), (two, "d")):
            assert on.lookup(key, TOKENS) == Found(len(TOKENS))
            on.load(key, THERE)
            assert on.hold(TOKENS, THERE)
        assert two.lookup("e", TOKENS) == Found(len(TOKENS))  # and is held for it
        with at.client() as client:
            assert client.verify().findings == []
            assert client.readyz().status == "ok"
            with pytest.raises(RemoteError, match="no model of its own") as refused:
                client.generate(GenerateBody(tokens=TOKENS))
            assert (refused.value.problem.status, refused.value.problem.code) == (409, "no_engine")
            assert "tierkv_" in client.metrics()
            assert client.stats() == two.cache.stats().wait(PATIENCE_S)


def test_engines_share_a_quarter_of_a_node_s_slots_for_saves_equally(tmp_path: Path) -> None:
    """One alone has all of it; when others come or go it hears of its part as it asks for more."""
    with node(tmp_path / "node") as at, ExitStack() as stack:

        def come(name: str, model: str = "model") -> NodeHost:
            host = NodeHost(at.path, name=name)
            host.open(Fingerprint(model, GQA), as_groups([GQA]))
            stack.callback(host.close)
            return host

        def taken(host: NodeHost, has: int) -> int:
            [found] = host.call(HostSide.reserve, [host.max_reserved[0] - has]).wait(PATIENCE_S)
            return len(found)

        hosts = [come(f"engine {number}") for number in range(4)]
        assert [host.max_reserved[0] for host in hosts] == [SLOTS // n for n in (4, 8, 12, 16)]
        assert taken(hosts[0], has=0) == SLOTS // 16, "it was told of a quarter"
        assert taken(hosts[0], has=SLOTS // 16) == 0
        assert taken(hosts[1], has=SLOTS // 16 + 1) == 0, "it has more than its part"
        with pytest.raises(ConfigError, match="another model"):
            come("refused", model="another")  # and gets no part
        for host in hosts[1:]:
            host.close()
        until(lambda: at.log.count("its slots and promises were released") == 3)
        assert taken(hosts[0], has=SLOTS // 16) == SLOTS // 4 - SLOTS // 16
        assert hosts[0].max_reserved[0] == SLOTS // 4


def test_blocks_that_an_engine_found_and_did_not_load_in_time_are_not_held_at_the_node(
    tmp_path: Path,
) -> None:
    with node(tmp_path / "node") as at, hybrid([FULL], node=NodeHost(at.path)) as on:
        on.save(TOKENS)
        assert on.lookup("b", TOKENS, promise_ttl_s=0.2) == Found(len(TOKENS))
        on.until(lambda: on.cache.reset().wait(PATIENCE_S) == 0)


@pytest.mark.promise("A killed engine leaves no slot in use.")
def test_an_engine_that_is_killed_takes_nothing_with_it(tmp_path: Path) -> None:
    """Its promise and its slots are given back, and what it saved is found."""
    with node(tmp_path / "node") as at, engine(at, "other") as on:
        on.save("a", TOKENS, HERE)
        doomed, _ = doomed_engine(at)
        doomed.kill()
        doomed.communicate()
        until(lambda: "engine doomed ended, and its slots and promises were released" in at.log)
        assert on.lookup("b", TOKENS) == Found(len(TOKENS))
        on.load("b", THERE)
        assert on.hold(TOKENS, THERE)
        what_it_saved = list(range(5000, 5000 + 2 * BLOCK))
        assert on.lookup("c", what_it_saved) == Found(2 * BLOCK)
        on.cache.release("c")
        on.until(lambda: on.cache.reset().wait(PATIENCE_S) == 0)
        with at.client() as client:
            left = SLOTS // 4 - len(HERE)
            assert client.stats().host.used == left, "slots that the living one keeps ready"


def test_an_engine_that_dies_before_it_is_answered_leaves_the_node_alive(tmp_path: Path) -> None:
    with node(tmp_path / "node") as at, engine(at, "other") as on:
        for _ in range(5):
            link = connect(at.path, PATIENCE_S)
            link.send(
                seal(MAGIC, VERSION, EngineHello(Fingerprint("model", GQA), as_groups([GQA])))
            )
            _, descriptors = link.receive_descriptors()
            for number in range(200):
                link.send(msgspec.msgpack.encode([number, ["verify", []]]))
            link.close()
            close_all(descriptors)
        until(lambda: at.log.count("its slots and promises were released") == 5)
        on.save("a", TOKENS, HERE)
        assert on.lookup("b", TOKENS) == Found(len(TOKENS))
        on.cache.release("b")


@pytest.mark.parametrize("num_killed", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_engines_killed_at_random_leave_another_and_the_node_as_they_were(
    num_killed: int, tmp_path: Path
) -> None:
    rng, store = random.Random(num_killed), f"file://{tmp_path}/store"
    with node(tmp_path / "node", store=store) as at:
        with hybrid(MODELS[MODEL], node=NodeHost(at.path, name="steady")) as on:
            driver = Driver(on, rng, bases=BASES)
            for seed in range(num_killed):
                doomed = ForkedProgram(ENGINE, at.path, "--at-random", str(seed + 1))
                assert doomed.stdout.readline() == b"begun\n"
                for _ in range(rng.randrange(1, 100)):
                    driver.step(comes=True)  # every byte it loads is looked at
                doomed.kill()
                doomed.communicate()
            driver.finish()
            until(lambda: at.log.count("its slots and promises were released") == num_killed)
            with at.client() as client:
                assert client.verify().findings == []
        assert driver.num_steps > num_killed
    assert os.listdir(at.folder) == ["log"], "sockets are removed"


def test_slots_wait_for_the_last_rank_of_an_engine_that_was_killed(tmp_path: Path) -> None:
    """A rank that is still copying when its engine has died must not write into another's block."""
    with node(tmp_path / "node") as at, engine(at, "other"):
        folder = tmp_path / "doomed"
        folder.mkdir()
        rank = Rank(folder / "ranks", 0)
        try:
            doomed, plan = doomed_engine(at, str(folder / "ranks"))
            assert rank.step(StepMessage(saves=[plan], holds=True)) == []
            doomed.kill()
            doomed.communicate()
            until(lambda: "engine doomed disconnected; its ranks may still copy" in at.log)
            with at.client() as client:  # it answers, and has given nothing back
                assert client.verify().findings == []
            assert "its slots and promises were released" not in at.log
            rank.step(StepMessage(holds=False))
            until(lambda: "engine doomed ended, and its slots and promises were released" in at.log)
        finally:
            rank.process.kill()
            rank.process.communicate()


def doomed_engine(at: NodeProcess, *ranks: str) -> tuple[ForkedProgram, Plan]:
    """Once it holds what it is to hold."""
    process = ForkedProgram(ENGINE, at.path, *ranks)
    return process, msgspec.json.decode(process.stdout.readline(), type=Plan)


def test_an_engine_with_other_blocks_or_another_key_is_told_why_it_is_refused(
    tmp_path: Path,
) -> None:
    auth = tmp_path / "auth.toml"
    tokens = {}
    for role in ("admin", "write"):
        new = ("token", "new", "--name", role, "--role", role, "--file", auth)
        tokens[role] = output_of("tierkv", *new).strip()
    with node(tmp_path / "node", TIERKV_AUTH__FILE=str(auth)) as at:
        for key, why in (
            ("", "needs a token"),
            ("other", "unknown here"),
            (tokens["write"], "does not have the role admin"),
        ):
            with pytest.raises(ConfigError, match=why), engine(at, f"wrong {why}", key=key):
                pass
        with engine(at, "one", key=tokens["admin"]) as on:
            with (
                pytest.raises(ConfigError, match="model is 'model' here and 'another' there"),
                engine(at, "two", key=tokens["admin"], model="another"),
            ):
                pass
            on.save("a", TOKENS, HERE)
        assert not any(token in at.log for token in tokens.values())


def test_a_node_that_deletes_everything_forgets_all_groups_and_saves_that_are_under_way(
    tmp_path: Path,
) -> None:
    first, second = list(range(40)), list(range(100, 140))
    with (
        redis_server() as server,
        node(
            tmp_path / "node", store=server.url, TIERKV_CACHE__STORAGE_WRITE="write_through"
        ) as at,
        hybrid(MODELS["all"], node=NodeHost(at.path)) as on,
        at.client() as client,
    ):
        on.save(first)
        on.check("before", first, len(first))
        holds = on.lookup("holds", first)
        on.latch.hold(Direction.OFFLOAD)
        on.start_save("late", second, *on.whole(second))
        freed = client.forget_blocks(storage=True)
        assert freed.removed_values > 0
        assert freed.held_copies > 0  # for who was promised them
        on.latch.release()
        on.until(lambda: "late" in dict(on.seen.stored))
        on.cache.release("late")
        for key, tokens in (("a", first), ("b", second)):
            on.check(key, tokens, 0)
        _, failed = on.load("holds", holds)
        assert failed == ()
        on.cache.release("holds")
        assert server.execute("KEYS", "*") == []
        for tokens in (second, first):
            while on.lookup("again", tokens).num_tokens < len(tokens):
                on.cache.release("again")
                on.save(tokens)  # slots that were reserved before the deletion are not used
            on.cache.release("again")
            on.check("after", tokens, len(tokens))


@pytest.mark.promise("An engine whose node is gone computes on and joins the next.")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_outlives_its_node_says_so_and_comes_to_the_next(
    how: signal.Signals, tmp_path: Path
) -> None:
    code = 0 if how is signal.SIGTERM else -how
    with (
        node(tmp_path / "node", ends_with=code) as doomed_node,
        hybrid([FULL], node=NodeHost(doomed_node.path), ends=False) as on,
    ):
        on.save(TOKENS, key="a")
        doomed_node.process.send_signal(how)
        assert doomed_node.process.wait(PATIENCE_S) == code
        until(lambda: "was lost" in str(on.lookup("b", TOKENS).problem))
        assert on.cache.load("b", [THERE]) is None
    with node(tmp_path / "node") as again, engine(again, "anew") as on:
        on.save("a", TOKENS, HERE)
        assert on.lookup("b", TOKENS) == Found(len(TOKENS))
        on.cache.release("b")


def test_a_node_that_no_engine_has_come_to_ends_when_told(tmp_path: Path) -> None:
    with node(tmp_path / "node") as at:
        until(lambda: "waiting for the first engine" in at.log)


def test_a_stranger_at_the_engines_socket_holds_nobody_up(tmp_path: Path) -> None:
    with node(tmp_path / "node") as at, engine(at, "one") as on:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(at.path)
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            assert stranger.recv(1) == b""
        on.save("a", TOKENS, HERE)
        assert stat.S_IMODE(os.stat(at.path).st_mode) == 0o600
