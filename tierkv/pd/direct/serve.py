"""The prefill node's side: claimers ask it, on connections of their own.

What an answer holds belongs to the claimer's connection: it ends with it, whoever ends it, or when
the claimer has asked for nothing more for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierkv.cache.keys import Prompt
from tierkv.errors import ConfigError, StoreCorruptError
from tierkv.pd.direct import neighbour
from tierkv.pd.direct.address import Channel, DirectAddress, secret_of
from tierkv.pd.direct.answers import Answers, Held
from tierkv.tasks import task_group

log = logging.getLogger("tierkv.handoff")

_MAX_CLAIMERS = 256
_FIRST_WORD_S = 2.0
_SEND_S = 5.0


class DirectServer:
    """Listens from its first offer on, inside `running()`.

    host, port: where; 0 takes a free port. held_s: how long an answer holds blocks at most.
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
        """Held for claimers, right now."""
        return self._answers.num_leases

    def offer(self, offer: str, prompt: Prompt) -> DirectAddress:
        """Tell who has this address where the prompt's blocks are, until `forget`. offer: a name
        that no other prompt has. Raises ConfigError if this node cannot listen."""
        listener = self._listener or self._listen()
        self._answers.prompts[offer] = prompt
        host, port = listener.getsockname()[:2]
        secret = secret_of(self._secret, offer)
        name = "" if self._near is None else neighbour.name_of(self._near)
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
        self._listener, self._near = listener, neighbour.listener(_MAX_CLAIMERS)
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
        held = Held(channel.peer_uid)
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
