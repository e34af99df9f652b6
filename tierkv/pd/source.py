"""Reading blocks of a prompt from the memory of the node that computed it, instead of storage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from tierkv.cache.keys import Prompt
from tierkv.pd.direct.address import DirectAddress
from tierkv.pd.tickets import OpenTicket, Ticket, TicketLedger


class Supply:
    """One claim's connection to the producer, for reading blocks from the producer's memory.

    Blocks that cannot be read from that memory are fetched from storage. This class itself reads no
    other node's memory.

    Attributes:
        came: the ranges of prompt tokens that this claim has fetched so far, one for each fetch,
            from storage or from the producer's memory.
        direct: the ranges in `came` that this claim has read from another node's memory.
    """

    def __init__(self) -> None:
        self.came: list[range] = []
        self.direct: list[range] = []

    def learn(self, ticket: Ticket | OpenTicket) -> None:
        """Record the address of the prefill node, which `ticket` contains."""

    async def ask(self, prompt: Prompt) -> None:
        """Ask the prefill node where the missing blocks of `prompt` lie in its memory.

        Blocks on the prefill node's device are copied to this node's device in this call, if
        possible. Blocks in the prefill node's host tier are read by later fetches of this node.
        Only one call may run at a time.
        """

    async def failure(self) -> str:
        """Ask the prefill node why it has given up the publish.

        A call may run at the same time as `ask`.

        Returns:
            The reason; "" if the node has not given up, or does not answer.
        """
        return ""


class PeerSource:
    """A way to read published blocks from the memory of the node that published them.

    On a prefill node, this object offers the blocks of published prompts to other nodes. On a
    decode node, it makes one connection to the prefill node for each claim. This class itself
    neither offers blocks nor reads other nodes' memory.
    """

    @property
    def wants_host_copies(self) -> bool:
        """True if published blocks should be copied to the host tier for claiming nodes to read."""
        return False

    @property
    def num_leases(self) -> int:
        """The number of leases that protect this node's blocks while other nodes read them."""
        return 0

    @property
    def num_offered(self) -> int:
        """The number of blocks in other nodes' memory that claims of this node can read now."""
        return 0

    def offer(
        self,
        ticket_id: str,  # noqa: ARG002 - for those that offer blocks
        prompt: Prompt,  # noqa: ARG002
        ledger: TicketLedger,  # noqa: ARG002
    ) -> DirectAddress | None:
        """Let claiming nodes read the blocks of a prompt from this node's memory.

        The offer ends when the ticket is acknowledged, has failed or has expired.

        Args:
            ticket_id: id of the ticket.
            prompt: the prompt of the offered blocks.
            ledger: the states of this node's tickets; it reports the end of the ticket, and so of
                the offer.

        Returns:
            The address to write into the prompt's ticket and open ticket; None if other nodes
                cannot read this node's memory.
        """
        return None

    @contextmanager
    def supply(
        self,
        may_land: Callable[[], bool] = lambda: True,  # noqa: ARG002 - for those that read blocks
    ) -> Iterator[Supply]:
        """Return a context manager for one claim's connection to the prefill node.

        On leaving it, the connection is closed, and the prefill node can evict the claimed blocks
        again.

        Args:
            may_land: returns True if this node's device has room for the claimed blocks now.
        """
        yield Supply()

    def findings(self) -> list[str]:
        """Return a sentence for each wrong count of offered blocks; [] if all are right.

        Call this only while no claim runs.
        """
        return []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield
