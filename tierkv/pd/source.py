"""Sources of a prompt's blocks besides storage: the node that computed the prompt."""

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
    """One claim's connection to the node that computes its prompt.

    After a failure here, blocks come from storage.
    """

    @property
    def came(self) -> list[range]:
        """Tokens of the prompt that were fetched for this claim so far.

        Each fetch appends its own.
        """

    @property
    def direct(self) -> list[range]:
        """The part of `came` from another node's memory; each fetch appends its own."""

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Note the producer of the prompt and its address."""

    async def ask(self, prompt: Prompt) -> None:
        """Bring missing blocks of `prompt`, or make them known to this node's fetches.

        One call at a time.
        """

    async def failure(self) -> str:
        """Return the reason why the producer gave the ticket up; "" if it did not say so.

        A call may run at the same time as `ask`.
        """


class PeerSource(Protocol):
    """A node's offers to claimers of its prompts, and the connections of its own claims."""

    @property
    def wants_host_copies(self) -> bool:
        """True if published blocks should be on the host for claimers to read."""

    @property
    def num_leases(self) -> int:
        """Number of leases held now for nodes that read blocks from this node."""

    @property
    def num_offered(self) -> int:
        """Number of blocks that other nodes offer now to the claims of this node."""

    def offer(self, ticket_id: str, prompt: Prompt, ledger: TicketLedger) -> DirectAddress | None:
        """Offer the blocks of a prompt until `ledger` releases the ticket.

        Args:
            ticket_id: id of the ticket.
            prompt: the prompt whose blocks are offered.
            ledger: calls back at the end of the ticket.

        Returns:
            The address for the prompt's ticket and open ticket; None if this node offers nothing.
        """

    def supply(self, may_land: Callable[[], bool] = lambda: True) -> AbstractContextManager[Supply]:
        """Return the connection of one claim. At its end the producer releases its blocks.

        Args:
            may_land: returns whether the device has room for the claim's blocks now.
        """

    def findings(self) -> list[str]:
        """Return violated invariants as sentences; call only when no claim runs."""

    def running(self) -> AbstractAsyncContextManager[None]: ...


class NoSupply:
    """The `Supply` of a claim with storage as its only source."""

    def __init__(self) -> None:
        self.came: list[range] = []
        self.direct: list[range] = []

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Do nothing."""

    async def ask(self, prompt: Prompt) -> None:
        """Bring nothing."""

    async def failure(self) -> str:
        """Return "": the failure is in storage, or nowhere."""
        return ""


class NoPeers:
    """The `PeerSource` of a node without direct paths: no offers and no connections."""

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
