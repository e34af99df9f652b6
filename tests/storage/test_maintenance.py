"""Commands of `tierkv storage`, with which an operator inspects and changes a store."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.redis_server import RedisServer
from tierkv.cli.storage import PATIENT, storage
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, StoreRefusedError, StoreUnavailableError
from tierkv.storage import maintenance
from tierkv.storage.codec import Codec, PlainCodec, TenantCodecs, Trust, ValueIdentity
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.file import FileStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import PutItem, Store

ONE, TWO = "tierkv:" + "1" * 16, "tierkv:" + "2" * 16


def item(
    group: str, number: int, *, ttl: float | None = None, codec: Codec | None = None
) -> PutItem:
    digest = bytes([number]) * 32
    parts = (codec or PlainCodec()).encode(b"p" * 1000, ValueIdentity(bytes(32), digest, 16))
    return PutItem(f"{group}:{digest.hex()}:0of1", parts, ttl_s=ttl)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = (tmp_path / "store").as_uri()
    asyncio.run(fill(url))
    return url


async def fill(url: str) -> None:
    store = open_store(url, StoreSettings(redis=PATIENT), SystemClock())
    async with store.running():
        await store.put([item(ONE, n) for n in range(1, 4)])
        await store.put([item(TWO, n, ttl=500.0) for n in range(1, 3)])
        await store.put([PutItem("tierkv:ticket:" + "a" * 64, (b"ticket",), ttl_s=60.0)])
        await store.put([PutItem("other:f:x:0", (b"not ours",))])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(storage, arguments, catch_exceptions=False)


def answer(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    loaded = json.loads(result.output)
    assert isinstance(loaded, dict)
    return loaded


def num_values(url: str, prefix: str = "tierkv") -> int:
    groups = answer("du", url, "--prefix", prefix)["groups"]
    assert isinstance(groups, dict)
    return sum(group["values"] for group in groups.values())


def test_usage_is_told_by_model_and_tenant(url: str) -> None:
    assert answer("du", url)["groups"] == {
        ONE: {"values": 3, "bytes": 3 * 1088},
        TWO: {"values": 2, "bytes": 2 * 1088},
        "tierkv:ticket": {"values": 1, "bytes": 6},
    }
    assert "3.2 KiB" in run("du", url).output


def test_values_are_listed_by_prefix(url: str) -> None:
    def names(*options: str) -> set[str]:
        values = answer("ls", url, *options)["values"]
        assert isinstance(values, list)
        return {value["name"][:23] for value in values}

    assert names() == {ONE, TWO, "tierkv:ticket:" + "a" * 9}
    assert names("--prefix", ONE) == {ONE}
    some = run("ls", url, "--limit", "2")
    assert len(some.stdout.splitlines()) == 2
    assert "more than these 2" in some.stderr
    assert answer("ls", url, "--limit", "2")["is_all"] is False
    assert answer("ls", url, "--limit", "6")["is_all"] is True
    assert not run("ls", url, "--limit", "6").stderr


def damage(url: str, *changed: PutItem) -> None:
    async def put() -> None:
        store = open_store(url, StoreSettings(), SystemClock())
        async with store.running():
            await store.put(changed)

    asyncio.run(put())


def cut_short(number: int) -> PutItem:
    return replace(item(ONE, number), parts=(b"short",), keep_existing=False)


def test_damaged_and_misfiled_values_are_found_and_removed(url: str) -> None:
    result = run("verify", url)
    assert result.exit_code == 0
    assert "5 whole, 0 damaged, 0 keyed, 1 no blocks" in result.output
    good = item(ONE, 9)
    content = bytearray(b"".join(good.parts))
    content[-1] ^= 1
    misfiled, short = PutItem(item(ONE, 8).name, item(ONE, 7).parts), cut_short(6)
    damage(url, PutItem(good.name, (content,)), misfiled, short)
    result = run("verify", url)
    assert result.exit_code == 1
    assert "5 whole, 3 damaged" in result.output
    assert "the value belongs to another block, 0707" in result.output
    assert run("verify", url, "--remove-damaged").exit_code == 0
    assert run("verify", url).exit_code == 0


def test_removing_is_said_first_and_done_on_demand(url: str) -> None:
    assert "would remove 3 values, 3.2 KiB" in run("rm", url, "--prefix", ONE).output
    assert num_values(url) == 6
    assert run("rm", url, "--prefix", ONE, "--yes").output == "removed 3 values\n"
    assert num_values(url) == 3
    assert num_values(url, "other") == 1


def test_who_stops_a_removal_is_told_how_far_it_was(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(
        _: Store, prefix: str, on_progress: Callable[[int], object], is_selected: object
    ) -> int:
        assert callable(is_selected)
        assert prefix == ONE
        on_progress(2)
        raise KeyboardInterrupt

    monkeypatch.setattr(maintenance, "remove", stopped)
    result = run("rm", url, "--prefix", ONE, "--yes")
    assert result.exit_code == 1
    assert "stopped after 2 values were removed" in result.stderr


def test_what_will_expire_soon_is_listed_counted_and_removed_alone(url: str) -> None:
    soon = ("--expires-within", "100")
    assert answer("du", url, *soon)["groups"] == {"tierkv:ticket": {"values": 1, "bytes": 6}}
    values = answer("ls", url, *soon)["values"]
    assert isinstance(values, list)
    assert [value["name"] for value in values] == ["tierkv:ticket:" + "a" * 64]
    for seconds, count in (("100", 1), ("1000", 3)):
        said = run("rm", url, "--prefix", "tierkv", "--expires-within", seconds).output
        assert said.startswith(f"would remove {count} values")
    assert run("rm", url, "--prefix", "tierkv", *soon, "--yes").output == "removed 1 values\n"
    assert num_values(url) == 5
    assert run("rm", url, "--prefix", "tierkv", "--expires-within", "nan").exit_code == 2


def test_a_deployment_is_not_taken_for_one_whose_name_begins_like_its_own(url: str) -> None:
    damage(url, PutItem("tierkv2:f:x:0", (b"of others",)))
    assert num_values(url) == 6
    assert run("rm", url, "--prefix", "tierkv", "--yes").stdout == "removed 6 values\n"
    assert num_values(url, "tierkv2") == 1
    assert num_values(url, "other") == 1


def test_where_there_is_nothing_it_is_said(url: str) -> None:
    for command in ("ls", "du"):
        result = run(command, url, "--prefix", "nobody")
        assert result.exit_code == 0
        assert not result.stdout
        assert "no such values with the prefix nobody:" in result.stderr


def test_looking_makes_no_store_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for name in ("nothing", "folder", "file"):
        for form in ("{}", "layered:{}|memory://", "layered:{0}|{0}"):
            result = CliRunner().invoke(storage, ["ls", form.format((tmp_path / name).as_uri())])
            assert isinstance(result.exception, ConfigError)
            assert "there is no store at file:" in str(result.exception)
    assert not (tmp_path / "nothing").exists()
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("prefix", ["*", "../x", "a b", ""])
def test_a_prefix_that_is_none_is_wrong_usage(url: str, prefix: str) -> None:
    assert run("rm", url, "--prefix", prefix, "--yes").exit_code == 2


@pytest.mark.parametrize("trust", [Trust.SIGNED, Trust.SEALED])
def test_keyed_values_are_verified_by_who_has_the_key(
    url: str, trust: Trust, tmp_path: Path
) -> None:
    codec = TenantCodecs(trust, bytes(32))("1" * 16)
    damage(url, item(ONE, 20, codec=codec), item(TWO, 21, codec=codec))
    assert "5 whole, 0 damaged, 2 keyed" in run("verify", url).output
    key = tmp_path / "key"
    key.write_text("00" * 32)
    result = run("verify", url, "--key-file", str(key))
    assert result.exit_code == 1  # the second was made with another tenant's key
    assert "6 whole, 1 damaged, 0 keyed" in result.output


def test_a_value_that_cannot_be_read_is_told_and_the_rest_verified(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread, get = item(ONE, 2).name, FileStore.get

    async def refused(store: FileStore, name: str, *, max_bytes: int) -> bytes | None:
        if name == unread:
            raise StoreUnavailableError(f"{name}: Permission denied")
        return await get(store, name, max_bytes=max_bytes)

    monkeypatch.setattr(FileStore, "get", refused)
    result = run("verify", url, "--remove-damaged")
    assert result.exit_code == 1
    assert f"{unread}: Permission denied\n" in result.output
    assert "4 whole, 0 damaged, 0 keyed, 1 no blocks, 0 removed since, 1 unread" in result.output
    found = json.loads(run("verify", url, "--json").output)
    assert (found["unread"], found["unread_names"]) == (1, {unread: "Permission denied"})
    monkeypatch.undo()
    assert run("verify", url).exit_code == 0


def test_a_store_that_dies_while_it_is_verified_is_an_error_and_no_result(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(*_: object, **__: object) -> None:
        raise StoreUnavailableError("it does not answer")

    for method in ("get", "ping"):
        monkeypatch.setattr(FileStore, method, dead)
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        run("verify", url)


def test_who_may_not_look_is_told_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", refused)
    with pytest.raises(StoreUnavailableError, match=r"Permission denied.*let user \d+"):
        run("ls", url)


@pytest.mark.parametrize("trust", [Trust.SIGNED, Trust.SEALED])
def test_damage_that_shows_without_a_key_is_told_without_one(url: str, trust: Trust) -> None:
    codec = TenantCodecs(trust, bytes(32))("1" * 16)
    content = b"".join(item(ONE, 20, codec=codec).parts)
    damage(
        url, replace(item(ONE, 20), parts=(content[:-1],)), replace(item(ONE, 21), parts=(content,))
    )
    assert "5 whole, 2 damaged, 0 keyed" in run("verify", url).output


def test_no_flipped_flag_hides_a_damaged_value(url: str) -> None:
    for bit in range(16):
        content = bytearray(b"".join(item(ONE, 10 + bit).parts))
        content[6 + bit // 8] ^= 1 << bit % 8
        damage(url, PutItem(item(ONE, 10 + bit).name, (content,)))
    assert "5 whole, 16 damaged, 0 keyed" in run("verify", url).output


def test_a_list_of_tails_is_no_block_and_can_be_damaged(url: str) -> None:
    parts = PlainCodec().encode(b"\x90", ValueIdentity(bytes(16), bytes(32), 0))
    damage(url, PutItem(f"{ONE}:{bytes(32).hex()}:tails", parts))
    assert "5 whole, 0 damaged, 0 keyed, 2 no blocks" in run("verify", url).output
    damage(url, PutItem(f"{TWO}:{bytes(32).hex()}:tails", (b"a list",)))
    assert "5 whole, 1 damaged, 0 keyed, 2 no blocks" in run("verify", url).output


def test_a_tail_filed_under_another_number_of_tokens_is_damaged(url: str) -> None:
    good = item(ONE, 9)  # 16 tokens
    damage(url, *(PutItem(f"{good.name}:partial:{tokens}", good.parts) for tokens in (16, 15)))
    assert "6 whole, 1 damaged" in run("verify", url).output


def test_what_only_one_of_several_stores_has_is_listed_counted_and_removed(
    tmp_path: Path,
) -> None:
    first, second = ((tmp_path / name).as_uri() for name in "ab")
    asyncio.run(fill(first))
    asyncio.run(fill(second))
    damage(first, item(ONE, 7))  # such as a near copy of a value that the far store has lost
    damage(second, item(ONE, 8))
    url = f"layered:{first}|{second}"
    names = [value["name"] for value in answer("ls", url, "--prefix", ONE)["values"]]  # type: ignore[attr-defined]
    assert sorted(names) == sorted(item(ONE, n).name for n in (1, 2, 3, 7, 8))
    assert num_values(url) == 8
    assert answer("du", url)["groups"][ONE]["values"] == 5  # type: ignore[index]
    assert run("rm", url, "--prefix", ONE, "--yes").output == "removed 5 values\n"
    for one in (first, second, url):
        assert num_values(one) == 3


def test_of_several_stores_it_is_said_whose_copy_is_damaged(tmp_path: Path) -> None:
    urls = [(tmp_path / name).as_uri() for name in "ab"]
    for one, numbers in zip(urls, ((1,), (1, 2)), strict=True):
        asyncio.run(fill(one))
        damage(one, *map(cut_short, numbers))
    result = run("verify", f"layered:{urls[0]}|{urls[1]}")
    why = "the value is shorter than its header"
    copies = ((1, urls[0]), (1, urls[1]), (2, urls[1]))
    expected = [f"{item(ONE, number).name}: {why} ({one})" for number, one in copies]
    assert sorted(result.output.splitlines()[:3]) == sorted(expected)
    found = json.loads(run("verify", f"layered:{urls[0]}|{urls[1]}", "--json").output)
    both = f"{why} ({urls[0]}); {why} ({urls[1]})"
    assert found["names"] == {item(ONE, 1).name: both, item(ONE, 2).name: f"{why} ({urls[1]})"}


def test_damage_that_cannot_be_removed_is_told_all_the_same(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(store: FileStore, names: Sequence[str]) -> int:
        raise StoreRefusedError(f"{names[0]}: Read-only file system")

    damage(url, cut_short(1))
    monkeypatch.setattr(FileStore, "delete", refused)
    result = run("verify", url, "--remove-damaged")
    assert result.exit_code == 1
    assert f"{item(ONE, 1).name}: the value is shorter" in result.stdout
    assert "4 whole, 1 damaged" in result.stdout
    assert "some damaged values could not be removed" in result.stderr
    assert "Read-only file system" in result.stderr


def test_a_near_store_that_is_down_keeps_nobody_from_the_far_one(tmp_path: Path) -> None:
    urls = [(tmp_path / name).as_uri() for name in "ab"]
    asyncio.run(fill(urls[1]))
    damage(urls[1], cut_short(1))
    urls[0] = "redis://127.0.0.1:1"
    url = f"layered:{'|'.join(urls)}"
    result = run("verify", url, "--remove-damaged")
    assert result.exit_code == 1
    assert "4 whole, 1 damaged" in result.stdout
    assert "error: redis://127.0.0.1:1/0 cannot be reached" in result.stderr
    assert num_values(url) == 5
    both = f"layered:{urls[0]}|{urls[0]}"
    for command in (("verify", both), ("ls", both)):
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            run(*command)


def test_a_store_of_several_is_given_as_much_time_as_one_alone(
    empty_redis: RedisServer, tmp_path: Path
) -> None:
    first = (tmp_path / "a").as_uri()
    asyncio.run(fill(first))
    asyncio.run(fill(empty_redis.url))
    empty_redis.execute("CLIENT", "PAUSE", 700, "WRITE")
    url = f"layered:{first}|{empty_redis.url}"
    assert run("rm", url, "--prefix", ONE, "--yes").output == "removed 3 values\n"
    assert num_values(empty_redis.url) == 3


async def test_no_removal_asks_for_more_at_once_than_a_node_gives_a_disk_the_time_for() -> None:
    sizes: list[int] = []

    class Counting(MemoryStore):
        async def delete(self, names: Sequence[str]) -> int:
            sizes.append(len(names))
            return await super().delete(names)

    store = Counting(MemorySettings(), SystemClock())
    async with store.running():
        await store.put([PutItem(f"t:f:{number}:0of1", (b"x",)) for number in range(1500)])
        assert await maintenance.remove(store, "t:") == 1500
    assert sum(sizes) == 1500
    assert max(sizes) <= 64
