"""The storage section of a node's settings, from TOML and the environment to the open store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tierkv.api.node import Node
from tierkv.api.routes_status import Health, health_of
from tierkv.api.settings import NodeSettings
from tierkv.config import load
from tierkv.errors import ConfigError, TierKVError
from tierkv.gpu.cpu import CpuDevice
from tierkv.storage.codec import SealedCodec, SignedCodec, SmallCodec, Trust
from tierkv.storage.guard import GuardedStore
from tierkv.storage.protocol import BreakerState

KEY = "ab" * 32


def settings(folder: Path, toml: str = "", **environ: str) -> NodeSettings:
    path = folder / "node.toml"
    path.write_text(toml)
    return load(NodeSettings, path, environ)


async def test_a_node_opens_its_store_behind_a_breaker_with_deadlines_of_250_ms(
    tmp_path: Path,
) -> None:
    chosen = await asyncio.to_thread(
        settings, tmp_path, f'[storage]\nurl = "file://{tmp_path}/store"\n[node]\nport = 0'
    )
    node = Node(chosen, environ={})
    async with node.running():
        assert isinstance(node.service.store, GuardedStore)
        [state] = node.service.storage_state()
        assert state.circuit == BreakerState.CLOSED.value
        async with asyncio.timeout(20):
            while (await health_of(node))["storage"][0].value != "ok":
                pass  # a busy machine may miss the deadline
        await node.service.attach_storage("memory://")
        [state] = node.service.storage_state()
        assert (state.url, state.circuit) == ("memory://", BreakerState.CLOSED.value)
        node.service.detach_storage()
        assert (await health_of(node))["storage"] == (Health.OK, "no storage tier")
    storage = chosen.storage
    assert storage.redis.timeout_s == storage.redis.connect_timeout_s == 2.5
    assert storage.resilience.timeout_s > storage.redis.timeout_s, "whose errors say more"


def test_every_kind_of_store_has_its_table(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        """
        [storage]
        url = "layered:file:///near|redis://far:6379/0"
        peer_tensor_parallel = [1, 2]
        tenants = { 0123456789abcdef = "redis://other:6379/0" }
        [storage.mooncake]
        replicas = 2
        [storage.layered]
        near_ttl_s = 60
        [storage.resilience]
        timeout_s = 0.7
        [storage.redis.tls]
        ca = "/etc/ca.pem"
        """,
        TIERKV_STORAGE__RESILIENCE__PROBE_INTERVAL_S="0.5",
    ).storage
    assert found.mooncake.replicas == 2
    assert found.layered.near_ttl_s == 60
    assert found.resilience.timeout_s == 0.7
    assert found.resilience.probe_interval_s == 0.5
    assert found.peer_tensor_parallel == (1, 2)
    assert found.tenants == {"0123456789abcdef": "redis://other:6379/0"}


def test_the_key_comes_from_a_file_or_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    signed = settings(tmp_path, f'[storage]\ntrust = "signed"\nkey_file = "{file}"').storage
    assert isinstance(signed.codecs()("f" * 16), SignedCodec)
    sealed = settings(tmp_path, '[storage]\ntrust = "sealed"', TIERKV_STORAGE__KEY=KEY).storage
    assert sealed.trust is Trust.SEALED
    assert isinstance(sealed.codecs()("f" * 16), SealedCodec)
    assert KEY not in repr(sealed)
    value = sealed.small_codec().seal_small("tierkv:ticket:1", b"a ticket")
    assert SmallCodec(Trust.SEALED, bytes.fromhex(KEY)).unseal_small("tierkv:ticket:1", value)


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ('trust = "signed"', "key_file"),
        (f'key = "{KEY}"', "set storage.trust"),
        (f'trust = "sealed"\nkey = "{KEY}"\nkey_file = "x"', "both"),
        ('trust = "maybe"', "trust"),
        ("peer_tensor_parallel = [0]", "peer_tensor_parallel"),
        ("[storage.mooncake]\nreplica = 1", "storage.mooncake.replica"),
    ],
)
def test_what_cannot_be_is_refused_and_named(toml: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(tmp_path, "[storage]\n" + toml)


@pytest.mark.parametrize("content", ["", "xyz", "ab" * 31, "ä" * 64])
def test_a_key_that_is_none_is_refused_without_repeating_it(content: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    found = settings(tmp_path, f'[storage]\ntrust = "signed"\nkey_file = "{file}"').storage
    with pytest.raises(ConfigError) as caught:
        found.codecs()
    assert not content or content not in str(caught.value)


def test_ranks_that_the_device_does_not_have_are_refused(tmp_path: Path) -> None:
    split = settings(tmp_path, '[cache]\ntensor_parallel = 2\n[storage]\nurl = "none"')
    assert Node(split, environ={}).service.ranks is not None
    with pytest.raises(ConfigError, match="tensor_parallel is 2, but the device has 1"):
        Node(split, environ={}, device=CpuDevice())
    with pytest.raises(TierKVError, match="cannot be spread"):
        Node(settings(tmp_path, "[cache]\ntensor_parallel = 3"), environ={"HOME": "/"})
