"""Publish on the prefill node, claim on the decode node; storage is all they share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.cache.fingerprint import Fingerprint, differences
from tierkv.cache.keys import Prompt, StoredKey, stored_keys
from tierkv.cache.node import Tier
from tierkv.cache.states import CopyState
from tierkv.clock import Clock
from tierkv.errors import (
    HandoffError,
    OwnershipError,
    StoreCorruptError,
    StoreUnavailableError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.pd.staging import GROUP_BLOCKS, Staging
from tierkv.pd.ticket import MAX_TICKET_BYTES, ClaimProblem, Ticket
from tierkv.sched.request import Request
from tierkv.sched.tiers import Tiers
from tierkv.storage.protocol import PutItem, PutOutcome, PutStatus
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.handoff")

# A ticket outlives its expiry in the store by this much, so that "expired" can be told from "not
# yet" by a decode node that comes late.
_EXPIRED_GRACE_S = 120.0
_FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish did: blocks of the prompt, of which so many were in storage already."""

    ticket: Ticket
    num_blocks: int
    present_blocks: int
    flushed_bytes: int


class Handoff:
    """ticket_ttl_s: how long a decode node has to claim. producer: this node's name."""

    def __init__(  # noqa: PLR0913 - collaborators, and two settings
        self,
        tiers: Tiers,
        storage: StorageIO,
        fingerprint: Fingerprint,
        clock: Clock,
        staging: Staging,
        *,
        ticket_ttl_s: float,
        producer: str,
    ) -> None:
        self._tiers = tiers
        self._storage = storage
        self._fingerprint = fingerprint
        self._clock = clock
        self._staging = staging
        self._ticket_ttl_s = ticket_ttl_s
        self._producer = producer

    # Publish

    async def publish(
        self,
        request: Request,
        ticket_id: str,
        first_tokens: Sequence[int],
        *,
        after: Sequence[Event] = (),
        deadline_s: float,
    ) -> Published:
        """Store every block of the request's prompt, tail included, and then the ticket.

        The request is running and its prompt is computed; it must not end before this returns.
        after: events of the kernels that wrote the blocks.
        Raises HandoffError if storage did not take it all in `deadline_s`, and OwnershipError if
        the request has ended or is not computed; no ticket exists then.
        """
        request.check_running()
        prompt = request.spec.prompt
        if request.computed_tokens < prompt.num_tokens:
            raise OwnershipError(
                f"only {request.computed_tokens} of {prompt.num_tokens} prompt tokens are computed"
            )
        after = (*after, *request.written)
        keys = stored_keys(self._tiers.root_digest, prompt)
        before = self._storage.stats.flushed_bytes
        try:
            async with asyncio.timeout(deadline_s):
                present = await self._storage.count_present(keys)
                at = present
                while at < len(keys):
                    at += await self._stage_and_flush(request, keys, at, after)
                ticket = self._ticket(ticket_id, prompt, keys, first_tokens)
                await self._write(ticket)
        except TimeoutError as error:
            raise HandoffError(
                ClaimProblem.UNAVAILABLE.value,
                f"the prompt could not be published within {deadline_s:g} s",
            ) from error
        except (StoreUnavailableError, TransferError) as error:
            raise HandoffError(ClaimProblem.UNAVAILABLE.value, str(error)) from error
        return Published(ticket, len(keys), present, self._storage.stats.flushed_bytes - before)

    async def _stage_and_flush(
        self, request: Request, keys: Sequence[StoredKey], at: int, after: Sequence[Event]
    ) -> int:
        """Flush keys[at:] up to a group's size; returns how many. Blocks that the host has are
        flushed from there, the others through staging slots."""
        count = min(GROUP_BLOCKS, len(keys) - at)
        async with self._staging.group() as group:
            slots = group.slots[:count].copy()
            cached = [self._host_slot(request, at + i) for i in range(count)]
            missing = np.array([slot is None for slot in cached], np.bool_)
            group.movement = self._tiers.mover.offload(
                slots[missing], request.block_table[at : at + count][missing], after
            )
            await group.movement.done()
            for i, slot in enumerate(cached):
                if slot is not None:
                    slots[i] = slot
            outcomes = await self._storage.flush(keys[at : at + count], slots)
        self._check_written(outcomes)
        return count

    def _host_slot(self, request: Request, block: int) -> int | None:
        """The host slot of a block of the request's path, None if the host has no whole copy."""
        lease = request.lease
        if block >= min(lease.num_blocks, request.spec.prompt.num_blocks):
            return None
        index = self._tiers.index
        if index.states(Tier.HOST, lease.node, block, block + 1)[0] is not CopyState.READY:
            return None
        return int(index.slots(Tier.HOST, lease.node, block, block + 1)[0])

    def _ticket(
        self, ticket_id: str, prompt: Prompt, keys: Sequence[StoredKey], first: Sequence[int]
    ) -> Ticket:
        now = self._clock.wall()
        return Ticket(
            ticket_id=ticket_id,
            fingerprint=self._fingerprint.readable(),
            block_size=prompt.block_size,
            num_tokens=prompt.num_tokens,
            digests=tuple(key.digest for key in keys),
            first_tokens=tuple(first),
            created_at=now,
            expires_at=now + self._ticket_ttl_s,
            producer=self._producer,
        )

    async def _write(self, ticket: Ticket) -> None:
        item = PutItem(
            self._storage.names.ticket(ticket.ticket_id),
            (ticket.encode(),),
            ttl_s=self._ticket_ttl_s + _EXPIRED_GRACE_S,
            keep_existing=False,
        )
        self._check_written(await self._storage.store.put([item]))

    def _check_written(self, outcomes: Sequence[PutOutcome]) -> None:
        for outcome in outcomes:
            if outcome.status not in (PutStatus.STORED, PutStatus.EXISTED):
                raise StoreUnavailableError(
                    f"{self._storage.store.url} did not take a block: {outcome.reason}"
                )

    # Claim

    async def wait_for_ticket(self, ticket_id: str, *, deadline_s: float) -> Ticket:
        """The ticket, as soon as it is there. Raises HandoffError, its reason a ClaimProblem."""
        name = self._storage.names.ticket(ticket_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        pause = _FIRST_LOOK_S
        problem: StoreUnavailableError | None = None
        while True:
            try:
                async with asyncio.timeout_at(max(deadline, loop.time() + _LONGEST_LOOK_S)):
                    value = await self._storage.store.get(name, max_bytes=MAX_TICKET_BYTES)
                problem = None
            except StoreUnavailableError as error:
                value, problem = None, error
            except TimeoutError:
                value = None
            except StoreCorruptError as error:
                raise HandoffError(ClaimProblem.DAMAGED.value, f"the ticket: {error}") from error
            if value is not None:
                return self._read(value)
            left = deadline - loop.time()
            if left <= 0:
                break
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 2, _LONGEST_LOOK_S)
        if problem is not None:
            raise HandoffError(ClaimProblem.UNAVAILABLE.value, str(problem)) from problem
        raise HandoffError(
            ClaimProblem.NOT_YET.value,
            f"no ticket {ticket_id[:80]!r} came within {deadline_s:g} s: is the prefill done?",
        )

    def _read(self, value: bytes) -> Ticket:
        try:
            ticket = Ticket.decode(value)
        except StoreCorruptError as error:
            raise HandoffError(ClaimProblem.DAMAGED.value, f"the ticket: {error}") from error
        ours = self._fingerprint.readable()
        if ours != ticket.fingerprint:
            fields = ", ".join(differences(ours, ticket.fingerprint))
            raise HandoffError(
                ClaimProblem.INCOMPATIBLE.value,
                f"{ticket.producer} made this KV for another model or layout: {fields}",
            )
        if self._clock.wall() > ticket.expires_at:
            raise HandoffError(
                ClaimProblem.EXPIRED.value, "the ticket has expired: prefill the prompt again"
            )
        return ticket

    def check_prompt(self, ticket: Ticket, prompt: Prompt) -> None:
        """Raise HandoffError if the ticket is not for exactly this prompt."""
        if stored_keys(self._tiers.root_digest, prompt) != ticket.keys():
            raise HandoffError(
                ClaimProblem.OTHER_PROMPT.value,
                f"the ticket is for another prompt, of {ticket.num_tokens} tokens",
            )
