"""Direct paths: reading blocks from the memory of the node that computed them, without storage.

This module has both sides. A prefill node (producer) runs a server. A decode node (claimer) opens
one connection to this server for each claim, and reads the blocks from the producer's memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import CopyState, Ids, Tier
from tierkv.errors import ConfigError, StoreCorruptError
from tierkv.gpu import process_memory
from tierkv.gpu.process_memory import CPU_PLACE
from tierkv.gpu.protocol import HostSlots, Sharing
from tierkv.pd.direct.address import (
    MAX_BLOCKS,
    Channel,
    DirectAddress,
    DirectAnswer,
    DirectAsk,
    connect_near,
    name_of,
    near_listener,
    secret_of,
    this_machine,
)
from tierkv.pd.direct.landing import Landing, ShownPlanes
from tierkv.pd.direct.offers import (
    Offer,
    Offers,
    Peer,
    TransferEngine,
)
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.pd.source import PeerSource, Supply
from tierkv.pd.tickets import HandoffStats, OpenTicket, Ticket, TicketLedger
from tierkv.sched.tiers import Tiers
from tierkv.storage.base import WorkerThreads
from tierkv.storage.codec import Codec, PayloadCodecs, PlainCodec
from tierkv.tasks import supervised, task_group
from tierkv.threads import in_thread
from tierkv.transfer.storage_io import Slices, StorageIO

log = logging.getLogger(__name__)

_MAX_CLAIMERS = 256
_FIRST_WORD_S = 2.0
_SEND_S = 5.0
_MAX_FAILURES = 1024

_PLAIN = PlainCodec(PayloadCodecs())  # the bytes travel as they lie in memory


@dataclass(slots=True)
class ShownBlocks:
    """The leases of the blocks in the last answer to one claimer.

    Attributes:
        uid: user id of the claimer's process; None if it is not known.
        leases: leases that protect these blocks from eviction; [] if there are none.
    """

    uid: int | None
    leases: list[Lease] = field(default_factory=list)


class DirectServer:
    """The prefill node's server. Claimers ask it where blocks of a prompt lie in its memory.

    The server listens on a TCP port and, for this machine, on a Unix socket, both opened at the
    first offer. The blocks of an answer are not evicted until the claimer's connection closes, or
    until `held_s` seconds have passed without another question.
    """

    def __init__(  # noqa: PLR0913 - collaborators and settings
        self,
        tiers: Tiers,
        slices: Slices,
        slots: HostSlots,
        *,
        where: tuple[str, int],
        machine: str,
        planes: ShownPlanes | None,
        held_s: float,
        stats: HandoffStats,
    ) -> None:
        """Create the server; the first `offer` opens its sockets.

        Args:
            tiers: the tiers of this node.
            slices: makes the header of a stored block, which answers contain for verification.
            slots: the host tier's memory.
            where: IP address and TCP port; port 0 for a free one.
            machine: identity of this machine, from `this_machine`.
            planes: describes this node's device memory; None if other processes cannot read it.
            held_s: seconds for which the blocks of an answer are not evicted, unless the claimer
                asks again.
            stats: counts of the node's hand-offs.
        """
        self._tiers = tiers
        self._slices = slices
        self._slots = slots
        self._where = where
        self._machine = machine
        self._planes = planes
        self._held_s = held_s
        self._stats = stats
        self._threads = WorkerThreads("direct hand-off", 1)
        self._secret = os.urandom(32)
        self._prompts: dict[str, Prompt] = {}  # by the name of their offer
        self._failures: OrderedDict[str, str] = OrderedDict()  # of ended offers, the newest last
        self._listener: socket.socket | None = None
        self._near: socket.socket | None = None  # a Unix socket, for this machine
        self._wanted = asyncio.Event()
        self._claimers: set[asyncio.Task[None]] = set()
        self.num_leases = 0  # of claimers now

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer the questions of claimers during the `with` block.

        At its end all connections are closed, and the blocks of the last answers lose their
        protection from eviction.
        """
        async with self._threads.running():
            try:
                async with (
                    task_group() as group,
                    supervised({"tierkv-direct": partial(self._serve, group)}),
                ):
                    try:
                        yield
                    finally:
                        self._prompts.clear()
            finally:
                for one in (self._listener, self._near):
                    if one is not None:  # only after the server has stopped
                        one.close()

    def offer(self, offer: str, prompt: Prompt) -> DirectAddress:
        """Answer questions about the prompt's blocks until `forget` is called.

        Args:
            offer: unique name for this prompt, which the claimers' questions contain.
            prompt: the prompt of the offered blocks.

        Returns:
            The address at which claimers ask.

        Raises:
            ConfigError: this node cannot listen.
        """
        listener = self._listener or self._listen()
        self._prompts[offer] = prompt
        self._failures.pop(offer, None)
        host, port = listener.getsockname()[:2]
        secret = secret_of(self._secret, offer)
        name = "" if self._near is None else name_of(self._near)
        return DirectAddress(host=host, port=port, secret=secret, offer=offer, name=name)

    def is_offered(self, offer: str) -> bool:
        return offer in self._prompts

    def forget(self, offer: str, failure: str) -> None:
        """End an offer. Blocks in earlier answers stay protected until their connections end.

        Args:
            offer: name of the offer.
            failure: the reason why there is no ticket, for claimers that ask; "" for none.
        """
        self._prompts.pop(offer, None)
        if failure:
            self._failures[offer] = failure
            if len(self._failures) > _MAX_FAILURES:
                self._failures.popitem(last=False)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._where[0] else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.settimeout(0)
            listener.bind(self._where)
            listener.listen(_MAX_CLAIMERS)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"this node cannot listen at {self._where} ({error.strerror}): "
                "change handoff.direct_host or handoff.direct_port"
            ) from error
        self._listener, self._near = listener, near_listener(_MAX_CLAIMERS)
        self._wanted.set()
        return listener

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        await self._wanted.wait()
        assert self._listener is not None, "set before `_wanted`"

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
            await channel.send_nonce()
            left_s = _FIRST_WORD_S
            while True:
                async with asyncio.timeout(left_s):
                    ask = await channel.next_ask(self._secret)
                answer = await self._answer(ask, held)
                async with asyncio.timeout(_SEND_S):
                    await channel.send_answer(answer, secret_of(self._secret, ask.offer))
                left_s = self._held_s
        except (OSError, EOFError, TimeoutError):
            pass  # the claimer has disconnected, or hangs
        except StoreCorruptError as error:
            log.warning("a claimer's question for block addresses was refused: %s", error)
        except AssertionError:
            raise  # our own state is wrong
        except Exception:
            log.exception(
                "a claimer's question could not be answered: the claimer reads from storage"
            )
        finally:
            self._release_shown(held)
            channel.close()

    # Answers to claimers

    async def _answer(self, ask: DirectAsk, held: ShownBlocks) -> DirectAnswer:
        """Answer a claimer's question for blocks of this node's memory.

        The blocks in the answer are leased, and the leases of the previous answer end. `held` has
        the leases.
        """
        was_held = bool(held.leases) and self._tiers.mover.device.failure is None
        self._release_shown(held)
        prompt = self._prompts.get(ask.offer)
        if prompt is None:
            answer = DirectAnswer(failure=self._failures.get(ask.offer, ""))
        elif not 0 <= ask.first < ask.stop <= ask.first + MAX_BLOCKS:
            answer = DirectAnswer()
        elif ask.machine:
            answer = await self._on_device(ask, prompt, held)
        else:
            answer = await self._on_host(ask, prompt, held)
        self._stats.shown_blocks += len(answer.blocks) + len(answer.block_ids)
        return msgspec.structs.replace(answer, was_held=was_held)

    def _hold(self, prompt: Prompt, stop: int, held: ShownBlocks) -> Lease:
        index = self._tiers.index
        held.leases.append(index.hold(index.match(prompt).node, stop))
        self.num_leases += 1
        return held.leases[-1]

    def _release_shown(self, held: ShownBlocks) -> None:
        for lease in held.leases:
            self._tiers.index.release(lease)
            self.num_leases -= 1
        if held.leases:
            held.leases.clear()
            self._tiers.work.capacity_changed()

    async def _on_device(self, ask: DirectAsk, prompt: Prompt, held: ShownBlocks) -> DirectAnswer:
        stop = min(ask.stop, self._tiers.index.match(prompt).device_blocks)
        # The handle lets a process read and write all planes, as each one of this user can anyway.
        may = ask.machine == self._machine and held.uid == os.geteuid()
        is_sound = self._tiers.mover.device.failure is None
        if stop <= ask.first or self._planes is None or not may or not is_sound:
            return DirectAnswer()
        node = self._hold(prompt, stop, held).node
        try:
            planes = await self._threads.run(self._planes.describe)
        except ConfigError as error:
            log.warning(
                "the device's blocks cannot be read by other processes, so claims read "
                "them from storage: %s",
                error,
            )
            self._release_shown(held)
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
        keys = tiers.copies.prompt_keys(prompt)[ask.first : stop]
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


