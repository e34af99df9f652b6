"""Tickets: the records in storage by which a prefill node hands prompts over to decode nodes.

This module creates, writes, reads, checks and acknowledges tickets. It also renews the liveness
lease, a short-lived value in storage that shows that the producer (the node that writes a ticket)
is alive.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, ClassVar, Self, TypeVar
from uuid import uuid4

import msgspec

from tierkv import tracing
from tierkv.cache.keys import Fingerprint, KeyRun, Prompt, StoredKey, differences
from tierkv.clock import is_skew, skew_in_words
from tierkv.errors import (
    BadRequestError,
    DuplicateRequestError,
    HandoffError,
    StoreCorruptError,
    StoreRefusedError,
    StoreUnavailableError,
)
from tierkv.pd.direct.address import DirectAddress
from tierkv.pd.settings import EXPIRED_GRACE_S
from tierkv.sched.tiers import Tiers
from tierkv.storage import codec
from tierkv.storage.codec import SmallCodec
from tierkv.storage.maintenance import values_under
from tierkv.storage.protocol import Notifier, PutItem, PutOutcome, PutStatus, Store
from tierkv.tasks import abandonable, both, supervised
from tierkv.transfer.storage_io import StorageIO

# The records of a hand-off in storage. The ticket is written last: if it exists, so do the blocks.
#
# open ticket        a ticket will come: its keys are known, its blocks are being stored
# ticket             every block is stored; the first tokens
# acknowledgement    the ticket was claimed

_VERSION = 1
_ACKNOWLEDGED = b"TKVA"
_DIGEST_BYTES = 32
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
MAX_TICKET_BYTES = 16 << 20  # about 300,000 blocks


class HandoffProblem(Enum):
    """The reasons why a hand-off fails. HTTP clients receive the values.

    Attributes:
        NOT_YET: no complete ticket came before the deadline: wait longer, or check the prefill
            node.
        EXPIRED: the ticket's lifetime has passed: publish again, or raise handoff.ticket_ttl_s.
        CLAIMED: another claim used the ticket: publish again.
        DAMAGED: the ticket or a block differs from what was written: run `tierkv storage verify
            URL`.
        INCOMPLETE: a block of the ticket is not in the store: check the store's eviction and
            memory.
        NO_ROOM: no blocks became free before the deadline: retry, or add host or device blocks.
        INCOMPATIBLE: model, layout or sampling differ: make the settings of both nodes equal.
        OTHER_PROMPT: the ticket belongs to another prompt: use each ticket id for one prompt.
        PRODUCER_FAILED: the prefill node gave up: read its reason in `detail`.
        PRODUCER_LOST: the prefill node died, or cannot reach the store: check the node, and claim
            again.
        UNAVAILABLE: the store did not answer: read the first failure in `GET /readyz?verbose`.
        LOAD_FAILED: the blocks reached host memory, but not the device: read the log, and claim
            again.
    """

    NOT_YET = "not_yet"
    EXPIRED = "expired"
    CLAIMED = "already_claimed"
    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"
    NO_ROOM = "no_room"
    INCOMPATIBLE = "incompatible"
    OTHER_PROMPT = "other_prompt"
    PRODUCER_FAILED = "producer_failed"
    PRODUCER_LOST = "producer_lost"
    UNAVAILABLE = "storage_unavailable"
    LOAD_FAILED = "load_failed"


class _Handed(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that tickets and open tickets share.

    Attributes:
        ticket_id: id of the ticket.
        fingerprint: the prompt's fingerprint in readable form, by which an incompatible node can
            name the difference.
        block_size: number of tokens of a block.
        num_tokens: number of tokens of the prompt.
        digests: `StoredKey.digest` of each block in order, the tail's included. A digest depends on
            the tokens and not on the block's bytes: two producers may store different valid bytes
            under one key.
        created_at: Unix seconds of the ticket's creation.
        expires_at: Unix seconds at which the ticket expires.
        producer: name of the prefill node, for people.
        direct: address at which a claimer asks where the blocks lie in the producer's memory; None
            if they can only be read from storage.
    """

    magic: ClassVar[bytes]
    ticket_id: str
    fingerprint: dict[str, str]
    block_size: int
    num_tokens: int
    digests: tuple[bytes, ...]
    created_at: float
    expires_at: float
    producer: str
    direct: DirectAddress | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_tokens < 1:
            raise ValueError("a ticket needs at least one token, in blocks of at least one token")
        if len(self.digests) != -(-self.num_tokens // self.block_size):
            raise ValueError("a ticket must list one digest per block")
        if any(len(digest) != _DIGEST_BYTES for digest in self.digests):
            raise ValueError("a digest has a wrong length")
        if not (math.isfinite(self.created_at) and math.isfinite(self.expires_at)):
            raise ValueError("a ticket's times must be finite numbers")  # it would never expire

    def encode(self) -> bytes:
        return codec.seal(self.magic, _VERSION, self)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        return codec.unseal(cls.magic, _VERSION, value, cls)

    def keys(self) -> list[StoredKey]:
        tail = self.num_tokens % self.block_size
        return [
            StoredKey(digest, tail, is_tail=True)
            if tail and i == len(self.digests) - 1
            else StoredKey(digest, self.block_size, is_tail=False)
            for i, digest in enumerate(self.digests)
        ]


class Ticket(_Handed, frozen=True, kw_only=True):
    """A complete ticket. Every block that it names was stored before the ticket was written.

    Attributes:
        first_tokens: ids of the tokens that the prefill node has already generated after the
            prompt.
        sampling: names and values of the sampling parameters of these tokens; {} if not stated.
        incarnation: random id of the producer's process, by which that process is notified of the
            claim; "" to notify none.
        trace: the tracing span of the publish, as W3C's `traceparent`; "" for none.
    """

    magic = b"TKVT"
    first_tokens: tuple[_Token, ...]
    sampling: dict[str, str] = {}
    incarnation: str = ""
    trace: str = ""


class OpenTicket(_Handed, frozen=True, kw_only=True):
    """The announcement that a ticket will come, valid while the producer renews its liveness lease.

    Attributes:
        incarnation: random id of the producer's process, new at each start.
        failure: the reason why no ticket will come; "" while one may come.
    """

    magic = b"TKVO"
    incarnation: str
    failure: str = ""


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """The record in storage by which a claimer confirms that it has claimed a ticket.

    Attributes:
        ticket_id: id of the ticket.
        created_at: Unix seconds of the ticket's creation; distinguishes tickets with the same id.
        claimer: name of the node that claimed the ticket.
        claimed_at: Unix seconds of the claim.
    """

    ticket_id: str
    created_at: float
    claimer: str
    claimed_at: float

    def encode(self) -> bytes:
        return codec.seal(_ACKNOWLEDGED, _VERSION, self)

    @classmethod
    def decode(cls, value: bytes) -> Acknowledgement:
        """Decode an acknowledgement that was read from storage.

        Raises:
            StoreCorruptError: the value is damaged.
        """
        return codec.unseal(_ACKNOWLEDGED, _VERSION, value, cls)


_SEAL_BYTES = 64  # a signature or encryption adds no more


class SmallValues:
    """Small values in a store, such as tickets, with the protection that `storage.trust` sets.

    Args:
        store: the store.
        codec: signs or encrypts a value together with its name. All nodes that share the store need
            the same codec.
    """

    def __init__(self, store: Store, codec: SmallCodec) -> None:
        self._store = store
        self._codec = codec

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """Read a ticket or another small value from the store, and check its signature.

        Args:
            name: name of the value.
            max_bytes: largest accepted length of its content, in bytes.

        Returns:
            The content, without signature or encryption; None if there is no such value.

        Raises:
            StoreUnavailableError: the store does not answer.
            StoreCorruptError: the value is too long or damaged, or was signed or encrypted with
                another name or secret.
        """
        value = await self._store.get(name, max_bytes=max_bytes + _SEAL_BYTES)
        return None if value is None else self._codec.unseal_small(name, value)

    async def put(self, name: str, content: bytes, *, ttl_s: float, only_new: bool = False) -> bool:
        """Write a value.

        Args:
            name: name of the value.
            content: its bytes.
            ttl_s: seconds until the store removes it.
            only_new: True to write only if the store has no value of this name.

        Returns:
            True if the value was written; False if `only_new` is True and there is a value already.

        Raises:
            StoreUnavailableError: the store did not accept the value.
        """
        sealed = self._codec.seal_small(name, content)
        item = PutItem(name, (sealed,), ttl_s=ttl_s, keep_existing=False, only_new=only_new)
        [outcome] = await self._store.put([item])
        if outcome.status not in (PutStatus.STORED, PutStatus.EXISTED):
            raise _refused(self._store.url, "it", outcome)
        return outcome.status is PutStatus.STORED


log = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_MAX_LEASE_BYTES = 64
_GOODBYE_S = 0.5
_AGAIN_S = 0.2
_DECIMALS, _DIGITS = 3, 20


def _until(until: float, incarnation: str) -> bytes:
    """Return the content of a liveness lease: its end, and 20 digits that identify the producer.

    The content is one decimal number, because older nodes parse it as one: the end in Unix seconds
    with three decimals, followed by the digits.
    """
    return f"{until:.3f}{_digits_of(incarnation)}".encode()


def _is_of(value: bytes, incarnation: str) -> bool:
    """Return True if a liveness lease was written by the node `incarnation`.

    A lease without an incarnation, as older nodes write it, counts as the node's own.
    """
    digits = value.partition(b".")[2][_DECIMALS:]
    return not digits or digits == _digits_of(incarnation).encode()


def _digits_of(incarnation: str) -> str:
    number = int.from_bytes(hashlib.sha256(incarnation.encode()).digest(), "big")
    return f"{number % 10**_DIGITS:0{_DIGITS}}"


class ProducerLease:
    """The liveness lease of a prefill node: a short-lived value in storage that shows it is alive.

    The value is renewed while the node has open tickets. Its name is new at each start of the node.

    Args:
        storage: the storage tier.
        values: writes and reads the value.
        lease_s: seconds after which the value expires without a renewal.

    Attributes:
        incarnation: random id of this process, which the value's name contains.
        num_held: number of open tickets, which need the lease.
        num_renewals: number of attempts to write the value.
    """

    def __init__(self, storage: StorageIO, values: SmallValues, *, lease_s: float) -> None:
        self.incarnation = uuid4().hex
        self.lease_s = lease_s
        self._storage = storage
        self._values = values
        self.num_held = 0
        self._wanted = asyncio.Event()
        self._renewal_tried = asyncio.Event()
        self._renew_now = asyncio.Event()
        self._renewed_at = float("-inf")
        self.num_renewals = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renew this node's liveness lease while tickets are open, inside the `async with` block.

        At the end, the lease is deleted from storage.
        """
        try:
            async with supervised({"tierkv-producer-lease": self._keep}):
                yield
        finally:
            if self.num_renewals:
                with suppress(StoreUnavailableError, TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await self._storage.store.delete([self._name])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Renew this node's liveness lease in the store during the `with` block.

        Use one `with` block for each open ticket of the node. At the end of the last one the
        renewals stop.
        """
        self.num_held += 1
        self._wanted.set()
        if asyncio.get_running_loop().time() - self._renewed_at > self.interval_s:
            self._renewal_tried.clear()
            self._renew_now.set()
        try:
            yield
        finally:
            self.num_held -= 1
            if not self.num_held:
                self._wanted.clear()

    async def written(self) -> None:
        """Wait until an attempt to write the liveness lease to the store has succeeded or failed.

        Call this inside `with lease.held():`, which starts a write. An attempt during the last
        `interval_s` seconds counts, too.
        """
        await self._renewal_tried.wait()

    async def is_alive(self, incarnation: str) -> bool:
        """Return True if the process with this `incarnation` renews its liveness lease.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        name = self._storage.names.producer(incarnation)
        try:
            value = await self._values.get(name, max_bytes=_MAX_LEASE_BYTES)
        except StoreCorruptError:
            return False
        if value is None or not _is_of(value, incarnation):
            return False
        if self._storage.store.capabilities.has_ttl:
            return True
        try:
            return float(value) > self._storage.store.now()
        except ValueError:
            return False

    @property
    def interval_s(self) -> float:
        """The seconds between two renewals of the node's liveness lease in the store."""
        return self.lease_s / _RENEWALS_PER_LEASE

    @property
    def _name(self) -> str:
        return self._storage.names.producer(self.incarnation)

    async def _keep(self) -> None:
        """Write the liveness lease to the store every `interval_s` seconds, until cancelled.

        Nothing is written while no ticket is open. A failed write is retried after at most 0.2 s.
        """
        while True:
            await self._wanted.wait()
            until = _until(self._storage.store.now() + self.lease_s, self.incarnation)
            pause_s = min(_AGAIN_S, self.interval_s)
            with suppress(TimeoutError, StoreUnavailableError):
                async with asyncio.timeout(self.lease_s):
                    await self._values.put(self._name, until, ttl_s=self.lease_s)
                pause_s = self.interval_s
            self.num_renewals += 1
            self._renewed_at = asyncio.get_running_loop().time()
            self._renewal_tried.set()
            self._renew_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._renew_now.wait()


_MAX_ACKNOWLEDGEMENT_BYTES = 64 << 10
_Named = TypeVar("_Named", Ticket, OpenTicket, Acknowledgement)

# Hints under a ticket's name.
WHOLE, FAILED, PROGRESS = "whole", "failed", "p"


def acknowledged_hint(ticket_id: str) -> str:
    """Return the message by which a claimer notifies the producer that a ticket was claimed."""
    return hashlib.sha256(ticket_id.encode()).hexdigest()[:32]


def check_id(ticket_id: str) -> None:
    """Check that a ticket's id can be encoded as UTF-8, which a lone surrogate prevents.

    Raises:
        BadRequestError: the id cannot be encoded.
    """
    try:
        ticket_id.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"the ticket id {ticket_id[:80]!r} is not valid UTF-8: {error}"
        ) from error


