"""The decode node's side of a hand-off: wait for the ticket, get its blocks, tell what is wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum

import msgspec

from tierkv.cache.keys import Prompt, StoredKey, differences
from tierkv.cache.node import Tier
from tierkv.errors import HandoffError, StoreUnavailableError, TransferError
from tierkv.pd.ledger import HandoffStats
from tierkv.pd.portions import Portions
from tierkv.pd.source import PeerSource, Supply
from tierkv.pd.ticket import ClaimProblem, Ticket
from tierkv.pd.tickets import Tickets, check_id
from tierkv.pd.watch import Watch
from tierkv.sched.fetch import Fetched, Fetcher
from tierkv.sched.fetch_groups import NO_ROOM
from tierkv.sched.request import Request, RequestSpec
from tierkv.sched.scheduler import Scheduler
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.tasks import background, deadline

log = logging.getLogger("tierkv.handoff")

# Whoever would rather compute than wait gives up a store that has said nothing for so long: one
# that is left alone is asked each second whether it is back.
_SILENT_S = 2.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
# Computing the prompt here would not be what the caller meant.
_ALWAYS_REFUSED = (ClaimProblem.INCOMPATIBLE.value, ClaimProblem.OTHER_PROMPT.value)


class ClaimPolicy(Enum):
    """What a decode node does when not every token of a claimed prompt can be had.

    Without a ticket there are no first tokens: those policies that may, compute them, too.
    """

    WHOLE = "whole"  # refuse, with the reason
    RECOMPUTE = "recompute"  # load what there is and compute the rest, be there a ticket or not
    RECOMPUTE_ALL = "recompute_all"  # compute everything, as if nobody had prefilled


class Claims:
    """Claims one published prompt at a time: waits for its ticket, fetches its blocks, admits its
    request.

    fetch_deadline_s: seconds that the fetch may take from the ticket on. stats: counts of the
        node's hand-offs, both ways.
    """

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        tickets: Tickets,
        scheduler: Scheduler,
        fetcher: Fetcher,
        *,
        source: PeerSource,
        portions: Portions,
        fetch_deadline_s: float,
        stats: HandoffStats,
    ) -> None:
        self._tickets = tickets
        self._scheduler = scheduler
        self._fetcher = fetcher
        self._source = source
        self._portions = portions
        self._fetch_deadline_s = fetch_deadline_s
        self._stats = stats

    async def claim(
        self,
        spec: RequestSpec,
        ticket_id: str,
        *,
        policy: ClaimPolicy,
        deadline_s: float,
        sampling: Mapping[str, str],
    ) -> tuple[Request, Ticket | None]:
        """Wait for a published prompt and get its blocks; see Service.claim."""
        self._scheduler.check(spec)
        check_id(ticket_id)
        try:
            request, ticket = await self._claim(spec, ticket_id, policy, deadline_s, sampling)
        except HandoffError:
            self._stats.refused_claims += 1
            raise
        if ticket is None:
            self._stats.claims_without_ticket += 1
        else:
            self._stats.claimed_prompts += 1
            self._scheduler.tiers.work.start(
                self._acknowledge(request, ticket), "tierkv-acknowledge"
            )
        return request, ticket

    async def _claim(
        self,
        spec: RequestSpec,
        ticket_id: str,
        policy: ClaimPolicy,
        deadline_s: float,
        sampling: Mapping[str, str],
    ) -> tuple[Request, Ticket | None]:
        give_up_at = asyncio.get_running_loop().time() + deadline_s
        if policy is ClaimPolicy.RECOMPUTE_ALL:
            alone = msgspec.structs.replace(spec, needs_logits=True, uses_cache=False)
            return await self._scheduler.admit(alone), None
        with self._source.supply(lambda: self._has_room(spec.num_blocks)) as near:
            try:
                silent_s = deadline_s if policy is ClaimPolicy.WHOLE else _SILENT_S
                ticket, keys = await self._wait(spec, ticket_id, near, deadline_s, silent_s)
                _check_sampling(ticket, sampling)
            except HandoffError as error:
                if policy is ClaimPolicy.WHOLE or error.reason in _ALWAYS_REFUSED:
                    raise
                log.warning("request %s goes on without a ticket: %s", spec.request_id, error)
                return await self._without_ticket(spec, error, near), None
            near.learn(ticket)
            return await self._get(spec, keys, policy, give_up_at, near), ticket

    def _has_room(self, num_blocks: int) -> bool:
        """Whether the device could take so many blocks now, and nobody is before them."""
        has_room = self._scheduler.tiers.eviction.available(Tier.DEVICE) >= num_blocks
        return has_room and not self._scheduler.num_waiting

    async def _wait(
        self, spec: RequestSpec, ticket_id: str, near: Supply, deadline_s: float, silent_s: float
    ) -> tuple[Ticket, Sequence[StoredKey]]:
        """The ticket, and the prompt's keys, which are its; blocks that are whole before it is are
        on their way meanwhile."""
        ahead = Ahead(
            spec,
            self._scheduler,
            self._fetcher,
            near=near,
            deadline_s=self._fetch_deadline_s,
        )
        watch = Watch(
            self._tickets,
            ticket_id,
            spec.prompt,
            on_progress=ahead.ready,
            on_open=near.learn,
        )
        async with background({"tierkv-claim-ahead": ahead.run()}):
            return await watch.ticket(deadline_s=deadline_s, silent_s=silent_s), watch.keys

    async def _get(
        self,
        spec: RequestSpec,
        keys: Sequence[StoredKey],
        policy: ClaimPolicy,
        give_up_at: float,
        near: Supply,
    ) -> Request:
        """The request, with every token or with what `policy` says. A store that fails is asked
        again until the claim's time is over: its ticket said that all is there. What the host has
        no room for, or has not any more when it is the request's turn, comes in portions."""
        prompt, pause_s = spec.prompt, _FIRST_PAUSE_S
        while True:
            await near.ask(prompt)
            fetched = await self._fetch_and_load(spec, keys)
            _note(fetched, near)  # this may not be the last attempt
            problem = fetched.first_problem
            if policy is not ClaimPolicy.WHOLE or not self._may_try_again(problem, give_up_at):
                left_s = give_up_at - asyncio.get_running_loop().time()
                async with deadline(left_s, _found_no_room):  # it may be in line still by then
                    request = await self._scheduler.admit(spec, fetched)
                if problem is None or problem is NO_ROOM:
                    problem = await self._rest(request, keys, give_up_at)
                is_whole = request.cached_tokens == prompt.num_tokens
                if is_whole or policy is not ClaimPolicy.WHOLE:
                    return request
                self._scheduler.end(request)
                if not self._may_try_again(problem, give_up_at):
                    raise _incomplete(request, problem)
            fetched.release()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _may_try_again(self, problem: GetOutcome | None, give_up_at: float) -> bool:
        """Whether the store did not answer, and there is time to ask it once more."""
        has_failed = problem is not None and problem.status is GetStatus.FAILED
        return has_failed and asyncio.get_running_loop().time() + _FIRST_PAUSE_S < give_up_at

    async def _rest(
        self, request: Request, keys: Sequence[StoredKey], give_up_at: float
    ) -> GetOutcome | None:
        """Bring what an admitted request lacks; why not all of it, if so."""
        if request.cached_tokens == request.spec.prompt.num_tokens:
            return None
        try:
            return await self._portions.bring(
                request,
                keys or self._scheduler.tiers.prompt_keys(request.spec.prompt),
                give_up_at=give_up_at,
                portion_s=self._fetch_deadline_s,
            )
        except BaseException:  # a load that failed, an abort, a cancel: nobody has the request yet
            self._scheduler.end(request)
            raise

    async def _fetch_and_load(self, spec: RequestSpec, keys: Sequence[StoredKey]) -> Fetched:
        """What storage has of the prompt; what came first is on its way to the device by then."""
        loads = LoadsAhead(spec, self._scheduler, self._has_room)
        fetched: Fetched | None = None
        try:
            async with background({"tierkv-load-ahead": loads.run()}):
                fetched = await self._fetcher.fetch(
                    spec.prompt,
                    deadline_s=self._fetch_deadline_s,
                    on_arrival=loads.arrived,
                    promised=keys,
                )
        except BaseException:  # a cancel while the loads ahead end, too
            if fetched is not None:
                fetched.release()
            raise
        return fetched

    async def _without_ticket(
        self, spec: RequestSpec, error: HandoffError, near: Supply
    ) -> Request:
        fetched = None
        if error.reason != ClaimProblem.UNAVAILABLE.value:
            fetched = await self._fetcher.fetch(spec.prompt, deadline_s=self._fetch_deadline_s)
            _note(fetched, near)
        return await self._scheduler.admit(
            msgspec.structs.replace(spec, needs_logits=True), fetched
        )

    async def _acknowledge(self, request: Request, ticket: Ticket) -> None:
        for load in request.loads:  # an engine waits for these, for this nobody does
            with suppress(TransferError):
                await load.done()
        with suppress(StoreUnavailableError):  # then the ticket goes when its time is over
            await self._tickets.acknowledge(ticket)


