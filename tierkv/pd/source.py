"""The memory of the node that computed a prompt, as a source of its blocks besides storage."""

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
    """One claim's connection to the node that computes its prompt, to read blocks from its memory.

    After a failure here, blocks are fetched from storage.
    """

    @property
    def came(self) -> list[range]:
        """The ranges of the prompt's tokens that were fetched for this claim, from any source.

        Each fetch appends one.
        """

    @property
    def direct(self) -> list[range]:
        """The ranges in `came` that were read from another node's memory."""

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Use the prefill node's address in its ticket or open ticket."""

    async def ask(self, prompt: Prompt) -> None:
        """Copy missing blocks of `prompt` from the prefill node, or let this node's fetches do so.

        One call may run at a time.
        """

    async def failure(self) -> str:
        """Ask the prefill node why it gave the ticket up; "" if it did not, or does not answer.

        A call may run at the same time as `ask`.
        """


class PeerSource(Protocol):
    """Both sides of reading blocks from other nodes' memory.

    The prefill node offers the blocks of its prompts to nodes that claim them; the decode node has
    one connection for each claim.
    """

    @property
    def wants_host_copies(self) -> bool:
        """True if published blocks should be on the host, where claiming nodes read them."""

    @property
    def num_leases(self) -> int:
        """The number of leases (protections from eviction) held for nodes that read blocks here."""

    @property
    def num_offered(self) -> int:
        """The number of blocks in other nodes' memory that this node's claims can read now."""

    def offer(self, ticket_id: str, prompt: Prompt, ledger: TicketLedger) -> DirectAddress | None:
        """Let claiming nodes read the blocks of a prompt here until the ticket has ended.

        Args:
            ticket_id: id of the ticket.
            prompt: the prompt whose blocks are offered.
            ledger: calls back when the ticket has ended.

        Returns:
            The address to write into the prompt's ticket and open ticket; None if other nodes
                cannot read this node's memory.
        """

    def supply(self, may_land: Callable[[], bool] = lambda: True) -> AbstractContextManager[Supply]:
        """Return the connection of one claim. Closing it lets the prefill node release its blocks.

        Args:
            may_land: returns True if the device has room for the claim's blocks now.
        """

    def findings(self) -> list[str]:
        """Return violated invariants as sentences. Call this only when no claim runs."""

    def running(self) -> AbstractAsyncContextManager[None]: ...


class NoSupply:
    """The `Supply` of a claim that reads from storage alone."""

    def __init__(self) -> None:
        self.came: list[range] = []
        self.direct: list[range] = []

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Do nothing."""

    async def ask(self, prompt: Prompt) -> None:
        """Do nothing."""

    async def failure(self) -> str:
        """Return "": there is no prefill node to ask."""
        return ""


class NoPeers:
    """The `PeerSource` of a node that neither offers its memory nor reads other nodes' memory."""

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
