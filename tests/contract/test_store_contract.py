"""What every store promises, checked on each of them."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.mooncake_server import (  # noqa: F401 - fixtures
    MooncakeServer,
    empty_mooncake,
    module_mooncake,
)
from tests.redis_groups import RedisCluster, empty_cluster, module_cluster  # noqa: F401 - fixtures
from tests.redis_server import RedisServer, empty_redis, module_redis  # noqa: F401 - fixtures
from tests.storage.sqlite_store import SqliteSettings, SqliteStore
from tests.storage.values import (
    Routed,
    Taken,
    TurnedClock,
    cancelled_after,
    content_of,
    get_one,
    landing,
    put_one,
)
from tierkv.clock import Clock, SystemClock
from tierkv.errors import BadRequestError, StoreCorruptError, StoreUnavailableError
from tierkv.storage.factory import StoreSettings, open_guarded_store, open_store
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.protocol import (
    Buffer,
    GetItem,
    GetStatus,
    PutItem,
    PutStatus,
    Store,
    StoredValue,
    Usage,
)
from tierkv.storage.redis.store import RedisSettings

KINDS = (
    "memory",
    "file",
    "redis",
    "cluster",
    pytest.param("mooncake", marks=pytest.mark.slow),  # 3 s a test to connect and close
    "layered",
    "routed",  # places, of which a name's beginning tells which
    "resilient",
    "sqlite",  # a store of somebody's own
)
SIZES = (0, 1, 15, 17, 4097, (1 << 20) + 3)
SETTINGS = StoreSettings(redis=RedisSettings(timeout_s=100.0, connect_timeout_s=50.0))


@dataclass
class Ground:
    """A place where stores of one kind keep their values. `open` gives a store on it.

    is_exact: of those who put one name at once one is told that its value was stored; of those who
        replace it, all. Otherwise some can be told that theirs failed.
    replaces_whole: who reads a value into buffers while it is replaced sees one of the two.
    """

    make: Callable[[], Store]
    clock: Clock
    server: RedisServer | None = None
    is_exact: bool = True
    replaces_whole: bool = True
    has_empty_values: bool = True
    makes_digests: bool = True
    lifetimes: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def open(self) -> Store:
        store = self.make()
        await self.lifetimes.enter_async_context(store.running())
        return store

    async def pass_ttl(self, store: Store, name: str, ttl_s: float) -> None:
        """Return when a value put with `ttl_s` (short: it can be real time) should be gone."""
        if not store.capabilities.has_ttl:
            pytest.skip("values of this store have no time to live")
        if isinstance(self.clock, TurnedClock):
            self.clock.now += ttl_s + 0.001  # Unix seconds as floats are exact to 0.2 us
            return
        async with asyncio.timeout(20):
            while await store.exists([name]):  # noqa: ASYNC110 - it is the server's clock
                await asyncio.sleep(ttl_s / 10)


def local_ground(kind: str, root: Path) -> Ground:
    clock = TurnedClock()
    patient = ResilienceSettings(negative_ttl_s=0.0, timeout_s=10.0, write_timeout_s=10.0)
    settings = replace(SETTINGS, resilience=patient)

    def at(url: str) -> Store:
        return open_store(url, settings, clock)

    files = [(root / str(i)).as_uri() for i in range(3)]
    makers: dict[str, Callable[[], Store]] = {
        "memory": lambda: at("memory://"),
        "file": lambda: at(files[0]),
        "layered": lambda: at(f"layered:memory://|{files[0]}"),
        "routed": lambda: Routed({"t:f": at(files[0]), "t:abc": at(files[1])}, at(files[2])),
        "resilient": lambda: open_guarded_store(files[0], settings, clock),
        "sqlite": lambda: SqliteStore(f"sqlite://{root}/values", SqliteSettings(), clock),
    }
    return Ground(makers[kind], clock, makes_digests=kind not in ("memory", "layered", "sqlite"))


@pytest.fixture(params=KINDS)
async def ground(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ground]:
    clock = SystemClock()
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("empty_redis")
        ground = Ground(lambda: open_store(server.url, SETTINGS, clock), clock, server)
    elif request.param == "cluster":
        cluster: RedisCluster = request.getfixturevalue("empty_cluster")
        ground = Ground(lambda: open_store(cluster.url, SETTINGS, clock), clock)
    elif request.param == "mooncake":
        mooncake: MooncakeServer = request.getfixturevalue("empty_mooncake")
        ground = Ground(
            lambda: open_store(mooncake.url, SETTINGS, clock),
            clock,
            is_exact=False,
            replaces_whole=False,
            has_empty_values=False,
            makes_digests=False,
        )
    else:
        ground = local_ground(request.param, tmp_path)
    async with ground.lifetimes:
        yield ground


@pytest.fixture
async def store(ground: Ground) -> Store:
    return await ground.open()


@pytest.fixture
def listing_store(store: Store) -> Store:
    if not store.capabilities.has_listing:
        pytest.skip("this store does not tell what it has")
    return store


@pytest.mark.promise("Every store returns a value whole or not at all.")
async def test_a_value_of_any_size_comes_back_byte_for_byte(ground: Ground, store: Store) -> None:
    for num_bytes in SIZES if ground.has_empty_values else SIZES[1:]:
        name, content = f"t:f:{num_bytes}:0", content_of("a", num_bytes)
        assert await put_one(store, name, content) is PutStatus.STORED
        assert await get_one(store, name, num_bytes) == (GetStatus.HIT, content)
        assert await store.get(name, max_bytes=num_bytes) == content


@pytest.mark.parametrize(
    ("cuts", "rooms"),
    [([0, 1, 1, 17, 4113, 4113, 10_000], [88, 0, 9_000, 912]), (range(0, 7_501, 3), [5] * 1_500)],
    ids=["some", "thousands"],
)
async def test_parts_are_written_and_read_in_order_wherever_the_cuts_are(
    store: Store, cuts: Sequence[int], rooms: list[int]
) -> None:
    content = content_of("parts", cuts[-1])
    kinds: list[Callable[[bytes], Buffer]] = [bytes, bytearray, memoryview]
    parts = [kinds[at % 3](content[a:b]) for at, (a, b) in enumerate(pairwise(cuts))]
    [put] = await store.put([PutItem("t:f:parts:0", tuple(parts))])
    assert put.status is PutStatus.STORED
    item, buffers = landing("t:f:parts:0", *rooms)
    [got] = await store.get_into([item])
    assert got.status is GetStatus.HIT
    assert b"".join(buffers) == content


async def test_a_value_is_made_complete_before_it_is_written(store: Store) -> None:
    """By every store, however many copies of it there will be."""

    def incomplete(name: str, num_bytes: int, **how: bool) -> tuple[PutItem, bytes]:
        header, payload = bytearray(16), content_of(name, num_bytes)

        def complete() -> None:
            header[:] = content_of(f"head of {name}", 16)

        item = PutItem(f"t:f:{name}:0", (header, payload), complete=complete, **how)
        return item, content_of(f"head of {name}", 16) + payload

    whats = [incomplete(f"{at}-{size}", size) for at in range(4) for size in (0, 4113, 300_000)]
    whats += [
        incomplete("new", 900, only_new=True),
        incomplete("replaced", 900, keep_existing=False),
    ]
    put = await store.put([item for item, _ in whats])
    assert {outcome.status for outcome in put} == {PutStatus.STORED}
    for item, content in whats:
        assert await get_one(store, item.name, len(content)) == (GetStatus.HIT, content)


async def test_of_many_names_it_is_told_for_each_whether_it_has_a_value(store: Store) -> None:
    names = [f"t:f:{index:04}:0" for index in range(1_100)]
    there = {names[at] for at in (0, 1, 7, 500, 1_023, 1_024, 1_099)}
    await store.put([PutItem(name, (b"x",)) for name in sorted(there)])
    assert await store.present(names) == [name in there for name in names]
    assert await store.present([]) == []
    with pytest.raises(BadRequestError):
        await store.present(["t:f:1:0", "no name"])


async def test_elements_wider_than_a_byte_are_taken_as_their_bytes(store: Store) -> None:
    content = content_of("wide", 4_096)
    await store.put([PutItem("t:f:wide:0", (memoryview(content).cast("I"),))])
    buffer = bytearray(4_096)
    [got] = await store.get_into([GetItem("t:f:wide:0", (memoryview(buffer).cast("Q"),))])
    assert got.status is GetStatus.HIT
    assert buffer == content


async def test_outcomes_keep_the_order_of_the_question_holes_included(store: Store) -> None:
    names = [f"t:f:{index:03}:0" for index in range(100)]
    sizes = {name: 1 + 397 * at for at, name in enumerate(random.sample(names, 60))}
    puts = await store.put([PutItem(n, (content_of(n, size),)) for n, size in sizes.items()])
    assert [outcome.status for outcome in puts] == [PutStatus.STORED] * 60
    landings = [landing(name, 24_000) for name in names]
    gots = await store.get_into([item for item, _ in landings])
    for name, got, (_, [buffer]) in zip(names, gots, landings, strict=True):
        size = sizes.get(name, 0)
        assert got.status is (GetStatus.HIT if size else GetStatus.MISS)
        assert got.num_bytes == size
        assert buffer[:size] == (content_of(name, size) if size else b"")


@pytest.mark.parametrize("num_bytes", [1, 4097, (1 << 20) + 3, 5 << 20])
async def test_a_digest_receives_exactly_the_bytes_of_a_value(
    ground: Ground, store: Store, num_bytes: int
) -> None:
    content = content_of("t:f:a:0", num_bytes)
    await put_one(store, "t:f:a:0", content)
    item, buffers = landing("t:f:a:0", num_bytes // 3, num_bytes - num_bytes // 3)
    missing, _ = landing("t:f:missing:0", 10)
    items = [replace(item, digest=Taken), replace(missing, digest=Taken)]
    hit, miss = await store.get_into(items)
    assert (hit.status, miss.status, miss.digest) == (GetStatus.HIT, GetStatus.MISS, None)
    assert isinstance(hit.digest, Taken) is ground.makes_digests
    if isinstance(hit.digest, Taken):
        assert hit.digest.content == b"".join(buffers) == content
    [unwanted] = await store.get_into([replace(item, digest=lambda: None)])
    assert (unwanted.status, unwanted.digest) == (GetStatus.HIT, None)


async def test_empty_batches_ask_nothing(store: Store) -> None:
    assert await store.get_into([]) == []
    assert await store.put([]) == []
    assert await store.exists([]) == 0
    assert await store.delete([]) == 0


async def test_a_value_without_room_is_damage_not_a_hit(store: Store) -> None:
    await put_one(store, "t:f:a:0", content_of("a", 1_000))
    for got in await store.get_into([landing("t:f:a:0", room)[0] for room in (0, 1, 999)]):
        assert got.status is GetStatus.DAMAGED
        assert "1000 bytes" in got.reason


async def test_a_value_comes_with_its_length_into_room_that_is_longer(
    ground: Ground, store: Store
) -> None:
    for num_bytes in (0, 1, 87, 88, 89, 1_000, 700_000, (2 << 20) - 1, 2 << 20):
        if not num_bytes and not ground.has_empty_values:
            continue
        content = content_of("a", num_bytes)
        await put_one(store, "t:f:a:0", content, keep_existing=False)
        for digest in (None, Taken):
            item, buffers = landing("t:f:a:0", 88, 0, 600_000, 2 << 20)
            [got] = await store.get_into([replace(item, digest=digest)])
            assert (got.status, got.num_bytes) == (GetStatus.HIT, num_bytes)
            assert b"".join(buffers)[:num_bytes] == content
            if isinstance(got.digest, Taken):
                assert got.digest.content == content


async def test_a_small_value_longer_than_allowed_is_corrupt(store: Store) -> None:
    await put_one(store, "t:ticket:a", b"x" * 101)
    with pytest.raises(StoreCorruptError, match="101 bytes"):
        await store.get("t:ticket:a", max_bytes=100)
    assert await store.get("t:ticket:b", max_bytes=100) is None


async def test_an_existing_value_is_kept_or_replaced_with_nothing_left_of_it(store: Store) -> None:
    first = b"a long first value"
    assert await put_one(store, "t:f:a:0", first, ttl_s=1_000.0) is PutStatus.STORED
    assert await put_one(store, "t:f:a:0", b"other") is PutStatus.EXISTED
    assert await store.get("t:f:a:0", max_bytes=100) == first
    assert await put_one(store, "t:f:a:0", b"new", keep_existing=False) is PutStatus.STORED
    assert await store.get("t:f:a:0", max_bytes=100) == b"new"
    if not store.capabilities.has_listing:
        return
    [value] = (await store.list("t:", limit=10)).values
    assert value == StoredValue("t:f:a:0", 3, None)


async def test_a_value_is_gone_when_its_time_is_over(ground: Ground, store: Store) -> None:
    await put_one(store, "t:f:unread:0", b"short", ttl_s=0.05)
    await put_one(store, "t:f:a:0", b"short", ttl_s=0.05)
    await put_one(store, "t:f:b:0", b"long", ttl_s=1_000.0)
    await put_one(store, "t:f:c:0", b"ever")
    await ground.pass_ttl(store, "t:f:a:0", 0.05)
    assert await store.exists(["t:f:a:0"]) == 0
    assert (await get_one(store, "t:f:a:0", 5))[0] is GetStatus.MISS
    assert await store.get("t:f:a:0", max_bytes=5) is None
    expiry = {value.name: value.expires_at for value in (await store.list("t", limit=10)).values}
    in_a_while = pytest.approx(ground.clock.wall() + 1_000, abs=5)
    assert expiry == {"t:f:b:0": in_a_while, "t:f:c:0": None}
    assert await store.usage("t") == Usage(2, 8)
    assert await store.delete(["t:f:a:0", "t:f:unread:0"]) == 0
    assert await store.exists(["t:f:b:0", "t:f:c:0"]) == 2
    assert await put_one(store, "t:f:a:0", b"new") is PutStatus.STORED
    assert await store.get("t:f:a:0", max_bytes=10) == b"new"


async def test_touching_gives_values_a_new_time_to_live(ground: Ground, store: Store) -> None:
    if not store.capabilities.has_ttl:
        pytest.skip("values of this store have no time to live")
    await put_one(store, "t:f:a:0", b"a", ttl_s=1.0)
    await put_one(store, "t:f:b:0", b"b")
    assert await store.touch(["t:f:a:0", "t:f:b:0", "t:f:nothing:0"], ttl_s=1_000.0) == 2
    await put_one(store, "t:f:c:0", b"c", ttl_s=1.0)
    await ground.pass_ttl(store, "t:f:c:0", 1.0)
    assert await store.exists(["t:f:a:0", "t:f:b:0"]) == 2
    for value in (await store.list("t:f:", limit=10)).values:
        assert value.expires_at == pytest.approx(ground.clock.wall() + 1_000, abs=5)
    await store.touch(["t:f:a:0"], ttl_s=0.05)
    await ground.pass_ttl(store, "t:f:a:0", 0.05)
    assert await store.exists(["t:f:a:0"]) == 0
    with pytest.raises(BadRequestError, match="time to live"):
        await store.touch(["t:f:a:0"], ttl_s=0.0)


async def test_deleting_counts_what_there_was(store: Store) -> None:
    for name in ("t:f:a:0", "t:f:b:0", "t:f:c:0"):
        await put_one(store, name, b"x")
    assert await store.delete(["t:f:a:0", "t:f:nothing:0", "t:f:c:0"]) == 2
    assert await store.exists(["t:f:b:0"]) == 1
    assert await store.exists(["t:f:a:0"]) == 0
    assert await put_one(store, "t:f:a:0", b"again") is PutStatus.STORED


async def test_exists_counts_the_leading_run_only(store: Store) -> None:
    names = [f"t:f:{index:04}:0" for index in range(1_300)]
    await store.put([PutItem(name, (b"x",)) for name in names])
    for gap in (0, 1, 511, 512, 513, 1_024, 1_299, 1_300):
        missing = [names[at] for at in (gap, gap + 1, gap + 400) if at < len(names)]
        await store.delete(missing)
        assert await store.exists(names) == gap
        await store.put([PutItem(name, (b"x",)) for name in missing])


async def listed(store: Store, prefix: str, limit: int) -> list[str]:
    names, cursor = [], None
    while True:
        page = await store.list(prefix, limit=limit, cursor=cursor)
        names += [value.name for value in page.values]
        if page.cursor is None:
            return names
        cursor = page.cursor


OUTSIDE = ("t", "t:ab", "t:abc", "u:abc:d:0", "tt:abc:d:0", "t:ab:abc:d", "t-abc:d", "t:ABC:d:0")


@pytest.mark.parametrize("limit", [7, 100])
async def test_a_listing_in_pages_has_each_value_under_the_prefix_and_no_other(
    listing_store: Store, limit: int
) -> None:
    store = listing_store
    inside = {f"t:abc:{index:02}:{shard}" for index in range(20) for shard in ("0", "s1of2")}
    inside |= {"t:abcd", "t:abc-e:x:0", "t:abc:" + "x" * 128 + ":partial:9:" + "y" * 99}
    await store.put([PutItem(name, (b"123",)) for name in (*inside, *OUTSIDE)])
    names = await listed(store, "t:abc", limit)
    assert set(names) == inside | {"t:abc"}
    assert len(names) == len(set(names))
    assert await store.usage("t:abc") == Usage(len(inside) + 1, 3 * (len(inside) + 1))
    assert set(await listed(store, "t:abc:", limit)) == {n for n in inside if n[:6] == "t:abc:"}
    assert await store.usage("t:nothing") == Usage(0, 0)
    assert await listed(store, "t:nothing:", limit) == []


async def test_a_page_that_is_cut_short_by_deletions_still_leads_on(listing_store: Store) -> None:
    store = listing_store
    names = {f"t:f:{index:02}:0" for index in range(40)}
    await store.put([PutItem(name, (b"1",)) for name in names])
    page = await store.list("t:f:", limit=5)
    seen = {value.name for value in page.values}
    await store.delete(list(seen))
    while page.cursor is not None:
        page = await store.list("t:f:", limit=5, cursor=page.cursor)
        seen |= {value.name for value in page.values}
    assert seen == names


# fmt: off
BAD_NAMES = (
    "", ".", "..", "a/b", "../../etc/passwd", "a:../b", "a:..:b", "a..b", "/etc/passwd",
    "a\r\nFLUSHALL\r\n", "a\r\n$3\r\nGET", "a\n", "a\0b", "a b", "a\t", "a\x7f", "a ", " a", "%00",
    "a*", "a?", "[a]", "a\\b", "a]", "[^a]", "{a}b", "a%2e%2e%2fb", "a'b", 'a"b', "a;b", "$(a)",
    "~a", "a@b", "a|b", "a#b", ":", "a:", "a::b", ":a", ".a", "-a", "a,b", "a+b", "\u00e4",
    "a\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}", "\N{ARABIC-INDIC DIGIT ONE}",
    "\ud800", "a" * 10_240, "a:" * 5_000 + "a", ":".join(["a" * 60] * 5),
)
# fmt: on


@pytest.mark.promise("Every store refuses bad names before I/O.")
async def test_bad_names_are_refused_before_the_store_is_asked(ground: Ground) -> None:
    store = ground.make()  # closed: asking it would be an error
    for name in (*BAD_NAMES, *(f"a{chr(code)}b" for code in range(128))):
        if re.fullmatch(r"a[A-Za-z0-9._:-]b", name):
            continue
        for make in (partial(PutItem, name, (b"x",)), partial(GetItem, name, ())):
            with pytest.raises(BadRequestError):
                make()
        asks: list[Coroutine[object, object, object]] = [
            store.get(name, max_bytes=1),
            store.exists(["good", name]),
            store.delete(["good", name]),
            store.touch(["good", name], ttl_s=1.0),
            store.present(["good", name]),
        ]
        if name != "a:":  # a prefix may end in a colon
            asks += [store.list(name, limit=1), store.usage(name)]
        for ask in asks:
            with pytest.raises(BadRequestError):
                await ask


ALIKE = ("t:f:a:0", "t:f:A:0", "t:F:a:0", "t:f:a.:0", "t:f:a:0.", "t:f:a-:0", "t:f:a_:0", "t.f:a:0")


async def test_names_that_a_file_system_or_a_pattern_could_take_for_each_other_are_several(
    store: Store,
) -> None:
    longest = "t:f:" + ":".join("x" * 40 + last for last in "abcdef")[-246:]
    names = (*ALIKE, longest, longest[:-1] + "F", longest.replace("a:", "A:", 1))
    for name in names:
        assert await put_one(store, name, name.encode()) is PutStatus.STORED
    for name in names:
        assert await get_one(store, name, len(name)) == (GetStatus.HIT, name.encode())
    if store.capabilities.has_listing:
        assert {v.name for v in (await store.list("t:f:a.", limit=50)).values} == {"t:f:a.:0"}
        assert await store.usage("t:F") == Usage(1, len("t:F:a:0"))
    assert await store.delete([names[0], longest]) == 2
    assert await store.present(names) == [name not in {names[0], longest} for name in names]


async def test_a_foreign_cursor_and_a_page_of_no_values_are_refused(listing_store: Store) -> None:
    for cursor in ("", "../../x", "-1", "x\0", "1" * 1_000, "9" * 20, "٣"):
        with pytest.raises(BadRequestError, match="cursor"):
            await listing_store.list("t:f:", limit=10, cursor=cursor)
    with pytest.raises(BadRequestError):
        await listing_store.list("t:f:", limit=0)


@pytest.mark.promise("Every store returns a value whole or not at all.")
@pytest.mark.parametrize("how", ["keep_existing", "only_new", "replace"])
async def test_of_concurrent_writers_of_one_name_one_is_kept_whole(
    ground: Ground, how: str
) -> None:
    is_first_kept = how != "replace"
    options = {"keep_existing": how == "keep_existing", "only_new": how == "only_new"}
    stores = [await ground.open()]
    if stores[0].capabilities.is_shared:
        stores.append(await ground.open())
    contents = [bytes([writer]) * 300_001 for writer in range(12)]
    async with asyncio.TaskGroup() as group:
        start, of_each = group.create_task, [stores[at % len(stores)] for at in range(12)]
        writers = [
            start(put_one(one, "t:f:a:0", content, **options))
            for one, content in zip(of_each, contents, strict=True)
        ]
        readers = [start(get_one(one, "t:f:a:0", 300_001)) for one in of_each]
        small = [start(get_if_there(one, "t:f:a:0", 300_001)) for one in of_each]
    statuses = [writer.result() for writer in writers]
    [winner] = {await store.get("t:f:a:0", max_bytes=300_001) for store in stores}
    assert winner in contents
    if how == "only_new" or (is_first_kept and ground.is_exact):
        assert statuses.count(PutStatus.STORED) == 1
    if ground.is_exact and is_first_kept:
        assert statuses.count(PutStatus.EXISTED) == 11
        assert winner == contents[statuses.index(PutStatus.STORED)]
    elif ground.is_exact:
        assert set(statuses) == {PutStatus.STORED}
    else:
        other = PutStatus.EXISTED if is_first_kept else PutStatus.FAILED
        assert set(statuses) <= {PutStatus.STORED, other}
    if is_first_kept or ground.replaces_whole:
        for status, content in (reader.result() for reader in readers):
            assert status is GetStatus.MISS or content in contents
    assert {one.result() for one in small} <= {None, *contents}


async def get_if_there(store: Store, name: str, max_bytes: int) -> bytes | None:
    """None too where the store has no answer for now."""
    try:
        return await store.get(name, max_bytes=max_bytes)
    except StoreUnavailableError:
        return None


async def test_instances_share_values_where_they_say_so(ground: Ground) -> None:
    first, second = await ground.open(), await ground.open()
    await put_one(first, "t:f:a:0", b"shared", ttl_s=1_000.0)
    seen = await second.get("t:f:a:0", max_bytes=10)
    assert seen == (b"shared" if first.capabilities.is_shared else None)


async def test_durable_values_are_there_for_the_next_instance(ground: Ground) -> None:
    store = ground.make()
    async with store.running():
        await put_one(store, "t:f:a:0", b"kept")
        is_durable = store.capabilities.is_durable
    again = await ground.open()
    assert (await again.exists(["t:f:a:0"]) == 1) is is_durable


@pytest.mark.promise("A cancelled call spoils no later answer and no buffer.")
async def test_cancels_at_random_points_never_spoil_a_later_answer(
    ground: Ground, store: Store
) -> None:
    names = [f"t:f:{index}:0" for index in range(8)]
    sizes = [random.choice((5, 70_000, 300_000)) for _ in names]
    for name, size in zip(names, sizes, strict=True):
        await put_one(store, name, content_of(name, size))
    has_listing = store.capabilities.has_listing
    for round_number in range(150):
        chosen = random.sample(range(8), 3)
        landings = [landing(names[i], sizes[i]) for i in chosen]
        fresh = f"t:fresh:{round_number}:0"
        work: list[Callable[[], Coroutine[object, object, object]]] = [
            lambda landings=landings: store.get_into([item for item, _ in landings]),  # type: ignore[misc]
            lambda fresh=fresh: store.put([PutItem(fresh, (content_of(fresh, 70_000),))]),  # type: ignore[misc]
            lambda chosen=chosen: store.get(names[chosen[0]], max_bytes=300_000),  # type: ignore[misc]
            lambda: store.exists(names),
            lambda: store.usage("t:f:") if has_listing else store.exists(names),
        ]
        await cancelled_after(random.randrange(60), random.choice(work)())
        for _, [buffer] in landings:
            buffer[:] = b"\xa5" * len(buffer)  # ours again: nobody may write here any more
        probe = random.randrange(8)
        assert await get_one(store, names[probe], sizes[probe]) == (
            GetStatus.HIT,
            content_of(names[probe], sizes[probe]),
        )
        for _, [buffer] in landings:
            assert buffer == b"\xa5" * len(buffer)
        if await store.exists([fresh]):
            assert await store.get(fresh, max_bytes=70_000) == content_of(fresh, 70_000)
    if ground.server is not None:
        most = SETTINGS.redis.num_connections + SETTINGS.redis.write_connections + 1
        assert await asyncio.to_thread(ground.server.num_connections) <= most


@pytest.mark.promise("A cancelled call spoils no later answer and no buffer.")
async def test_a_cancelled_put_leaves_the_callers_buffers_alone(store: Store) -> None:
    for ticks in range(0, 60, 3):
        buffer = bytearray(b"\x11" * 200_000)
        name = f"t:f:{ticks}:0"
        await cancelled_after(ticks, store.put([PutItem(name, (memoryview(buffer),))]))
        buffer[:] = b"\x22" * len(buffer)
        if await store.exists([name]):
            assert await store.get(name, max_bytes=200_000) == b"\x11" * 200_000


async def test_leaving_ends_what_is_under_way_and_refuses_the_rest(ground: Ground) -> None:
    store = ground.make()
    item, [buffer] = landing("t:f:a:0", 500_000)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group, store.running():
        await put_one(store, "t:f:a:0", content_of("a", 500_000))
        puts = [
            group.create_task(put_one(store, f"t:f:{i}:0", content_of("b", 500_000)))
            for i in range(8)
        ]
        got = group.create_task(store.get_into([item]))
        asked = group.create_task(outcome_of(store.exists(["t:f:a:0"])))
        for _ in range(random.randrange(20)):
            await asyncio.sleep(0)
    assert {put.result() for put in puts} <= {PutStatus.STORED, PutStatus.FAILED}
    if got.result()[0].status is GetStatus.HIT:
        assert buffer == content_of("a", 500_000)
    assert asked.result() in {1, StoreUnavailableError}
    assert await put_one(store, "t:f:z:0", b"late") is PutStatus.FAILED
    assert (await get_one(store, "t:f:a:0", 5))[0] is GetStatus.FAILED
    for late in (store.ping(), store.exists(["a"]), store.usage("t"), store.list("t", limit=1)):
        assert await outcome_of(late) is StoreUnavailableError


async def outcome_of(work: Coroutine[object, object, object]) -> object:
    try:
        return await work
    except StoreUnavailableError:
        return StoreUnavailableError


async def test_what_is_raised_inside_a_lifetime_comes_out_as_it_is(ground: Ground) -> None:
    store = ground.make()
    with pytest.raises(KeyError, match="mine"):
        async with store.running():
            raise KeyError("mine")


async def test_a_store_can_be_opened_again(ground: Ground) -> None:
    store = ground.make()
    for content in (b"first", b"again"):
        async with store.running():
            await store.ping()
            await put_one(store, "t:f:a:0", content, keep_existing=False)
            assert await store.get("t:f:a:0", max_bytes=10) == content


@pytest.mark.promise("A store's printed URL contains no secret.")
async def test_the_url_tells_no_secrets(ground: Ground) -> None:
    assert "@" not in ground.make().url
