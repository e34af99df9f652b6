"""The prefill node's side: claimers ask it, on connections of their own, where the blocks of its
tickets lie.

What an answer holds belongs to the claimer's connection: it ends with it, whoever ends it, or when
the claimer has asked for nothing more for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tierkv.cache.copies import CopyState
from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import Tier
from tierkv.errors import ConfigError, StoreCorruptError
from tierkv.gpu.protocol import HostSlots
from tierkv.pd.direct.address import (
    MAX_BLOCKS,
    Channel,
    DirectAddress,
    DirectAnswer,
    DirectAsk,
    name_of,
    near_listener,
    secret_of,
)
from tierkv.pd.direct.landing import ShownPlanes
from tierkv.sched.tiers import Tiers
from tierkv.storage.codec import PlainCodec
from tierkv.storage.threads import WorkerThreads
from tierkv.tasks import task_group
from tierkv.transfer.slices import Slices

log = logging.getLogger("tierkv.handoff")

_MAX_CLAIMERS = 256
_FIRST_WORD_S = 2.0
_SEND_S = 5.0


class DirectServer:
    """Answers claimers on a TCP port, which it opens at the first offer, inside `running()`.

    host, port: the address; port 0 takes a free one. held_s: seconds that the blocks of an answer
        stay leased at most.
    """

    def __init__(self, answers: Answers, *, host: str, port: int, held_s: float) -> None:
        self._answers = answers
        self._where = (host, port)
        self._held_s = held_s
        self._secret = os.urandom(32)
        self._listener: socket.socket | None = None
        self._near: socket.socket | None = None  # the same for processes of this machine
        self._wanted = asyncio.Event()
        self._claimers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving ends every connection and what it holds."""
        async with self._answers.running():
            try:
                async with task_group() as group:
                    serving = group.create_task(self._serve(group), name="tierkv-direct")
                    try:
                        yield
                    finally:
                        serving.cancel()
                        self._answers.prompts.clear()
            finally:
                for one in (self._listener, self._near):
                    if one is not None:  # after the server, which counts on it
                        one.close()

    @property
    def num_leases(self) -> int:
        """ShownBlocks for claimers, right now."""
        return self._answers.num_leases

    def offer(self, offer: str, prompt: Prompt) -> DirectAddress:
        """Tell who has this address where the prompt's blocks are, until `forget`. offer: a name
        that no other prompt has. Raises ConfigError if this node cannot listen."""
        listener = self._listener or self._listen()
        self._answers.prompts[offer] = prompt
        host, port = listener.getsockname()[:2]
        secret = secret_of(self._secret, offer)
        name = "" if self._near is None else name_of(self._near)
        return DirectAddress(host=host, port=port, secret=secret, offer=offer, name=name)

    def is_offered(self, offer: str) -> bool:
        return offer in self._answers.prompts

    def forget(self, offer: str) -> None:
        """No new answers for it. What is held meanwhile ends with its connection."""
        self._answers.prompts.pop(offer, None)

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
        self._listener, self._near = listener, near_listener(_MAX_CLAIMERS)
        self._wanted.set()
        return listener

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        await self._wanted.wait()
        assert self._listener is not None, "that is what was waited for"

        def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(self._claimers) >= _MAX_CLAIMERS:
                writer.close()
                return
            work = self._claimer(Channel(reader, writer))
            task = group.create_task(work, name="tierkv-direct-claimer")
            self._claimers.add(task)
            task.add_done_callback(self._claimers.discard)

        servers = [await asyncio.start_server(came, sock=self._listener, limit=1 << 20)]
        try:
            if self._near is not None:
                near = await asyncio.start_unix_server(came, sock=self._near, limit=1 << 20)
                servers.append(near)
            await asyncio.Event().wait()
        finally:
            for server in servers:
                server.close()
            for task in self._claimers:
                task.cancel()

    async def _claimer(self, channel: Channel) -> None:
        held = ShownBlocks(channel.peer_uid)
        try:
            await channel.greet()
            left_s = _FIRST_WORD_S
            while True:
                async with asyncio.timeout(left_s):
                    ask = await channel.next_ask(self._secret)
                answer = await self._answers.answer(ask, held)
                async with asyncio.timeout(_SEND_S):
                    await channel.send_answer(answer, secret_of(self._secret, ask.offer))
                left_s = self._held_s
        except (OSError, EOFError, TimeoutError):
            pass  # it has gone, or hangs
        except StoreCorruptError as error:
            log.warning("refused to tell a claimer where blocks are: %s", error)
        finally:
            self._answers.let_go(held)
            channel.close()


_PLAIN = PlainCodec()


