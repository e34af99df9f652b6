"""A server or proxy closes all connections during requests.

The requests are carried out over new connections, and no outcome is wrong.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.redis_server import RedisServer
from tests.storage.values import Taken, content_of, landing, put_one, redis_store
from tierkv.errors import StoreUnavailableError
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus

VALUE_BYTES = 200_000
NAMES = [f"t:f:{index:02}:0" for index in range(16)]
CONTENT = {name: content_of(name, VALUE_BYTES) for name in NAMES}
ROUNDS = 4


async def test_connections_that_end_in_the_middle_cost_nobody_an_answer(
    empty_redis: RedisServer,
) -> None:
    store = redis_store(empty_redis.url)

    async def use(at: int) -> None:
        landings = [landing(name, VALUE_BYTES) for name in (NAMES[at], *NAMES[:7])]
        for outcome in await store.get_into([item for item, _ in landings]):
            assert outcome.status is GetStatus.HIT, outcome.reason
        for item, [buffer] in landings:
            assert buffer == CONTENT[item.name]
        assert await put_one(store, NAMES[at], bytes(VALUE_BYTES)) is PutStatus.EXISTED
        assert await store.exists(NAMES) == len(NAMES)

    async with store.running():
        await store.put([PutItem(name, (CONTENT[name],)) for name in NAMES])
        await end_in_the_middle(empty_redis, use)


async def test_what_is_not_the_same_the_second_time_is_right_or_not_answered(
    empty_redis: RedisServer,
) -> None:
    """A repeated read would update a digest twice; a repeated UNLINK would count no values."""
    store = redis_store(empty_redis.url)

    async def use(at: int) -> None:
        [item, [buffer]] = landing(NAMES[at], VALUE_BYTES)
        for _ in range(2):
            [outcome] = await store.get_into([replace(item, digest=Taken)])
            if outcome.status is GetStatus.HIT:
                assert isinstance(outcome.digest, Taken)
                assert outcome.digest.content == buffer == CONTENT[item.name]
            name = f"t:g:{at:02}:0"
            if await put_one(store, name, b"x", keep_existing=False) is not PutStatus.STORED:
                continue
            try:
                assert await store.delete([name]) == 1
            except StoreUnavailableError:
                continue

    async with store.running():
        await store.put([PutItem(name, (CONTENT[name],)) for name in NAMES])
        await end_in_the_middle(empty_redis, use)


async def test_only_what_may_be_done_twice_is_sent_again_to_a_server_that_ends_without_a_word() -> (
    None
):
    heard = Counter[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while said := await reader.read(65_536):
                verbs = re.findall(rb"\*\d+\r\n\$\d+\r\n([A-Z]+)\r\n", said)
                heard.update(verbs)
                if {b"UNLINK", b"EXISTS"} & set(verbs):
                    break
                for verb in verbs:
                    writer.write(b"+PONG\r\n" if verb == b"PING" else b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = redis_store(f"redis://127.0.0.1:{port}")
        async with store.running():
            with pytest.raises(StoreUnavailableError):
                await store.delete([NAMES[0]])
            with pytest.raises(StoreUnavailableError):
                await store.present([NAMES[0]])
    assert heard[b"UNLINK"] == 1
    assert heard[b"EXISTS"] > 1


async def end_in_the_middle(
    server: RedisServer, use: Callable[[int], Coroutine[None, None, None]]
) -> None:
    """Run `use` for all names, and close all connections once, in each of several rounds."""
    for _ in range(ROUNDS):
        async with asyncio.TaskGroup() as group:
            for at in range(len(NAMES)):
                group.create_task(use(at))
            await asyncio.to_thread(server.execute, "CLIENT", "KILL", "TYPE", "normal")