def _note(fetched: Fetched, near: Supply) -> None:
    """What was brought for a claim by now, `fetched` included, is told both to either."""
    fetched.earlier = tuple(near.came)
    near.came.append(fetched.tokens)
    near.direct.extend(fetched.direct)
    fetched.direct = tuple(near.direct)


def _check_sampling(ticket: Ticket, ours: Mapping[str, str]) -> None:
    """Raise HandoffError if both say how they sample, and differ: tokens of two ways to sample
    would be neither node's."""
    if ticket.sampling and ours and ticket.sampling != ours:
        raise HandoffError(
            ClaimProblem.INCOMPATIBLE.value,
            "the ticket's first tokens were sampled in another way: "
            + ", ".join(differences(dict(ours), ticket.sampling)),
        )


def _found_no_room() -> HandoffError:
    return HandoffError(
        ClaimProblem.NO_ROOM.value, "other requests had all of the room until the claim's deadline"
    )


def _incomplete(request: Request, problem: GetOutcome | None) -> HandoffError:
    if problem is NO_ROOM:
        return _found_no_room()
    reason = {
        GetStatus.DAMAGED: ClaimProblem.DAMAGED,
        GetStatus.FAILED: ClaimProblem.UNAVAILABLE,
    }.get(problem.status if problem else GetStatus.MISS, ClaimProblem.INCOMPLETE)
    return HandoffError(
        reason.value,
        f"only {request.cached_tokens} of {request.spec.prompt.num_tokens} prompt tokens could be "
        f"loaded: {(problem.reason if problem else '') or 'not in storage'}",
    )