class Tickets:
    """Reader and writer of tickets in storage, for one node.

    Args:
        storage: the store that has the tickets, with its names, clock and record of deletions.
        values: reads and writes tickets and other small values in the same store.
        tiers: the tiers of the node, which compute the keys of a prompt's blocks and run the tasks
            that send hints.
        fingerprints: the fingerprints of this node by the name of their space; "" is the name of
            the node's own. The caller may add fingerprints to this mapping later.
        lease: the liveness lease of this node.
        ticket_ttl_s: seconds that a decode node has to claim a ticket.
        claimed_ttl_s: seconds that a ticket stays in the store after its acknowledgement, for a
            second claim.
        name: this node's name, which tickets and acknowledgements contain.
    """

    def __init__(  # noqa: PLR0913 - collaborators, and settings
        self,
        storage: StorageIO,
        values: SmallValues,
        tiers: Tiers,
        fingerprints: Mapping[str, Fingerprint],
        *,
        lease: ProducerLease,
        ticket_ttl_s: float,
        claimed_ttl_s: float,
        name: str,
    ) -> None:
        self._storage = storage
        self._values = values
        self._tiers = tiers
        self.lease = lease
        self._fingerprints = fingerprints
        self._ticket_ttl_s = ticket_ttl_s
        self._claimed_ttl_s = claimed_ttl_s
        self._name = name
        self.names = storage.names
        self.notifier: Notifier = storage.store.notifier()

    def keys_of(self, prompt: Prompt) -> KeyRun:
        """Return the keys of all blocks of a prompt, the tail's included.

        Each key is computed when it is first read.
        """
        return self._tiers.copies.prompt_keys(prompt)

    def hashed_keys_of(self, prompt: Prompt) -> Coroutine[None, None, KeyRun]:
        """Compute the keys of all blocks of a prompt, the tail's included, and return them.

        Other tasks of the event loop run during the call.
        """
        return self._tiers.copies.hashed_keys(prompt)

    # The prefill node's side

    def new(
        self,
        opened: OpenTicket,
        first_tokens: Sequence[int],
        sampling: Mapping[str, str] | None = None,
    ) -> Ticket:
        """Create the complete ticket that `opened` has announced, without writing it.

        Its lifetime begins now.

        Args:
            opened: the open ticket.
            first_tokens: ids of the generated tokens that follow the prompt.
            sampling: names and values of the sampling parameters of these tokens; None to state
                none.

        Returns:
            The ticket; `complete` writes it.
        """
        fields = {name: getattr(opened, name) for name in OpenTicket.__struct_fields__}
        del fields["failure"]
        now = self.now()
        fields |= {"created_at": now, "expires_at": now + self._ticket_ttl_s}
        return Ticket(
            **fields,
            first_tokens=tuple(first_tokens),
            sampling=dict(sampling or {}),
            trace=tracing.traceparent(),
        )

    def new_open(
        self,
        ticket_id: str,
        prompt: Prompt,
        direct: DirectAddress | None = None,
    ) -> OpenTicket:
        """Create an open ticket for a prompt of this node, without writing it.

        Args:
            ticket_id: id of the ticket.
            prompt: the prompt to publish.
            direct: address at which claimers ask for the blocks in this node's memory; None if they
                can only be read from storage.

        Returns:
            The open ticket; `begin` writes it.
        """
        now = self.now()
        return OpenTicket(
            ticket_id=ticket_id,
            fingerprint=self._fingerprints[prompt.space].readable(),
            block_size=prompt.block_size,
            num_tokens=prompt.num_tokens,
            digests=self.keys_of(prompt).all_digests(),
            created_at=now,
            expires_at=now + self._ticket_ttl_s,
            producer=self._name,
            incarnation=self.lease.incarnation,
            direct=direct,
        )

    async def put(
        self, ticket: Ticket | OpenTicket, *, only_new: bool = False, generation: int | None = None
    ) -> bool:
        """Write a ticket or open ticket to the store.

        An existing record of the same kind and id is replaced, unless `only_new` is True.

        Args:
            ticket: the ticket or open ticket.
            only_new: True to leave an existing record unchanged.
            generation: value of `Deletions.generation` when the ticket's blocks were stored. If all
                stored values have been deleted since, the ticket is not written. None for the value
                at the call.

        Returns:
            True if the ticket was written; False if `only_new` is True and such a record exists.

        Raises:
            StoreUnavailableError: the store did not accept the ticket, or the stored values have
                been deleted since `generation`.
        """
        name_of = self.names.ticket if isinstance(ticket, Ticket) else self.names.open_ticket
        name, ttl_s = name_of(ticket.ticket_id), self._ticket_ttl_s + EXPIRED_GRACE_S
        write = partial(self._values.put, name, ticket.encode(), ttl_s=ttl_s, only_new=only_new)
        deletions = self._storage.deletions
        begun = deletions.generation if generation is None else generation

        async def put() -> bool:
            deletions.check(begun)
            if why := deletions.refusal(begun):
                raise StoreUnavailableError(why)
            with deletions.writing():
                return await write()

        return await abandonable(self._tiers.work.started, put, "tierkv-write-ticket")

    async def forget_open(self, ticket_id: str) -> None:
        """Delete an open ticket after the ticket itself was written.

        If the store fails, the open ticket stays until it expires.
        """
        with suppress(StoreUnavailableError):
            await self._storage.store.delete([self.names.open_ticket(ticket_id)])

    async def forget(self, ticket_id: str) -> bool:
        """Delete ticket, open ticket and acknowledgement; return True if at least one was there.

        Waiting decode nodes are not notified.

        Raises:
            BadRequestError: the id cannot be encoded as UTF-8.
            StoreUnavailableError: the store does not answer.
        """
        check_id(ticket_id)
        names = self.names
        kinds = (names.ticket, names.open_ticket, names.acknowledgement)
        return await self._storage.store.delete([name(ticket_id) for name in kinds]) > 0

    async def forget_all(self) -> int:
        """Delete all tickets with a fingerprint of this node, whichever node wrote them.

        Returns:
            The number of deleted values: tickets, open tickets and acknowledgements.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        store, removed = self._storage.store, 0
        whole, opened = self.names.all_tickets()
        kinds: list[tuple[str, type[Ticket | OpenTicket]]] = [(whole, Ticket), (opened, OpenTicket)]
        for prefix, kind in kinds:
            found = [value.name async for value in values_under(store, prefix)]
            for name in found:
                ticket_id = await self._ours(name, kind)
                if ticket_id is not None:
                    removed += await store.delete([name, self.names.acknowledgement(ticket_id)])
        return removed

    async def _ours(self, name: str, kind: type[Ticket | OpenTicket]) -> str | None:
        """Return the id of the ticket stored as `name`, if it has a fingerprint of this node.

        Return None for another fingerprint, and for a missing or damaged value.
        """
        try:
            value = await self._values.get(name, max_bytes=MAX_TICKET_BYTES)
            ticket = None if value is None else kind.decode(value)
        except StoreCorruptError:  # damaged, or sealed with another key
            return None
        ours = [one.readable() for one in self._fingerprints.values()]
        return ticket.ticket_id if ticket is not None and ticket.fingerprint in ours else None

    def notify(self, ticket_id: str, message: str) -> Coroutine[None, None, None]:
        """Send a message to the nodes that wait for a ticket.

        Args:
            ticket_id: id of the ticket.
            message: WHOLE if the ticket is written; FAILED if it will not come; or PROGRESS
                followed by the number of blocks that are stored.

        Returns:
            The coroutine that sends the message.
        """
        return self.notifier.notify(self.names.ticket(ticket_id), message)

    def hint(self, ticket_id: str, message: str) -> None:
        """Start a task that sends a message to the nodes that wait for a ticket.

        If the message cannot be sent, the task logs the failure.

        Args:
            ticket_id: id of the ticket.
            message: WHOLE if the ticket is written, FAILED if it will not come, or PROGRESS
                followed by the number of blocks that are stored so far.
        """
        self._tiers.work.start(self._notify_or_log(ticket_id, message), "tierkv-hint")

    async def _notify_or_log(self, ticket_id: str, message: str) -> None:
        try:
            await self.notify(ticket_id, message)
        except Exception as error:  # noqa: BLE001 - a store of a user's own raises anything
            log.warning(
                "the notification of ticket %s was not sent, so claimers poll for it: %r",
                ticket_id,
                error,
            )

    # If several prompts are published under one id, the first one gets it, provided that the store
    # keeps the first of several values (`PutItem.only_new`).

    async def check_free(self, ticket_id: str, digests: tuple[bytes, ...]) -> None:
        """Check that a ticket's id is not in use for another prompt.

        An id is in use while its prompt is being computed, and until its ticket is claimed or has
        expired. If the records of the id cannot be read from the store, the check passes.

        Args:
            ticket_id: id of the ticket.
            digests: keys of all blocks of the prompt, including the tail (`StoredKey.digest`).

        Raises:
            DuplicateRequestError: the id is in use for another prompt.
        """
        with suppress(HandoffError, StoreUnavailableError):
            # If a ticket is completed in this moment, neither record may be seen here; `complete`
            # of this prompt finds the ticket then.
            opened, whole = await both(self.read_open(ticket_id), self.read(ticket_id))
            if opened is not None and (
                opened.failure or not await self.lease.is_alive(opened.incarnation)
            ):
                opened = None
            if whole is not None and await self.is_claimed(whole):
                whole = None
            for found in (opened, whole):
                if found is None or self.has_expired(found) or found.digests == digests:
                    continue
                raise DuplicateRequestError(
                    f"the ticket id is in use by {found.producer} for another prompt "
                    f"of {found.num_tokens} tokens, which is not claimed yet: use "
                    "another id"
                )

    async def begin(self, ticket: OpenTicket) -> None:
        """Write an open ticket, once the store has this node's liveness lease.

        Call this inside the context manager `lease.held()`. If an earlier hand-off had the same
        ticket id, its ended records are replaced.

        Raises:
            DuplicateRequestError: the id is in use for another prompt.
            StoreUnavailableError: the store did not accept the open ticket.
        """
        is_there, _ = await both(self._exists(ticket.ticket_id), self.lease.written())
        if is_there:
            await self.check_free(ticket.ticket_id, ticket.digests)
            ended = [self.names.ticket, self.names.acknowledgement]
            await self._storage.store.delete([name(ticket.ticket_id) for name in ended])
        await self._claim_name(ticket)
        self.hint(ticket.ticket_id, f"{PROGRESS}0")

    async def complete(self, ticket: Ticket, *, generation: int | None = None) -> None:
        """Write a ticket, and notify the nodes that wait for it. All of its blocks must be stored.

        Args:
            ticket: the complete ticket.
            generation: value of `Deletions.generation` when the ticket's blocks were stored; None
                for the present value. If all stored values have been deleted since, the call
                raises.

        Raises:
            DuplicateRequestError: the id is in use for another prompt.
            StoreUnavailableError: the store did not accept the ticket, or the stored values have
                been deleted since `generation`.
        """
        await self._claim_name(ticket, generation)
        self.hint(ticket.ticket_id, WHOLE)

    async def give_up(self, ticket: OpenTicket, failure: str) -> None:
        """Record in the open ticket that no ticket will come, and notify waiting decode nodes.

        Nothing is recorded if another prefill node has meanwhile written an open ticket with the
        same id.

        Args:
            ticket: the open ticket that this node wrote.
            failure: the reason why there will be no ticket.

        Raises:
            StoreUnavailableError: the store does not answer.
            HandoffError: the open ticket in the store is damaged.
        """
        found = await self.read_open(ticket.ticket_id)
        if found is None or found == ticket:
            await self.put(msgspec.structs.replace(ticket, failure=failure))
            await self.notify(ticket.ticket_id, FAILED)

    async def _claim_name(self, ticket: Ticket | OpenTicket, generation: int | None = None) -> None:
        if generation is None:
            generation = self._storage.deletions.generation
        if not await self.put(ticket, only_new=True, generation=generation):
            await self.check_free(ticket.ticket_id, ticket.digests)
            await self.put(ticket, generation=generation)

    async def _exists(self, ticket_id: str) -> bool:
        try:
            return await self.read(ticket_id) is not None
        except HandoffError:  # damaged
            return True

    # The decode node's side

    def read(self, ticket_id: str) -> Awaitable[Ticket | None]:
        """Return the ticket of this id; None if the store has none.

        Raises:
            HandoffError: the ticket is damaged, or contains another id.
            BadRequestError: the id cannot be encoded as UTF-8.
            StoreUnavailableError: the store does not answer.
        """
        return self._read(ticket_id, self.names.ticket, Ticket)

    def read_open(self, ticket_id: str) -> Awaitable[OpenTicket | None]:
        """Return the open ticket of this id; None if the store has none.

        An open ticket announces a ticket while the prompt is still computed, or says why the ticket
        will not come.

        Raises:
            HandoffError: the open ticket is damaged, or contains another id.
            BadRequestError: the id cannot be encoded as UTF-8.
            StoreUnavailableError: the store does not answer.
        """
        return self._read(ticket_id, self.names.open_ticket, OpenTicket)

    async def read_acknowledgement(self, ticket_id: str) -> Acknowledgement | None:
        """Return the acknowledgement of the ticket; None if there is none, or it is damaged.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        try:
            return await self._read(
                ticket_id, self.names.acknowledgement, Acknowledgement, _MAX_ACKNOWLEDGEMENT_BYTES
            )
        except HandoffError:
            return None

    async def is_claimed(self, ticket: Ticket) -> bool:
        """Return True if the store has an acknowledgement of this ticket.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        claimed = await self.read_acknowledgement(ticket.ticket_id)
        return claimed is not None and claimed.created_at == ticket.created_at

    def check(self, ticket: Ticket | OpenTicket, space: str, keys: KeyRun) -> None:
        """Check that a ticket is for this prompt, has not expired, and is from a compatible node.

        Args:
            ticket: a ticket or an open ticket.
            space: name of the prompt's space, which stands for one fingerprint.
            keys: keys of all blocks of the prompt, the tail's included.

        Raises:
            HandoffError: the ticket cannot be used; its reason is a HandoffProblem.
        """
        problem = self.problem_of(ticket, space)
        if problem is not None:
            raise problem
        if keys.all_digests() != ticket.digests:
            raise HandoffError(
                HandoffProblem.OTHER_PROMPT.value,
                f"the ticket is for another prompt of {ticket.num_tokens} tokens: "
                "claim it with the prompt that was prefilled",
            )

    def problem_of(
        self, ticket: Ticket | OpenTicket, space: str | None = None
    ) -> HandoffError | None:
        """Check the fingerprint and the lifetime of a ticket, but not its prompt.

        Args:
            ticket: a ticket or an open ticket.
            space: name of a space; the ticket must have the fingerprint of this space. None to
                accept any fingerprint of this node.

        Returns:
            The error to raise; None if the ticket can be used.
        """
        spaces = self._fingerprints if space is None else [space]
        ours = [self._fingerprints[one].readable() for one in spaces]
        if ticket.fingerprint not in ours:
            fields = ", ".join(differences(ours[0], ticket.fingerprint))
            return HandoffError(
                HandoffProblem.INCOMPATIBLE.value,
                f"{ticket.producer} computed this prompt with another model or layout: {fields}",
            )
        if self.has_expired(ticket):
            return self._expired(ticket)
        return None

    def has_expired(self, ticket: Ticket | OpenTicket) -> bool:
        return self.now() > ticket.expires_at

    def now(self) -> float:
        """Return the present time for the creation and expiry of tickets, in Unix seconds.

        If the store has a clock, all nodes use it and agree; otherwise each node uses its own.
        """
        return self._storage.store.now()

    def _expired(self, ticket: Ticket | OpenTicket) -> HandoffError:
        skew_s = self._storage.store.health.clock_skew_s
        if skew_s is None:
            clock = "this node's clock, as the store has no clock"
        else:
            clock = "the store's clock" + (f" ({skew_in_words(skew_s)})" if is_skew(skew_s) else "")
        ago_s = self.now() - ticket.expires_at
        return HandoffError(
            HandoffProblem.EXPIRED.value,
            f"the ticket has expired {ago_s:.0f} s ago by {clock}: prefill the prompt again",
        )

    async def acknowledge(self, ticket: Ticket) -> None:
        """Record that the ticket was claimed, notify its producer, and shorten its lifetime.

        The ticket stays in the store for at most `claimed_ttl_s` seconds, for a second claim.

        Raises:
            StoreUnavailableError: the store did not accept the record; the ticket stays until it
                expires.
        """
        now = self.now()
        # At most the lifetime of this node's tickets: another node's ticket may state any time.
        left_s = min(max(ticket.expires_at - now, 0.0), self._ticket_ttl_s) + EXPIRED_GRACE_S
        record = Acknowledgement(
            ticket_id=ticket.ticket_id,
            created_at=ticket.created_at,
            claimer=self._name,
            claimed_at=now,
        )
        name = self.names.acknowledgement(ticket.ticket_id)
        await self._values.put(name, record.encode(), ttl_s=left_s)
        if self._claimed_ttl_s < left_s:
            names = [self.names.ticket(ticket.ticket_id)]
            await self._storage.store.touch(names, ttl_s=self._claimed_ttl_s)
        if ticket.incarnation:
            topic = self.names.producer(ticket.incarnation)
            await self.notifier.notify(topic, acknowledged_hint(ticket.ticket_id))

    async def _read(
        self,
        ticket_id: str,
        name_of: Callable[[str], str],
        kind: type[_Named],
        max_bytes: int = MAX_TICKET_BYTES,
    ) -> _Named | None:
        check_id(ticket_id)
        try:
            value = await self._values.get(name_of(ticket_id), max_bytes=max_bytes)
            found = None if value is None else kind.decode(value)
        except StoreCorruptError as error:
            raise HandoffError(
                HandoffProblem.DAMAGED.value, f"the ticket cannot be read: {error}"
            ) from error
        if found is not None and found.ticket_id != ticket_id:
            raise HandoffError(
                HandoffProblem.DAMAGED.value,
                "the ticket cannot be read: its place in the store holds the ticket "
                f"{found.ticket_id[:80]!r}",
            )
        return found


def check_written(storage: StorageIO, outcomes: Sequence[PutOutcome]) -> None:
    """Check that the store accepted all blocks of a write.

    Args:
        storage: the storage tier that wrote the blocks; an error names the URL of its store.
        outcomes: the outcome of each block.

    Raises:
        StoreUnavailableError: the store did not accept a block.
    """
    for outcome in outcomes:
        if outcome.status not in (PutStatus.STORED, PutStatus.EXISTED):
            raise _refused(storage.store.url, "a block", outcome)


def _refused(url: str, what: str, outcome: PutOutcome) -> StoreUnavailableError:
    is_full = outcome.status is PutStatus.FULL
    kind = StoreRefusedError if is_full else StoreUnavailableError
    return kind(f"{url} did not accept {what}: {outcome.reason}")


@dataclass(slots=True)
class HandoffStats:
    """Counts of a node's hand-offs since its start.

    Attributes:
        published_prompts: prompts with a ticket that this node wrote.
        published_blocks: number of blocks of these prompts.
        early_blocks: number of `published_blocks` that were stored while their prompt was being
            computed.
        failed_publishes: publishes that ended without a ticket.
        claimed_prompts: claims with a ticket.
        claims_without_ticket: claims that went on without a ticket, because their policy allows
            computing.
        refused_claims: claims that ended with a HandoffError.
        shown_blocks: blocks in this node's memory for which the address was sent to a claiming
            node.
        device_blocks: blocks that this node read from other nodes' devices.
        memory_blocks: blocks that this node read from host tiers of other nodes on the same
            machine.
        network_blocks: blocks that this node read from host tiers on other machines.
        damaged_direct_blocks: blocks that had changed in the producer's memory when they were read
            from there, and were fetched from storage instead.
        failed_direct_reads: failed reads from another node's memory, each of one or more blocks,
            which were fetched from storage instead.
    """

    published_prompts: int = 0
    published_blocks: int = 0
    early_blocks: int = 0
    failed_publishes: int = 0
    claimed_prompts: int = 0
    claims_without_ticket: int = 0
    refused_claims: int = 0
    shown_blocks: int = 0
    device_blocks: int = 0
    memory_blocks: int = 0
    network_blocks: int = 0
    damaged_direct_blocks: int = 0
    failed_direct_reads: int = 0


class Standing(Enum):
    """The state of a ticket, as any node can read it from the store."""

    NOT_YET = "not_yet"  # the store has no record of it
    OPEN = "open"  # its prompt is being computed
    WHOLE = "whole"  # every block was stored, so it can be claimed
    ACKNOWLEDGED = "acknowledged"  # a node claimed it; the ticket may still be stored for a while
    EXPIRED = "expired"
    DAMAGED = "damaged"
    INCOMPATIBLE = "incompatible"  # the KV of its producer cannot be used here
    PRODUCER_FAILED = "producer_failed"
    PRODUCER_LOST = "producer_lost"
    UNAVAILABLE = "storage_unavailable"


class TicketStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket's state and data, as read from the store. Fields that are not known are None.

    Attributes:
        detail: one sentence that explains the state; "" if there is nothing to add.
        num_blocks: number of the prompt's blocks, the tail included.
        created_at: Unix seconds.
        expires_at: Unix seconds.
        claimed_at: Unix seconds.
    """

    ticket_id: str
    state: Standing
    detail: str = ""
    producer: str | None = None
    num_tokens: int | None = None
    num_blocks: int | None = None
    created_at: float | None = None
    expires_at: float | None = None
    claimer: str | None = None
    claimed_at: float | None = None