@dataclass(slots=True)
class ShownBlocks:
    """What the last answer on one connection names. uid: who is at its other end, None if that is
    not known."""

    uid: int | None
    leases: list[Lease] = field(default_factory=list)


class Answers:
    """What claimers are told: in which host slots or device blocks a prompt lies.

    prompts: the prompt of each offer, by the offer's name.

    planes: this node's, if it shows them, to claimers that say they are on `machine`.
    on_blocks: called with the number of blocks that a claimer was told of.
    """

    def __init__(  # noqa: PLR0913 - what it shows, and to whom
        self,
        tiers: Tiers,
        slices: Slices,
        slots: HostSlots,
        *,
        machine: str,
        planes: ShownPlanes | None,
        held_s: float,
        on_blocks: Callable[[int], None],
    ) -> None:
        self._tiers = tiers
        self._slices = slices
        self._slots = slots
        self._machine = machine
        self._planes = planes
        self._held_s = held_s
        self._on_blocks = on_blocks
        self._threads = WorkerThreads("direct hand-off", 1)
        self.prompts: dict[str, Prompt] = {}
        self.num_leases = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._threads.running():
            yield

    async def answer(self, ask: DirectAsk, held: ShownBlocks) -> DirectAnswer:
        """What of it is whole, held by a lease that is put into `held` in place of the last."""
        was_held = bool(held.leases) and self._tiers.mover.device.failure is None
        self.let_go(held)
        answer = await self._answer(ask, held)
        self._on_blocks(len(answer.blocks) + len(answer.block_ids))
        return msgspec.structs.replace(answer, held_s=self._held_s, was_held=was_held)

    def let_go(self, held: ShownBlocks) -> None:
        for lease in held.leases:
            self._tiers.index.release(lease)
            self.num_leases -= 1
        if held.leases:
            held.leases.clear()
            self._tiers.work.capacity_changed()

    async def _answer(self, ask: DirectAsk, held: ShownBlocks) -> DirectAnswer:
        prompt = self.prompts.get(ask.offer)
        if prompt is None or not 0 <= ask.first < ask.stop <= ask.first + MAX_BLOCKS:
            return DirectAnswer()
        if ask.machine:
            return await self._on_device(ask, prompt, held)
        return await self._on_host(ask, prompt, held)

    def _hold(self, prompt: Prompt, stop: int, held: ShownBlocks) -> Lease:
        index = self._tiers.index
        held.leases.append(index.hold(index.match(prompt).node, stop))
        self.num_leases += 1
        return held.leases[-1]

    async def _on_device(self, ask: DirectAsk, prompt: Prompt, held: ShownBlocks) -> DirectAnswer:
        stop = min(ask.stop, self._tiers.index.match(prompt).device_blocks)
        # Who has a handle can read and write all of the planes, as this user's processes can.
        may = ask.machine == self._machine and held.uid == os.geteuid()
        is_sound = self._tiers.mover.device.failure is None
        if stop <= ask.first or self._planes is None or not may or not is_sound:
            return DirectAnswer()
        node = self._hold(prompt, stop, held).node
        try:
            planes = await self._threads.run(self._planes.describe)
        except ConfigError as error:
            log.warning("the device's blocks are not shown: %s", error)
            self.let_go(held)
            return DirectAnswer()
        ids = self._tiers.index.slots(Tier.DEVICE, node, ask.first, stop)
        return DirectAnswer(planes=planes, block_ids=tuple(ids.tolist()))

    async def _on_host(self, ask: DirectAsk, prompt: Prompt, held: ShownBlocks) -> DirectAnswer:
        tiers, index = self._tiers, self._tiers.index
        stop = min(ask.stop, index.match(prompt).num_blocks)
        if stop <= ask.first:
            return DirectAnswer()
        node = self._hold(prompt, stop, held).node
        states = index.states(Tier.HOST, node, ask.first, stop)
        slots = index.slots(Tier.HOST, node, ask.first, stop).tolist()
        ready = [i for i, state in enumerate(states) if state is CopyState.READY]
        keys = tiers.prompt_keys(prompt)[ask.first : stop]
        rows = [(keys[i], slots[i]) for i in ready]
        headers = await self._threads.run(lambda: tuple(self._header(*row) for row in rows))
        array = self._slots.array
        base, width = int(array.ctypes.data), int(array.strides[0])
        return DirectAnswer(
            blocks=tuple(ask.first + i for i in ready),
            addresses=tuple(base + slot * width for _, slot in rows),
            headers=headers,
        )

    def _header(self, key: StoredKey, slot: int) -> bytes:
        part = self._slices.parts[0]
        payload = np.ascontiguousarray(part.payload(slot, key.num_tokens))
        return _PLAIN.encode(payload.data, self._slices.identity(key, part.shard))[0]