# A load takes the loop half a millisecond, in which PCIe 5 moves 25 MiB: while a prompt of 80 MiB
# comes, five of them took it a tenth of its time (2-core x86-64 VM and H200, 2026-11-23).
LEAST_BYTES = 32 << 20


class Ahead:
    """Fetches blocks of a claimed prompt before its ticket is there. Keeps no lease between
    fetches, so a claim that waits takes no room from others; its blocks may be evicted and fetched
    again."""

    def __init__(
        self,
        spec: RequestSpec,
        scheduler: Scheduler,
        fetcher: Fetcher,
        *,
        near: Supply,
        deadline_s: float,
    ) -> None:
        """near: asked before each fetch where blocks are, and told what was fetched. deadline_s:
        for one step's fetch."""
        self._spec = spec
        self._scheduler = scheduler
        self._fetcher = fetcher
        self._near = near
        self._deadline_s = deadline_s
        self._wanted = 0
        self._done = 0
        self._came = asyncio.Event()

    def ready(self, num_blocks: int | None) -> None:
        """The prompt's first blocks are in storage; None: nobody said how many."""
        most = self._spec.prompt.num_blocks
        self._wanted = max(self._wanted, most if num_blocks is None else min(num_blocks, most))
        self._came.set()

    async def run(self) -> None:
        """Until cancelled. What goes wrong here is found again by the claim itself."""
        while True:
            await self._came.wait()
            self._came.clear()
            if self._wanted <= self._done:
                continue
            prefix = _first_blocks(self._spec.prompt, self._wanted)
            await self._near.ask(prefix)
            fetched = await self._fetcher.fetch(prefix, deadline_s=self._deadline_s)
            self._near.came.append(fetched.tokens)
            self._near.direct.extend(fetched.direct)
            try:
                if fetched.first_problem is None:
                    self._done = prefix.num_blocks
                else:
                    self._wanted = self._done
                await self._load(prefix, fetched)
            finally:
                fetched.release()

    async def _load(self, prefix: Prompt, fetched: Fetched) -> None:
        """Bring to the device what is on the host now, if there is room that nobody waits for."""
        tiers = self._scheduler.tiers
        has_room = tiers.eviction.available(Tier.DEVICE) >= 2 * self._spec.num_blocks
        if has_room and fetched.tokens:
            with suppress(TransferError):
                num_blocks = fetched.tokens.stop // prefix.block_size
                await self._scheduler.load_ahead(_first_blocks(prefix, num_blocks))


class LoadsAhead:
    """Brings to the device what has been fetched of a prompt, LEAST_BYTES or more at a time, while
    the rest is fetched. What comes last the request itself brings.

    has_room: whether the device could take so many blocks now, and nobody is before them.
    """

    def __init__(
        self, spec: RequestSpec, scheduler: Scheduler, has_room: Callable[[int], bool]
    ) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._has_room = has_room
        self._least_blocks = LEAST_BYTES / scheduler.tiers.mover.planes.layout.block_bytes
        self._on_host = self._begun = self._on_device = 0
        self._came = asyncio.Event()

    def arrived(self, num_blocks: int) -> None:
        """The prompt's first blocks are on the host."""
        self._on_host = min(num_blocks, self._spec.prompt.num_blocks)
        if self._on_host - self._begun >= self._least_blocks:
            self._came.set()

    async def run(self) -> None:
        """Until cancelled; loads that have begun then go on, and the request finds them."""
        while True:
            await self._came.wait()
            self._came.clear()
            on_host = self._begun = self._on_host
            if self._has_room(self._spec.num_blocks - self._on_device):
                with suppress(TransferError):  # the request tries again, and is told
                    await self._scheduler.load_ahead(_first_blocks(self._spec.prompt, on_host))
                    self._on_device = on_host


def _first_blocks(prompt: Prompt, count: int) -> Prompt:
    tokens = prompt.tokens[: count * prompt.block_token_bytes]
    extras = {block: extra for block, extra in prompt.extras.items() if block < count}
    return Prompt(tokens, prompt.block_size, extras, prompt.space)