async def status_of(tickets: Tickets, ticket_id: str) -> TicketStatus:
    """Read the state of a ticket from the store.

    If the store does not answer, the returned state is UNAVAILABLE.

    Args:
        tickets: reads the ticket's records.
        ticket_id: id of the ticket.

    Returns:
        The state, with the data of the ticket as far as it can be read.

    Raises:
        BadRequestError: the id cannot be encoded as UTF-8.
    """
    try:
        return await _status(tickets, ticket_id)
    except HandoffError as error:
        return TicketStatus(ticket_id=ticket_id, state=Standing(error.reason), detail=str(error))
    except StoreUnavailableError as error:
        return TicketStatus(ticket_id=ticket_id, state=Standing.UNAVAILABLE, detail=str(error))


async def _status(  # noqa: PLR0911 - a table of states
    tickets: Tickets, ticket_id: str
) -> TicketStatus:
    ticket = await tickets.read(ticket_id)
    claimed = await tickets.read_acknowledgement(ticket_id)
    if claimed is not None and (ticket is None or claimed.created_at == ticket.created_at):
        status = TicketStatus(ticket_id=ticket_id, state=Standing.ACKNOWLEDGED)
        if ticket is not None:
            status = _of(ticket, Standing.ACKNOWLEDGED)
        return msgspec.structs.replace(
            status, claimer=claimed.claimer, claimed_at=claimed.claimed_at
        )
    if ticket is not None:
        problem = tickets.problem_of(ticket)
        if problem is not None:
            return _of(ticket, Standing(problem.reason), str(problem))
        return _of(ticket, Standing.WHOLE)
    opened = await tickets.read_open(ticket_id)
    if opened is None:
        return TicketStatus(ticket_id=ticket_id, state=Standing.NOT_YET)
    if opened.failure:
        return _of(opened, Standing.PRODUCER_FAILED, opened.failure)
    if not await tickets.lease.is_alive(opened.incarnation):
        return _of(opened, Standing.PRODUCER_LOST)
    return _of(opened, Standing.OPEN)


