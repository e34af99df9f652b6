"""One claim's connection to the node that computes its prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tierkv.cache.keys import Prompt
from tierkv.errors import StoreCorruptError
from tierkv.pd.direct.address import MAX_BLOCKS, Answer, Ask, Channel, DirectAddress
from tierkv.pd.direct.offers import Offer, Offers, Peer
from tierkv.sched.tiers import Tiers

log = logging.getLogger("tierkv.handoff")

_ANSWER_S = 1.0  # it takes some ms; storage is always there instead


class Claimer:
    """Asks the producer where blocks are, as soon as its address is known. What goes wrong means
    that blocks come from storage, and nothing else."""

    def __init__(self, ticket_id: str, tiers: Tiers, offers: Offers, *, machine: str) -> None:
        """machine: this one's, as `this_machine` says."""
        self._ticket_id = ticket_id
        self._tiers = tiers
        self._offers = offers
        self._machine = machine
        self._address: DirectAddress | None = None
        self._peer: Peer | None = None
        self._channel: Channel | None = None
        self._mine: list[tuple[bytes, Offer]] = []

    def learn(self, address: DirectAddress | None) -> None:
        """From a ticket, or an open one; another address means another producer."""
        if address is None or address == self._address:
            return
        self._hang_up()
        self._address, self._peer = address, None
        if self._offers.may_read_memory and address.machine and address.machine == self._machine:
            self._peer = Peer(address.pid, "")
        elif self._offers.engine is not None and address.engine:
            self._peer = Peer(None, address.engine)

    async def ask(self, prompt: Prompt) -> None:
        """Let the fetcher know where the blocks of `prompt` are that this node has not. One call
        at a time."""
        first, stop = self._tiers.index.match(prompt).num_blocks, prompt.num_blocks
        stop = min(stop, first + MAX_BLOCKS)
        peer = self._peer
        if peer is None or peer.is_given_up or first >= stop:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                ask = Ask(ticket_id=self._ticket_id, first=first, stop=stop)
                answer = await self._exchange(ask)
        except (OSError, EOFError, TimeoutError, StoreCorruptError) as error:
            log.info("the producer of a ticket cannot be asked: %r", error)
            peer.is_given_up = True
            return
        if self._peer is peer:
            self._note(answer, peer, [key.digest for key in self._tiers.prompt_keys(prompt)])

    async def _exchange(self, ask: Ask) -> Answer:
        address = self._address
        assert address is not None, "there is a peer"
        try:
            if self._channel is None:
                channel = Channel(*await asyncio.open_connection(address.host, address.port))
                self._channel = channel
                await channel.be_greeted()
            await self._channel.send_ask(ask, address.secret)
            return await self._channel.answer(address.secret)
        except BaseException:
            self._hang_up()  # cancelled or not: the next answer would be that of this question
            raise

    def _note(self, answer: Answer, peer: Peer, digests: Sequence[bytes]) -> None:
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
        """The producer lets go of what it held for this claim."""
        self._hang_up()
        self._peer = None
