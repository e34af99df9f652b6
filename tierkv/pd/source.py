"""Where blocks of a prompt can be had besides storage: at the node that computed it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Protocol

from tierkv.cache.keys import Prompt
from tierkv.pd.direct.address import DirectAddress
from tierkv.pd.tickets import OpenTicket, Ticket, TicketLedger


class Supply(Protocol):
    """One claim's view of the node that computes its prompt. What goes wrong here means that blocks
    come from storage, and nothing else."""

    @property
    def came(self) -> list[range]:
        """Which tokens of the prompt were brought for this claim so far; whoever brings more adds
        to it."""

    @property
    def direct(self) -> list[range]:
        """Those of `came` that were another node's memory, not storage; added to likewise."""

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Who computes the prompt, and where that node can be asked."""

    async def ask(self, prompt: Prompt) -> None:
        """Bring blocks of `prompt` that this node has not, or let its fetches find them. One call
        at a time."""


class PeerSource(Protocol):
    """What a node offers to claimers of its prompts, and where its own claims ask."""

    @property
    def wants_host_copies(self) -> bool:
        """Whether blocks that are published should be on the host for claimers to read."""

    @property
    def num_leases(self) -> int:
        """Held for claimers of other nodes, right now."""

    @property
    def num_offered(self) -> int:
        """Blocks that other nodes offer to claims of this one, right now."""

    def offer(self, ticket_id: str, prompt: Prompt, ledger: TicketLedger) -> DirectAddress | None:
        """What to write into the prompt's ticket, and into its open one; None if this node offers
        nothing. Goes on until `ledger` lets go of what is held for the ticket."""

    def supply(self, may_land: Callable[[], bool] = lambda: True) -> AbstractContextManager[Supply]:
        """For one claim; at its end the producer lets go of what it held for it. may_land: whether
        the device has room for the claim's blocks now."""

    def findings(self) -> list[str]:
        """What is left over although nobody claims."""

    def running(self) -> AbstractAsyncContextManager[None]: ...


class NoSupply:
    """`Supply` of a claim whose blocks come from storage alone."""

    def __init__(self) -> None:
        self.came: list[range] = []
        self.direct: list[range] = []

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Ask nobody."""

    async def ask(self, prompt: Prompt) -> None:
        """Bring nothing."""


class NoPeers:
    """`PeerSource` of a node without direct paths: nothing is offered and nobody is asked."""

    wants_host_copies = False
    num_leases = num_offered = 0

    def offer(
        self,
        ticket_id: str,  # noqa: ARG002 - the protocol's
        prompt: Prompt,  # noqa: ARG002
        ledger: TicketLedger,  # noqa: ARG002
    ) -> DirectAddress | None:
        return None

    @contextmanager
    def supply(
        self,
        may_land: Callable[[], bool] = lambda: True,  # noqa: ARG002 - the protocol's
    ) -> Iterator[NoSupply]:
        yield NoSupply()

    def findings(self) -> list[str]:
        return []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield
