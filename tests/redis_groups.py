"""Real Redis clusters, and masters with replicas and sentinels, on free ports of this machine."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import redis

from tests.redis_server import RedisServer, free_port, program, redis_server

_PATIENCE_S = 120.0
NUM_SLOTS = 16_384


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Block until `condition()` holds; servers that do not answer yet count as not."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up_at:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.02)
    raise RuntimeError(f"{what} did not come true within {_PATIENCE_S:g} s")


def _text(server: RedisServer, *command: str | int) -> str:
    reply = server.execute(*command)
    return reply.decode() if isinstance(reply, bytes) else str(reply)


@dataclass
class RedisCluster:
    """masters: each with an equal part of the slots; replicas: of the master of the same index."""

    masters: list[RedisServer]
    replicas: list[RedisServer] = field(default_factory=list)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.masters)
        return f"redis+cluster://{hosts}"

    def is_whole(self) -> bool:
        """Whether every node sees every slot served and the same number of nodes."""
        servers = [*self.masters, *self.replicas]
        infos = [_text(server, "CLUSTER", "INFO").splitlines() for server in servers]
        wanted = {"cluster_state:ok", f"cluster_known_nodes:{len(servers)}"}
        return all(wanted <= set(info) for info in infos)

    def empty(self) -> None:
        for server in self.masters:
            with contextlib.suppress(redis.RedisError):
                server.execute("FLUSHALL")

    def move_slots(self, slots: range, source: RedisServer, target: RedisServer) -> None:
        """Move slots and their keys, one by one, as a resharding does. Blocks."""
        source_id, target_id = _text(source, "CLUSTER", "MYID"), _text(target, "CLUSTER", "MYID")
        with (
            redis.Redis(port=source.port, protocol=2) as from_node,
            redis.Redis(port=target.port, protocol=2) as to_node,
        ):
            for slot in slots:
                to_node.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
                from_node.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
                while keys := from_node.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                    from_node.execute_command(
                        "MIGRATE", "127.0.0.1", target.port, "", 0, 60_000, "KEYS", *keys
                    )
                to_node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
                from_node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)


@contextmanager
def redis_cluster(num_masters: int, *, has_replicas: bool = False) -> Iterator[RedisCluster]:
    """A cluster whose slots are all served when the body begins. A master that dies is found dead
    after 1 s where there are replicas, which is what they are for."""
    with ExitStack() as stack:
        ports: dict[int, int] = {}
        # On a busy machine one that lives is silent for longer than 1 s, and then "CLUSTERDOWN".
        node_timeout_ms = 1_000 if has_replicas else 60_000

        def node() -> RedisServer:
            bus = free_port()
            # fmt: off
            server = stack.enter_context(redis_server(
                "--cluster-enabled", "yes", "--cluster-port", str(bus),
                "--cluster-node-timeout", str(node_timeout_ms),
                "--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0",
                "--cluster-migration-barrier", "10",
                # Else one that loses its last slot becomes a replica.
                "--cluster-allow-replica-migration", "no",
            ))
            # fmt: on
            ports[server.port] = bus
            return server

        cluster = RedisCluster([node() for _ in range(num_masters)])
        cluster.replicas = [node() for _ in range(num_masters if has_replicas else 0)]
        first = cluster.masters[0]
        for index, server in enumerate(cluster.masters):
            start, stop = (NUM_SLOTS * i // num_masters for i in (index, index + 1))
            server.execute("CLUSTER", "ADDSLOTSRANGE", start, stop - 1)
            server.execute("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for server in [*cluster.masters, *cluster.replicas][1:]:
            server.execute("CLUSTER", "MEET", "127.0.0.1", first.port, ports[first.port])
        wait_until(cluster.is_whole, "a whole cluster")
        for master, replica in zip(cluster.masters, cluster.replicas, strict=False):
            replica.execute("CLUSTER", "REPLICATE", _text(master, "CLUSTER", "MYID"))
        for replica in cluster.replicas:
            wait_until(partial(_is_in_step, replica), "a replica in step")
        yield cluster


def _is_in_step(replica: RedisServer) -> bool:
    with redis.Redis(port=replica.port, protocol=2) as client:
        return bool(client.info("replication").get("master_link_status") == "up")


@dataclass
class SentinelGroup:
    """A master, a replica and three sentinels that watch them as `kv`."""

    master: RedisServer
    replica: RedisServer
    sentinel_ports: list[int]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        return f"redis+sentinel://{hosts}/kv"

    def master_port(self) -> int:
        with redis.Redis(port=self.sentinel_ports[0], protocol=2) as client:
            reply = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv")
        return int(reply[1]) if isinstance(reply, (list, tuple)) else 0


@pytest.fixture(scope="module")
def module_cluster() -> Iterator[RedisCluster]:
    """A cluster of three masters for the tests of a module; use `empty_cluster`."""
    with redis_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def empty_cluster(module_cluster: RedisCluster) -> RedisCluster:
    """The module's cluster without values. A test leaves the slots where they were."""
    module_cluster.empty()
    return module_cluster


@contextmanager
def sentinel_group() -> Iterator[SentinelGroup]:
    """Ready, with all sentinels knowing each other, when the body begins."""
    server = program("redis-server")
    with ExitStack() as stack:
        master = stack.enter_context(redis_server("--repl-diskless-sync-delay", "0"))
        replica = stack.enter_context(redis_server("--replicaof", "127.0.0.1", str(master.port)))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-redis-")))
        ports = [free_port() for _ in range(3)]
        for port in ports:
            config = directory / f"{port}.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {directory}\nlogfile {directory}/{port}.log\n"
                f"sentinel monitor kv 127.0.0.1 {master.port} 2\n"
                "sentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 3000\n"
            )
            popen = subprocess.Popen([server, str(config), "--sentinel"])
            stack.callback(popen.wait)
            stack.callback(popen.kill)
        group = SentinelGroup(master, replica, ports)
        wait_until(lambda: _is_ready(group), "sentinels that know each other")
        yield group


def _is_ready(group: SentinelGroup) -> bool:
    for port in group.sentinel_ports:
        with redis.Redis(port=port, protocol=2) as client:
            [state] = client.sentinel_masters().values()
        if state["num-other-sentinels"] != 2 or state["num-slaves"] != 1:
            return False
    return _is_in_step(group.replica)
