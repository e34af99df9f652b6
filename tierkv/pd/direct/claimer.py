"""One claim's connection to the node that computes its prompt. See Supply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tierkv.cache.keys import Prompt
from tierkv.errors import StoreCorruptError
from tierkv.pd.direct.address import (
    MAX_BLOCKS,
    Channel,
    DirectAddress,
    DirectAnswer,
    DirectAsk,
    connect_near,
)
from tierkv.pd.direct.landing import Landing
from tierkv.pd.direct.offers import Offer, Offers, Peer
from tierkv.pd.ticket import OpenTicket, Ticket
from tierkv.sched.tiers import Tiers

log = logging.getLogger("tierkv.handoff")

_ANSWER_S = 1.0  # it takes some ms; storage is always there instead


class Claimer:
    """Asks the producer where blocks are, as soon as its address is known."""

    def __init__(
        self,
        tiers: Tiers,
        offers: Offers,
        landing: Landing | None,
        *,
        machine: str,
        may_land: Callable[[], bool],
    ) -> None:
        """landing: None if this node reads no other's device. machine: this one's, as
        `this_machine` says. may_land: whether the device has room for the claim's blocks now."""
        self._tiers = tiers
        self._offers = offers
        self._landing = landing
        self._machine = machine
        self._may_land = may_land
        self._address: DirectAddress | None = None
        self._is_silent = self._is_near = False
        self._near: Landing | None = None  # if blocks can come from the producer's device
        self._peer: Peer | None = None
        self._channel: Channel | None = None
        self._mine: list[tuple[bytes, Offer]] = []
        self.came: list[range] = []  # tokens of the prompt that were brought for this claim so far

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Another address means another producer."""
        address = ticket.direct
        if address is None or address == self._address:
            return
        self._hang_up()
        self._address, self._is_silent = address, False
        self._is_near = address.machine == self._machine != ""
        self._near = self._landing if self._is_near and address.place else None
        self._peer = self._offers.peer(address, is_near=self._is_near)

    async def ask(self, prompt: Prompt) -> None:
        """Bring blocks of `prompt` that this node has not to its device, or let the fetcher know
        where they are. One call at a time."""
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
            self._note(answer, peer, [key.digest for key in self._tiers.prompt_keys(prompt)])

    async def _land(self, prompt: Prompt, landing: Landing) -> None:
        """From the producer's device to this one's."""
        match = self._tiers.index.match(prompt)
        first, stop = match.device_blocks, prompt.num_blocks
        assert self._address is not None, "somebody is near"
        stop = min(stop, first + MAX_BLOCKS)
        if first >= stop or match.loading_blocks:
            return
        if not landing.is_worth_it(self._address.place, stop - first):
            return
        answer = await self._answer_to(first, stop, self._machine)
        if answer is None or answer.planes is None or not 0 < len(answer.block_ids) <= stop - first:
            return
        assert self._channel is not None, "the answer came by it"
        was_held = partial(self._was_held, self._channel, self._address)
        ids = np.array(answer.block_ids, np.int32)
        is_whole = False
        try:
            is_whole = await landing.land(prompt, first, answer.planes, ids, was_held)
            if is_whole:
                size = prompt.block_size
                self.came.append(range(first * size, (first + len(ids)) * size))
        finally:
            if not is_whole:
                self._hang_up()  # a word of it may still be on its way

    async def _was_held(self, channel: Channel, address: DirectAddress) -> bool:
        """What the last answer named, until now. The claim may have hung up meanwhile."""
        nothing = DirectAsk(offer=address.offer, first=0, stop=0)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await channel.send_ask(nothing, address.secret)
                return (await channel.answer(address.secret)).was_held
        except (OSError, EOFError, TimeoutError, StoreCorruptError) as error:
            log.info("the producer of a ticket does not answer any more: %r", error)
            return False

    async def _answer_to(self, first: int, stop: int, machine: str = "") -> DirectAnswer | None:
        """None, now and ever after, if the producer does not give one."""
        if self._is_silent or self._address is None:
            return None
        ask = DirectAsk(offer=self._address.offer, first=first, stop=stop, machine=machine)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._exchange(ask)
        except (OSError, EOFError, TimeoutError, StoreCorruptError) as error:
            log.info("the producer of a ticket cannot be asked: %r", error)
            self._is_silent = True
            return None

    async def _exchange(self, ask: DirectAsk) -> DirectAnswer:
        address = self._address
        assert address is not None, "there is somebody to ask"
        try:
            if self._channel is None:
                if self._is_near and address.name:
                    streams = await connect_near(address.name)
                else:
                    streams = await asyncio.open_connection(address.host, address.port)
                self._channel = Channel(*streams)
                await self._channel.be_greeted()
            await self._channel.send_ask(ask, address.secret)
            return await self._channel.answer(address.secret)
        except BaseException:
            self._hang_up()  # cancelled or not: the next answer would be that of this question
            raise

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
        """The producer lets go of what it held for this claim."""
        self._hang_up()
        self._address = self._peer = self._near = None
