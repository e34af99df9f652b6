"""The prefill node's side: tells claimers where blocks lie in its host tier, and holds them there.

What is held belongs to the claimer's connection: it ends with it, whoever ends it, or when the
claimer has asked for nothing more for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import Tier
from tierkv.cache.states import CopyState
from tierkv.errors import ConfigError, StoreCorruptError
from tierkv.gpu.protocol import HostSlots
from tierkv.pd.direct.address import (
    MAX_BLOCKS,
    Answer,
    Ask,
    Channel,
    DirectAddress,
    ticket_secret,
)
from tierkv.sched.tiers import Tiers
from tierkv.storage.codec import PlainCodec
from tierkv.storage.threads import WorkerThreads
from tierkv.tasks import task_group
from tierkv.transfer.storage_io_slices import Slices

log = logging.getLogger("tierkv.handoff")

_MAX_CLAIMERS = 256
_FIRST_WORD_S = 2.0
_SEND_S = 5.0
_PLAIN = PlainCodec()


class DirectServer:
    """Listens from its first offer on, inside `running()`.

    host, port: where; 0 takes a free port. held_s: how long an answer holds blocks at most.
    on_blocks: called with the number of blocks that a claimer was told of.
    """

    def __init__(  # noqa: PLR0913 - what it shows, and how it is reached
        self,
        tiers: Tiers,
        slices: Slices,
        slots: HostSlots,
        *,
        host: str,
        port: int,
        held_s: float,
        on_blocks: Callable[[int], None],
    ) -> None:
        self._tiers = tiers
        self._slices = slices
        self._slots = slots
        self._where = (host, port)
        self._held_s = held_s
        self._on_blocks = on_blocks
        self._secret = os.urandom(32)
        self._prompts: dict[str, Prompt] = {}
        self._listener: socket.socket | None = None
        self._wanted = asyncio.Event()
        self._threads = WorkerThreads("direct hand-off", 1)
        self._claimers: set[asyncio.Task[None]] = set()
        self.num_leases = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving ends every connection and what it holds."""
        async with self._threads.running(), task_group() as group:
            serving = group.create_task(self._serve(group), name="tierkv-direct")
            try:
                yield
            finally:
                serving.cancel()
                self._prompts.clear()
                if self._listener is not None:
                    self._listener.close()

    def offer(self, ticket_id: str, prompt: Prompt) -> DirectAddress:
        """Tell who has this address where the prompt's blocks are, until `forget`. Raises
        ConfigError if this node cannot listen."""
        listener = self._listener or self._listen()
        self._prompts[ticket_id] = prompt
        host, port = listener.getsockname()[:2]
        secret = ticket_secret(self._secret, ticket_id)
        return DirectAddress(host=host, port=port, secret=secret)

    def is_offered(self, ticket_id: str) -> bool:
        return ticket_id in self._prompts

    def forget(self, ticket_id: str) -> None:
        """No new answers for this ticket. What is held meanwhile ends with its connection."""
        self._prompts.pop(ticket_id, None)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._where[0] else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.settimeout(0)
            listener.bind(self._where)
            listener.listen(_MAX_CLAIMERS)
        except OSError as error:
            listener.close()
            raise ConfigError(f"handoff.direct_host {self._where}: {error.strerror}") from error
        self._listener = listener
        self._wanted.set()
        return listener

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        await self._wanted.wait()
        assert self._listener is not None, "that is what was waited for"

        def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(self._claimers) >= _MAX_CLAIMERS:
                writer.close()
                return
            work = self._claimer(reader, writer)
            task = group.create_task(work, name="tierkv-direct-claimer")
            self._claimers.add(task)
            task.add_done_callback(self._claimers.discard)

        server = await asyncio.start_server(came, sock=self._listener, limit=1 << 20)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for task in self._claimers:
                task.cancel()

    async def _claimer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        leases: list[Lease] = []
        try:
            await channel.greet()
            left_s = _FIRST_WORD_S
            while True:
                async with asyncio.timeout(left_s):
                    ask = await channel.next_ask(self._secret)
                self._end(leases)
                answer = await self._answer(ask, leases)
                async with asyncio.timeout(_SEND_S):
                    await channel.send_answer(answer, ticket_secret(self._secret, ask.ticket_id))
                left_s = self._held_s
        except (OSError, EOFError, TimeoutError):
            pass  # it has gone, or hangs
        except StoreCorruptError as error:
            log.warning("refused to tell a claimer where blocks are: %s", error)
        finally:
            self._end(leases)
            channel.close()

    def _end(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._tiers.index.release(lease)
            self.num_leases -= 1
        if leases:
            leases.clear()
            self._tiers.capacity_changed()

    async def _answer(self, ask: Ask, leases: list[Lease]) -> Answer:
        """What of it is whole on the host, held by a lease that is put into `leases`."""
        prompt = self._prompts.get(ask.ticket_id)
        if prompt is None or not 0 <= ask.first < ask.stop <= ask.first + MAX_BLOCKS:
            return Answer()
        tiers, index = self._tiers, self._tiers.index
        match = index.match(prompt)
        stop = min(ask.stop, match.num_blocks)
        if stop <= ask.first:
            return Answer()
        leases.append(index.hold(match.node, stop))
        self.num_leases += 1
        node = leases[-1].node
        states = index.states(Tier.HOST, node, ask.first, stop)
        slots = index.slots(Tier.HOST, node, ask.first, stop).tolist()
        ready = [i for i, state in enumerate(states) if state is CopyState.READY]
        keys = tiers.prompt_keys(prompt)[ask.first : stop]
        rows = [(keys[i], slots[i]) for i in ready]
        headers = await self._threads.run(lambda: tuple(self._header(*row) for row in rows))
        self._on_blocks(len(ready))
        array = self._slots.array
        base, width = int(array.ctypes.data), int(array.strides[0])
        return Answer(
            blocks=tuple(ask.first + i for i in ready),
            addresses=tuple(base + slot * width for _, slot in rows),
            headers=headers,
            held_s=self._held_s,
        )

    def _header(self, key: StoredKey, slot: int) -> bytes:
        part = self._slices.parts[0]
        payload = np.ascontiguousarray(part.payload(slot, key.num_tokens))
        return _PLAIN.encode(payload.data, self._slices.identity(key, part.shard))[0]
