"""The store on Mooncake, in short; the whole contract suite runs on it under the marker slow."""

# ruff: noqa: F811 - a fixture is asked for by the name it is imported under

from __future__ import annotations

import sys

import pytest

from tests.mooncake_server import (  # noqa: F401 - fixtures
    MooncakeServer,
    empty_mooncake,
    module_mooncake,
)
from tests.redis_server import free_port
from tests.storage.values import content_of, get_one, landing, put_one
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, StoreUnavailableError
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.mooncake import MooncakeSettings, MooncakeStore
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus


async def test_values_go_there_and_come_back(empty_mooncake: MooncakeServer) -> None:
    store = open_store(empty_mooncake.url, StoreSettings(), SystemClock())
    names = [f"t:f:{index:02}:0" for index in range(20)]
    async with store.running():
        await store.ping()
        items = [PutItem(n, (content_of(n, 88), content_of(n, 50_000))) for n in names[:15]]
        assert {o.status for o in await store.put(items)} == {PutStatus.STORED}
        assert {o.status for o in await store.put(items)} == {PutStatus.EXISTED}
        assert await store.exists(names) == 15
        landings = [landing(name, 88, 50_000) for name in names]
        outcomes = await store.get_into([item for item, _ in landings])
        assert [o.status for o in outcomes] == [GetStatus.HIT] * 15 + [GetStatus.MISS] * 5
        for name, (_, [header, payload]) in zip(names[:15], landings, strict=False):
            assert header == content_of(name, 88)
            assert payload == content_of(name, 50_000)
        for wrong in (50_087, 50_089, 10):
            assert (await get_one(store, names[0], wrong))[0] is GetStatus.DAMAGED
        assert await put_one(store, "t:ticket", b"one", keep_existing=False) is PutStatus.STORED
        assert await put_one(store, "t:ticket", b"second", keep_existing=False) is PutStatus.STORED
        assert await store.get("t:ticket", max_bytes=10) == b"second"
        assert await store.delete([*names, "t:ticket"]) == 16
        assert await store.exists(names) == 0
        with pytest.raises(StoreUnavailableError, match="cannot list"):
            await store.list("t", limit=10)


async def test_a_master_nobody_runs_is_reported(module_mooncake: MooncakeServer) -> None:
    store = MooncakeStore(f"mooncake://127.0.0.1:{free_port()}", MooncakeSettings())
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        async with store.running():
            pass


async def test_without_the_package_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    store = MooncakeStore("mooncake://127.0.0.1:1", MooncakeSettings())
    with pytest.raises(StoreUnavailableError, match=r"tierkv\[mooncake\].*libibverbs1"):
        async with store.running():
            pass


@pytest.mark.parametrize(
    "url", ["mooncake://", "mooncake://a", "mooncake://a:b", "mooncake://a:1/x"]
)
def test_a_url_without_a_master_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="accepted: mooncake://"):
        open_store(url, StoreSettings(), SystemClock())


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ({"num_threads": 0}, {"replicas": 0}, {"protocol": "udp"}):
        with pytest.raises(ConfigError):
            MooncakeSettings(**wrong)