def _of(ticket: Ticket | OpenTicket, state: Standing, detail: str = "") -> TicketStatus:
    return TicketStatus(
        ticket_id=ticket.ticket_id,
        state=state,
        detail=detail,
        producer=ticket.producer,
        num_tokens=ticket.num_tokens,
        num_blocks=len(ticket.digests),
        created_at=ticket.created_at,
        expires_at=ticket.expires_at,
    )


_MAX_KEPT = 4096
_MAX_CHECKED = 64  # tickets that are looked up at a time without a hint
_CHECK_EVERY_S = 5.0


class _Issued(msgspec.Struct, frozen=True):
    """A ticket that this node announced or published. Times are Unix seconds."""

    ticket_id: str
    state: Standing
    created_at: float
    expires_at: float


class TicketLedger:
    """A record of what became of this node's newest tickets: announced, published, claimed, failed.

    Args:
        tickets: reads from the store which tickets were claimed (acknowledged).
    """

    def __init__(self, tickets: Tickets) -> None:
        self._tickets = tickets
        self._topic = tickets.names.producer(tickets.lease.incarnation)
        self._issued: OrderedDict[str, _Issued] = OrderedDict()
        self._holds: dict[str, list[Callable[[str], None]]] = {}
        self._came = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside the `async with`, learn from the store which published tickets were claimed.

        Leaving the `async with` calls every callback that was registered with `hold` and not called
        yet.
        """
        try:
            async with supervised({"tierkv-ticket-ledger": self._keep_checking}):
                yield
        finally:
            for ticket_id in list(self._holds):
                self._release_holds(ticket_id)

    def state_of(self, ticket_id: str) -> Standing | None:
        """Return the state of a ticket; None if it is not among the newest tickets of this node."""
        issued = self._issued.get(ticket_id)
        return None if issued is None else issued.state

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def hold(self, ticket_id: str, release: Callable[[str], None]) -> None:
        """Register a callback that releases memory when a ticket ends.

        A ticket ends when it is acknowledged, when publishing fails, or when it expires. The ledger
        also ends its oldest tickets when it has too many, and all tickets when `running` ends.

        Args:
            ticket_id: id of the ticket.
            release: called once, at the end of the ticket, with the reason why publishing failed;
                "" after any other end.
        """
        self._holds.setdefault(ticket_id, []).append(release)

    def opened(self, ticket: OpenTicket) -> None:
        """Record that this node has announced a ticket."""
        self._put(ticket, Standing.OPEN)

    def failed(self, ticket_id: str, failure: str) -> None:
        """Record that a publish failed and that its ticket will not come.

        The memory that is reserved for the ticket is released.

        Args:
            ticket_id: id of the ticket.
            failure: the reason.
        """
        self._change(ticket_id, Standing.PRODUCER_FAILED)
        self._release_holds(ticket_id, failure or "it failed")

    def published(self, ticket: Ticket) -> None:
        """Record that a complete ticket was written."""
        self._put(ticket, Standing.WHOLE)
        self._came.set()

    def _put(self, ticket: Ticket | OpenTicket, state: Standing) -> None:
        ticket_id = ticket.ticket_id
        self._issued[ticket_id] = _Issued(ticket_id, state, ticket.created_at, ticket.expires_at)
        self._issued.move_to_end(ticket_id)
        while len(self._issued) > _MAX_KEPT:
            oldest, _ = self._issued.popitem(last=False)
            self._release_holds(oldest)

    def _change(self, ticket_id: str, state: Standing) -> None:
        if ticket_id in self._issued:
            issued = self._issued[ticket_id]
            self._issued[ticket_id] = msgspec.structs.replace(issued, state=state)

    def _release_holds(self, ticket_id: str, failure: str = "") -> None:
        for release in self._holds.pop(ticket_id, ()):
            release(failure)

    def _waiting(self) -> list[_Issued]:
        return [one for one in self._issued.values() if one.state is Standing.WHOLE]

    async def _keep_checking(self) -> None:
        while True:
            while not self._waiting():
                self._came.clear()
                await self._came.wait()
            with self._tickets.notifier.listen(self._topic) as listener:
                while waiting := self._waiting():
                    hint = await listener.next(_CHECK_EVERY_S)
                    told = [o for o in waiting if hint == acknowledged_hint(o.ticket_id)]
                    for issued in told or waiting[:_MAX_CHECKED]:
                        await self._check(issued)

    async def _check(self, issued: _Issued) -> None:
        ticket_id, end = issued.ticket_id, None
        if self._tickets.now() > issued.expires_at:
            end = Standing.EXPIRED
        else:
            try:
                found = await self._tickets.read_acknowledgement(ticket_id)
            except StoreUnavailableError:
                return
            if found is not None and found.created_at == issued.created_at:
                end = Standing.ACKNOWLEDGED
        if self._issued.get(ticket_id) is not issued:
            return  # another ticket has taken the id during the read
        if end is None:
            self._issued.move_to_end(ticket_id)  # check other tickets first next time
        else:
            self._change(ticket_id, end)
            self._release_holds(ticket_id)