_ANSWER_S = 1.0  # an answer takes some ms; without one, blocks come from storage


class Claimer(Supply):
    """The decode node's side of one claim: it asks the producer where blocks lie in its memory."""

    def __init__(
        self,
        tiers: Tiers,
        offers: Offers,
        landing: Landing | None,
        *,
        machine: str,
        may_land: Callable[[], bool],
    ) -> None:
        """Create the object for one claim; `learn` sets the producer's address later.

        Args:
            tiers: the tiers of this node.
            offers: the list of producers' blocks that this node's fetches read; the producer's
                answers are added to the list.
            landing: copies blocks from other nodes' devices; None if this node cannot read other
                nodes' devices.
            machine: identity of this machine, from `this_machine`.
            may_land: returns True if the device has room for the claim's blocks now.
        """
        super().__init__()
        self._tiers = tiers
        self._offers = offers
        self._landing = landing
        self._machine = machine
        self._may_land = may_land
        self._address: DirectAddress | None = None
        self._is_silent = self._is_near = False
        self._near: Landing | None = None  # set if the producer's device can be read
        self._peer: Peer | None = None
        self._channel: Channel | None = None
        self._mine: list[tuple[bytes, Offer]] = []

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Set the producer's address to the one in a ticket or open ticket.

        If the address differs from the present one, close the connection to the present producer.
        """
        address = ticket.direct
        if address is None or address == self._address:
            return
        self._hang_up()
        self._address, self._is_silent = address, False
        self._is_near = address.machine == self._machine != ""
        self._near = self._landing if self._is_near and address.place else None
        self._peer = self._offers.peer(address, is_near=self._is_near)

    async def ask(self, prompt: Prompt) -> None:
        """Ask the producer for the memory addresses of the blocks of `prompt` that this node lacks.

        Blocks on the producer's device are copied to this node's device in this call, if possible.
        Blocks in the producer's host tier are only recorded; later fetches read them from there.
        One call can run at a time.
        """
        if self._near is not None and self._may_land():
            await self._land(prompt, self._near)
        peer = self._peer
        first, stop = self._tiers.index.match(prompt).num_blocks, prompt.num_blocks
        if peer is None or peer.is_given_up or first >= stop:
            return
        answer = await self._answer_to(first, min(stop, first + MAX_BLOCKS))
        if answer is None:
            peer.is_given_up = True
        elif self._peer is peer:
            self._note(answer, peer, self._tiers.copies.prompt_keys(prompt).all_digests())

    async def _land(self, prompt: Prompt, landing: Landing) -> None:
        match = self._tiers.index.match(prompt)
        first, stop = match.device_blocks, prompt.num_blocks
        assert self._address is not None, "`_near` is set only with an address"
        stop = min(stop, first + MAX_BLOCKS)
        if first >= stop or match.loading_blocks or not landing.can_reach(self._address.place):
            return
        answer = await self._answer_to(first, stop, self._machine)
        if answer is None or answer.planes is None or not 0 < len(answer.block_ids) <= stop - first:
            return
        assert self._channel is not None, "the answer came over the channel"
        was_held = partial(self._was_held, self._channel, self._address)
        ids = np.array(answer.block_ids, np.int32)
        is_whole = False
        try:
            is_whole = await landing.land(prompt, first, answer.planes, ids, was_held)
            if is_whole:
                size = prompt.block_size
                landed = range(first * size, (first + len(ids)) * size)
                self.came.append(landed)
                self.direct.append(landed)
        finally:
            if not is_whole:
                self._hang_up()  # an answer may still be on its way

    async def _was_held(self, channel: Channel, address: DirectAddress) -> bool:
        """Ask whether the blocks of the producer's last answer were protected until now.

        The question ends the protection from eviction. Return False if the producer does not
        answer.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                return (await _ask(channel, address)).was_held
        except (OSError, EOFError, TimeoutError, StoreCorruptError) as error:
            log.info("the producer of a ticket no longer answers: %r", error)
            return False

    async def _answer_to(self, first: int, stop: int, machine: str = "") -> DirectAnswer | None:
        address = self._address
        if self._is_silent or address is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._exchange(address, first, stop, machine)
        except (OSError, EOFError, TimeoutError, StoreCorruptError) as error:
            log.info("the producer of a ticket cannot be reached: %r", error)
            self._is_silent = True
            return None

    async def _exchange(
        self, address: DirectAddress, first: int, stop: int, machine: str
    ) -> DirectAnswer:
        try:
            if self._channel is None:
                self._channel = await self._connect(address)
                await self._channel.receive_nonce()
            return await _ask(self._channel, address, first, stop, machine)
        except BaseException:
            self._hang_up()  # the next answer on this connection would be that to this question
            raise

    async def failure(self) -> str:
        """Ask the producer why it has given up the publish.

        The call opens a connection of its own. After a new question on the connection that `ask`
        uses, the producer could evict the blocks that its last answer offered.

        Returns:
            The reason; "" if the producer has not given up, or does not answer.
        """
        address = self._address
        if address is None:
            return ""
        try:
            async with asyncio.timeout(_ANSWER_S):
                channel = await self._connect(address)
                try:
                    await channel.receive_nonce()
                    return (await _ask(channel, address)).failure
                finally:
                    channel.close()
        except (OSError, EOFError, TimeoutError, StoreCorruptError):
            return ""  # a producer that died loses its lease

    async def _connect(self, address: DirectAddress) -> Channel:
        if self._is_near and address.name:
            return Channel(*await connect_near(address.name))
        return Channel(*await asyncio.open_connection(address.host, address.port))

    def _note(self, answer: DirectAnswer, peer: Peer, digests: Sequence[bytes]) -> None:
        self._forget()
        rows = zip(answer.blocks, answer.addresses, answer.headers, strict=True)
        for block, address, header in rows:
            if 0 <= block < len(digests):
                offer = Offer(peer, address, header)
                self._offers.add(digests[block], offer)
                self._mine.append((digests[block], offer))

    def _forget(self) -> None:
        for digest, offer in self._mine:
            self._offers.remove(digest, offer)
        self._mine.clear()

    def _hang_up(self) -> None:
        self._forget()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """Close the connection, so that the producer can evict the blocks of its last answer."""
        self._hang_up()
        self._address = self._peer = self._near = None


async def _ask(
    channel: Channel, address: DirectAddress, first: int = 0, stop: int = 0, machine: str = ""
) -> DirectAnswer:
    ask = DirectAsk(offer=address.offer, first=first, stop=stop, machine=machine)
    await channel.send_ask(ask, address.secret)
    return await channel.answer(address.secret)


_LOOPBACK = "127.0.0.1"
_ENGINE_START_S = 10.0


class Direct(PeerSource):
    """The `PeerSource` of a node that offers its memory, or reads other nodes' memory.

    Inside `running()`, fetches that use `offers` as their source read blocks from producers.

    Args:
        tiers: the tiers of this node.
        storage: the storage tier.
        slots: the host tier's memory.
        settings: the permitted paths and addresses.
        codecs: function that returns the codec for stored blocks of a fingerprint, given by
            `Fingerprint.short`. None if all blocks have plain checksums. Only blocks with plain
            checksums are offered: everyone who can read the store knows the secrets in tickets, and
            could read signed or encrypted blocks with them.
        stats: counts of the node's hand-offs.
        allocate: function that acquires device slots; its arguments are a prompt and a number of
            blocks.
    """

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        tiers: Tiers,
        storage: StorageIO,
        slots: HostSlots,
        settings: HandoffSettings,
        *,
        codecs: Callable[[str], Codec] | None,
        stats: HandoffStats,
        allocate: Callable[[Prompt, int], Ids],
    ) -> None:
        self._tiers = tiers
        self._allocate = allocate
        self._storage = storage
        self._slots = slots
        self._settings = settings
        self._codecs = codecs
        self._stats = stats
        self._machine = ""
        self._pid = 0  # the process with memory that other nodes may read
        self._planes: ShownPlanes | None = None
        self._place = ""
        self._landing: Landing | None = None
        self._engine: TransferEngine | None = None
        self._server: DirectServer | None = None
        self._num_claims = 0
        self.offers = Offers(storage, stats)

    @property
    def num_leases(self) -> int:
        return 0 if self._server is None else self._server.num_leases

    @property
    def num_offered(self) -> int:
        return self.offers.num_offers

    def findings(self) -> list[str]:
        left = 0 if self._num_claims else self.num_offered
        return (
            [f"no claim runs, but {left} blocks offered by other nodes are listed"] if left else []
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        way, host = self._settings.direct, self._settings.direct_host
        async with AsyncExitStack() as stack:
            if way is not DirectPath.NETWORK:
                self._machine = await in_thread(this_machine)
            if way in (DirectPath.AUTO, DirectPath.MEMORY) and process_memory.is_possible():
                self._pid = os.getpid() if self._machine else 0
                self.offers.reads_memory = bool(self._machine)
            if way in (DirectPath.AUTO, DirectPath.DEVICE) and self._machine:
                await self._share_device(stack)
            if way in (DirectPath.AUTO, DirectPath.NETWORK) and host:
                await self._start_engine(host, stack)
            await stack.enter_async_context(self.offers.running())
            server = DirectServer(
                self._tiers,
                self._storage.slices,
                self._slots,
                where=(host or _LOOPBACK, self._settings.direct_port),
                machine=self._machine,
                planes=self._planes,
                held_s=self._settings.direct_lease_s,
                stats=self._stats,
            )
            await stack.enter_async_context(server.running())
            self._server = server
            try:
                yield
            finally:
                self._server = None

    async def _share_device(self, stack: AsyncExitStack) -> None:
        sharing = self._tiers.mover.device.sharing
        is_asked_for = self._settings.direct is DirectPath.DEVICE
        # Between CPUs, the path `memory` is used.
        if sharing is None or (sharing.place == CPU_PLACE and not is_asked_for):
            if is_asked_for:
                log.warning(
                    'handoff.direct is "device", but this device cannot share its memory: '
                    "claims read from storage"
                )
            return
        self._landing = Landing(self._tiers, sharing, self._stats, allocate=self._allocate)
        await stack.enter_async_context(self._landing.running())
        await self._show_planes(sharing)

    async def _show_planes(self, sharing: Sharing) -> None:
        planes = ShownPlanes(sharing, lambda: self._tiers.mover.planes)
        try:
            await in_thread(planes.describe)
        except ConfigError as error:
            log.warning(
                "the device's blocks cannot be read by other processes, so claims read "
                "them from storage: %s",
                error,
            )
            return
        self._planes, self._place = planes, sharing.place

    async def _start_engine(self, host: str, stack: AsyncExitStack) -> None:
        try:
            async with asyncio.timeout(_ENGINE_START_S):
                self._engine = await in_thread(TransferEngine, host)
        except (ConfigError, TimeoutError) as error:
            log.warning(
                "Mooncake's transfer engine did not start, so claims over the network "
                "read from storage: %s",
                error,
            )
            return
        stack.callback(self._engine.close)
        self.offers.engine = self._engine
        log.warning(
            "the transfer engine of %s listens on every address of this machine: any "
            "process that reaches its ports can read and write the host tier, so keep "
            "them in a private network",
            self._engine.name,
        )

    # The prefill node's side

    @property
    def _shows_host(self) -> bool:
        return bool(self._pid) or self._engine is not None

    def offer(self, ticket_id: str, prompt: Prompt, ledger: TicketLedger) -> DirectAddress | None:
        server = self._server
        if server is None or not self._is_plain(prompt.space):
            return None
        if not (self._shows_host or self._planes):
            return None
        # The name has the prompt's digest: an id can be reused, and device bytes have no checksum.
        offer = f"{self._tiers.copies.prompt_keys(prompt)[-1].digest.hex()}:{ticket_id}"
        is_new = not server.is_offered(offer)
        try:
            address = server.offer(offer, prompt)
            if self._engine is not None:
                self._engine.show(self._slots.array)
        except ConfigError as error:
            log.warning(
                "this prompt has no direct path, so its claim reads from storage: %s", error
            )
            return None
        if is_new:
            ledger.hold(ticket_id, lambda failure: server.forget(offer, failure))
        return msgspec.structs.replace(
            address,
            machine=self._machine,
            pid=self._pid,
            place=self._place,
            engine=self._engine.name if self._engine else "",
        )

    def _is_plain(self, space: str) -> bool:
        if self._codecs is None:
            return True
        return isinstance(self._codecs(space or self._storage.names.fingerprint), PlainCodec)

    @property
    def wants_host_copies(self) -> bool:
        is_enough = self._planes is not None and self._engine is None
        return self._server is not None and self._shows_host and not is_enough

    # The decode node's side

    @contextmanager
    def supply(self, may_land: Callable[[], bool] = lambda: True) -> Iterator[Claimer]:
        claimer = Claimer(
            self._tiers,
            self.offers,
            self._landing,
            machine=self._machine,
            may_land=may_land,
        )
        self._num_claims += 1
        try:
            yield claimer
        finally:
            self._num_claims -= 1
            claimer.close()
