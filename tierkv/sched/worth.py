"""Fetch or recompute: what both take, as far as is known, and one bound on what waiting may cost.

A fetch takes the answer (what the tier has) and the transfer (`latency + bytes / bandwidth`, behind
what is queued); a prefill takes `tokens / speed`. All three are fitted to what was seen, the newest
counting most. A request fetches where that is estimated to be faster than computing, and gives up
after as long as computing takes: like who rents skis until that has cost as much as to buy them, it
pays at most twice (Karlin, Manasse, Rudolph, Sleator, 1988). `Regret` bounds all of them together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

# What waiting in vain may cost in the long run, as a share of computing; and before that, once, as
# computing so many of the largest requests.
SHARE = 0.02
MOST_IN_VAIN = 2.0
_FADING = 0.98  # of what was usual, with each request
MOST_AT_ONCE_S = 0.5  # twice what is waited for one store that hangs
# Beyond the estimate a request waits for this share of what computing takes.
HEDGE = 0.25
# Of the requests for whom the tier is estimated to be too slow one of so many tries it all the
# same: a tier that got faster is noticed. That costs SHARE of computing at the most. It is a prime,
# so that of small and big ones that come in turn not always the same are tried. A tier that was
# waited for in vain may have stalled for a moment: it is tried after 1, 2, 4, ... refusals first.
PROBE_EVERY = 53
# Of a tier that is not known yet, so long a request waits at the most, beside this share of what
# computing takes, unless what has come by then is on course to be faster. Nobody notices it, and a
# Redis on the same network has answered by then, and sent a block.
UNKNOWN_S, UNKNOWN_SHARE = 0.1, 0.05
# What all may wait, and one of them at the most, before anything is known of the engine's speed. In
# ten times as much an H200 computes 300k tokens (8B model).
FIRST_TRY_S = 1.0
# Where the engine's speed is only observed: so much longer a fetch may take, which leaves the
# engine to others, and so long it is waited for at the least.
_OBSERVED_SLACK_S = 0.02
_OBSERVED_LEAST_S = 0.1
_MANY_TOKENS = 1024
_MOST_OBSERVED = 64  # after as many more a sample counts by a thousandth
# Samples of the engine's speed: what storage has of a prompt is fetched but for its last tokens,
# which are computed. At first so many, of a share of the prompt each, after so many fetches.
_FIRST_SAMPLES, _SAMPLE_SHARE, _FETCHES_BEFORE = 3, 1 / 64, 2
# What was seen is believed of prompts so many times longer. One sample is so many times the last.
_REACH = 4
_MOST_SAMPLES = 6  # in a row, as from 1 / 64 to all, and the first; then one in PROBE_EVERY fetches
_SURPRISE = 2.0  # times faster or slower than expected
_TICK_S = 0.001  # of uvloop's clock: what takes less has taken nothing, or twice that


class FetchPolicy(Enum):
    """BEST_EFFORT fetches what is estimated to be faster than computing, and gives up in time.
    WAIT_COMPLETE fetches all there is, as long as some of it arrives before each deadline.
    DEADLINE fetches, until its time is up."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    DEADLINE = "deadline"


@dataclass(slots=True)
class Regret:
    """Seconds that requests may still wait in vain: what waits have saved, less what they have
    cost, and SHARE of what computing takes on top.

    All requests together take at most (1 + SHARE) × their computing time, plus once MOST_IN_VAIN ×
    the computing time of the largest, plus the waits that were under way when this ran out.
    least_s: what may be lost in any case, as long as what is known of computing is uncertain.
    """

    least_s: float = 0.0
    seconds: float = 0.0
    usual_s: float = 0.0  # what computing one of the larger requests took lately
    largest_s: float = 0.0

    def __post_init__(self) -> None:
        self.seconds = self.least_s

    def allow(self, compute_s: float) -> bool:
        """Whether one more may wait, which could compute instead in so long."""
        if 0 < compute_s < float("inf"):
            if not self.largest_s:
                self.seconds = self.least_s  # what was lost before could not be measured
            self.usual_s = max(compute_s, self.usual_s * _FADING)
            grown = max(compute_s - self.largest_s, 0.0)
            self.largest_s += grown
            self.add(SHARE * compute_s + MOST_IN_VAIN * grown)
        return self.seconds > 0

    def add(self, seconds: float) -> None:
        """So many were saved, or lost. One wait that was far too long is not held against a tier
        for ever."""
        most = self._most
        self.seconds = max(-most, min(self.seconds + seconds, most))

    def fill(self) -> None:
        """Nothing is known of the tier: as at the start."""
        self.seconds = self._most

    @property
    def _most(self) -> float:
        return max(MOST_IN_VAIN * self.usual_s, self.least_s)


@dataclass(slots=True)
class Allowance:
    """Seconds that requests in need of room may wait for writes to a store: SHARE of the time that
    goes by, and MOST_AT_ONCE_S at first. When none are left, blocks that the store has not taken
    are dropped, so that engines do not go at the store's speed."""

    seconds: float = MOST_AT_ONCE_S
    is_waiting: bool = False
    _seen_at: float | None = None

    def look(self, now: float) -> bool:
        """Whether one may wait from now on, or go on waiting."""
        went_by = now - (now if self._seen_at is None else self._seen_at)
        self._seen_at = now
        spent = went_by if self.is_waiting else 0.0
        self.seconds = min(self.seconds + SHARE * went_by - spent, MOST_AT_ONCE_S)
        return self.seconds > 0


@dataclass(slots=True)
class Line:
    """A least-squares line through decaying samples: seconds = fixed + per_unit x units."""

    decay: float = 0.9
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    is_of_one_size: bool = False  # all samples are, but for rounding

    def add(self, units: float, seconds: float) -> None:
        """One more sample. One that is far off begins anew: a tier that broke, or came back, is
        another tier, and an average over both would be wrong for a long time."""
        least = most = self.seconds(units)
        if self.x and self.is_of_one_size:
            # Until the fixed part can be told from the rest, nothing is a surprise that lies
            # between all and nothing of it: else small and big ones in turn would begin anew for
            # ever.
            mean = self.y / self.weight
            least, most = min(least, mean), max(most, mean)
        is_expected = least / _SURPRISE - _TICK_S < seconds < most * _SURPRISE + _TICK_S
        if not (self.x and is_expected):
            self.weight = self.x = self.y = self.xx = self.xy = 0.0
        decay = self.decay
        self.weight = weight = self.weight * decay + 1.0
        self.x = x = self.x * decay + units
        self.y = self.y * decay + seconds
        self.xx = xx = self.xx * decay + units * units
        self.xy = self.xy * decay + units * seconds
        self.is_of_one_size = xx * weight - x * x <= 1e-9 * x * x

    @property
    def is_known(self) -> bool:
        return self.weight > 0

    def seconds(self, units: float) -> float:
        """What `units` are expected to take; 0 as long as nothing is known."""
        if not self.weight:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        if not mean_x:
            return mean_y  # nothing ever came: all that is known is how long that took
        if self.is_of_one_size:
            return units * mean_y / mean_x  # no fixed part can be told apart
        slope = (self.xy - self.x * mean_y) / (self.xx - self.x * mean_x)
        if slope <= 0:
            return mean_y
        fixed = mean_y - slope * mean_x
        return fixed + slope * units if fixed > 0 else units * mean_y / mean_x

    def at_least(self, units: float) -> float:
        """As `seconds`, but as long as the fixed part cannot be told from the rest, with all or
        with nothing of it, whichever is less."""
        expected = self.seconds(units)
        is_open = self.is_known and self.is_of_one_size
        return min(expected, self.y / self.weight) if is_open else expected


class PrefillSpeed:
    """What computing takes, by tokens: as the engine tells, or else as requests were observed to
    take from their admission to the commit of their last block."""

    def __init__(self) -> None:
        self._fitted = Line()
        # Not in the line yet: it is fitted when somebody asks. Before so many nothing counts.
        self._observed: deque[tuple[int, float]] = deque(maxlen=_MOST_OBSERVED)
        self.is_told = False
        self.num_samples = 0
        self.most_tokens = 0  # of what the line is fitted to
        self.sample = range(0)  # what a request computes though storage has it: so many tokens

    @property
    def _line(self) -> Line:
        while self._observed:
            self._add(*self._observed.popleft())
        return self._fitted

    @property
    def is_known(self) -> bool:
        return bool(self._observed) or self._fitted.is_known

    def seconds(self, tokens: int) -> float:
        """What so many tokens are expected to take; 0 as long as nothing is known."""
        return self._line.seconds(tokens)

    def at_least(self, tokens: int) -> float:
        """As `seconds`, but no more than is sure: see `Line.at_least`; and what is much longer than
        all that was seen takes as long as what is somewhat longer, and half of that, as the last
        tokens of a prompt, which attend to all before them, take up to twice as long as others."""
        known = self.most_tokens
        seconds = self._line.at_least(min(tokens, _REACH * known))
        return seconds if tokens < _REACH / 2 * known else seconds / 2

    @property
    def seconds_of_one_more(self) -> float:
        """What a prompt takes longer that has one token more, in the mean of many."""
        return max(self.seconds(2 * _MANY_TOKENS) - self.seconds(_MANY_TOKENS), 0.0) / _MANY_TOKENS

    def tell(self, tokens: int, seconds: float) -> None:
        """The engine says so; what was observed counts no longer."""
        if not self.is_told:
            self._fitted, self.is_told = Line(), True
            self._observed.clear()
        self._add(tokens, seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        """A request computed so many tokens in so long, whatever else it waited for."""
        if not self.is_told:
            self._observed.append((tokens, seconds))

    def _add(self, tokens: int, seconds: float) -> None:
        line = self._fitted
        self.num_samples += 1
        if tokens in self.sample:
            self.sample = range(0)
            if line.is_known and seconds > _SURPRISE * line.seconds(tokens) + _TICK_S:
                return  # a few tokens beside a stall: they can only show that it is faster
        line.add(tokens, seconds)
        begins_anew = line.weight == 1.0
        self.most_tokens = tokens if begins_anew else max(self.most_tokens, tokens)


@dataclass(frozen=True, slots=True)
class Decision:
    """give_up_s: when to stop waiting and compute, 0 for at once, None for the deadline.
    is_try: the tier is estimated to be too slow. The estimates and the reason are for `explain`.
    hedge_s: after so long the request goes on, and the fetch goes on without it, so that the tier
    is known then; unless what has come is on course: see `Estimator.on_course_s`. None: it waits.
    """

    give_up_s: float | None
    fetch_s: float
    compute_s: float
    reason: str
    is_try: bool = False
    hedge_s: float | None = None

    @property
    def fetches(self) -> bool:
        return self.give_up_s != 0


class Estimator:
    """One tier's path to the device. bytes_per_token: KV bytes of a token."""

    def __init__(
        self, *, bytes_per_token: float, policy: FetchPolicy, deadline_s: float | None = None
    ) -> None:
        if policy is FetchPolicy.DEADLINE and deadline_s is None:
            raise ValueError("the deadline policy needs deadline_s")
        self.bytes_per_token = bytes_per_token
        self.policy = policy
        self.deadline_s = deadline_s
        self.prefill = PrefillSpeed()
        self.transfer = Line()
        self._answers = Line()  # what a question takes, by the tokens that it is about
        self._queued_bytes = 0.0
        self._arrived_bytes = 0.0  # since the start
        self._refused = 0  # since the last try
        # Refusals before the next try, since a wait was in vain; None: what is known is known.
        self._in_doubt: int | None = None
        self._fetched = 0
        self._samples_left = _MOST_SAMPLES
        self.num_finding_out = 0  # fetches that have gone on without their requests
        self._regret = Regret(FIRST_TRY_S)

    def begin_anew(self) -> None:
        """The tier is another one, or has come back: nothing is known of it."""
        self.transfer, self._answers = Line(), Line()
        self._refused, self._in_doubt = 0, None
        self._regret.fill()

    def findings(self) -> list[str]:
        """What is wrong, in words, when nothing is on its way."""
        if abs(self._queued_bytes) < 1:
            return []
        queued = self._queued_bytes
        return [f"nothing runs, but {queued:.0f} bytes are counted as queued for fetches"]

    # Deciding

    def decide_question(self, tokens: int, policy: FetchPolicy | None = None) -> Decision:
        """Whether to ask the tier for `tokens` missing tokens, and how long to wait for its answer
        and for the bytes together. policy: None for the usual one."""
        compute_s = self.prefill.seconds(tokens)
        if (policy or self.policy) is not FetchPolicy.BEST_EFFORT:
            return self._other_policy(tokens, policy or self.policy)
        may_wait = self._regret.allow(compute_s)
        if not self.prefill.is_known:
            give_up_s = max(min(self._regret.seconds, FIRST_TRY_S), 0.0)
            reason = "prefill speed not known yet: a try"
            return Decision(give_up_s, 0.0, 0.0, reason)
        fetch_s = self._answers.at_least(tokens) + self._transfer_s(tokens)
        finds_out = self.num_finding_out > 0 and not self._is_tier_known
        if finds_out or not may_wait:
            reason = "waiting for the tier has cost more than it has saved"
            if finds_out:
                reason = "the tier is not known yet, and a fetch under way finds out"
            return Decision(0.0, fetch_s, compute_s, reason)
        if self._is_faster(fetch_s, compute_s):
            self._in_doubt = None
            give_up_s = self._give_up_s(fetch_s, compute_s)
            reason = "fetching is estimated to be faster"
            # An engine's speed that is only observed may be noise: then it waits for the whole.
            waits = self._is_tier_known or not self.prefill.is_told
            hedge_s = None if waits else UNKNOWN_S + UNKNOWN_SHARE * compute_s
            return Decision(give_up_s, fetch_s, compute_s, reason, hedge_s=hedge_s)
        if not self._is_try_due():
            reason = "computing is estimated to be faster"
            return Decision(0.0, fetch_s, compute_s, reason)
        reason = "a try, whether it is still slower"
        hedge_s = UNKNOWN_S + UNKNOWN_SHARE * compute_s
        return Decision(compute_s, fetch_s, compute_s, reason, is_try=True, hedge_s=hedge_s)

    def _is_try_due(self) -> bool:
        """Whether this one, for whom the tier is estimated to be too slow, tries it."""
        self._refused += 1
        least = PROBE_EVERY - 1 if self._in_doubt is None else self._in_doubt
        if self._refused <= least:
            return False
        self._refused = 0
        if self._in_doubt is not None:
            self._in_doubt = min(2 * self._in_doubt, PROBE_EVERY - 1)
        return True

    def _note_in_vain(self) -> None:
        """Of many at once, whom one stall has held up, as of one: tries alone make tries rarer."""
        if self._in_doubt is None:
            self._refused, self._in_doubt = 0, 1

    def decide(
        self, tokens: int, policy: FetchPolicy | None = None, *, is_try: bool = False
    ) -> Decision:
        """Whether to fetch `tokens` tokens that the tier has, and how long to wait for them, now
        that it is known how many they are. is_try: see the question's Decision."""
        if (policy or self.policy) is not FetchPolicy.BEST_EFFORT:
            return self._other_policy(tokens, policy or self.policy)
        compute_s, fetch_s = self.prefill.seconds(tokens), self._transfer_s(tokens)
        if is_try or not self.prefill.is_known:
            return Decision(None, fetch_s, compute_s, "a try")
        if self._is_faster(fetch_s, compute_s):
            give_up_s = self._give_up_s(fetch_s, compute_s)
            reason = "fetching is estimated to be faster"
            return Decision(give_up_s, fetch_s, compute_s, reason)
        return Decision(0.0, fetch_s, compute_s, "computing is estimated to be faster")

    def sample_tokens(self, tokens: int, decision: Decision) -> int:
        """How many of `tokens`, which are fetched by `decision`, to compute all the same, so that
        the engine's speed is known: 0 for most.

        A node that finds all of its prompts in storage would not learn it, or wait too long for a
        tier that is slower than thought. What is computed takes no longer than the fetch, as far as
        is known; at first it is a few tokens.
        """
        prefill, fetch_s, compute_s = self.prefill, decision.fetch_s, decision.compute_s
        self._fetched += 1
        is_due = self._fetched % PROBE_EVERY == 0
        self._samples_left = min(self._samples_left + is_due, _MOST_SAMPLES)
        if not self._samples_left or self._fetched <= _FETCHES_BEFORE:
            return 0
        if prefill.num_samples < _FIRST_SAMPLES:
            sample = int(tokens * _SAMPLE_SHARE)
        elif prefill.at_least(tokens) < fetch_s <= compute_s:
            sample = _REACH * prefill.most_tokens
        elif is_due and fetch_s < compute_s:
            sample = int(tokens * fetch_s / compute_s)
        else:
            return 0
        self._samples_left -= 1
        return min(max(sample, 1), tokens)

    def _other_policy(self, tokens: int, policy: FetchPolicy) -> Decision:
        compute_s, fetch_s = self.prefill.seconds(tokens), self._transfer_s(tokens)
        if policy is FetchPolicy.WAIT_COMPLETE:
            return Decision(None, fetch_s, compute_s, "the policy waits for all there is")
        return Decision(self.deadline_s, fetch_s, compute_s, "until the deadline")

    def _transfer_s(self, tokens: int) -> float:
        return self.transfer.seconds(tokens * self.bytes_per_token + self._queued_bytes)

    def _is_faster(self, fetch_s: float, compute_s: float) -> bool:
        return fetch_s < compute_s + self._slack_s

    @property
    def _slack_s(self) -> float:
        return 0.0 if self.prefill.is_told else _OBSERVED_SLACK_S

    def _give_up_s(self, fetch_s: float, compute_s: float) -> float:
        """Of a tier that is not known yet as long as computing takes; else what lies too far beyond
        the estimate is another tier's. Twice the slack: who takes a fetch that needs just so long
        has to see its end."""
        most_s = compute_s + 2 * self._slack_s
        give_up_s = min(most_s, fetch_s + HEDGE * compute_s) if self._is_tier_known else most_s
        return give_up_s if self.prefill.is_told else max(give_up_s, _OBSERVED_LEAST_S)

    @property
    def _is_tier_known(self) -> bool:
        return self._answers.is_known and self.transfer.is_known

    def on_course_s(self, transfer: Transfer, waited_s: float, now: float) -> float | None:
        """When all of it will be here, in seconds from the request's question on, if it goes on as
        since it began; None if computing takes less. waited_s: since that question."""
        took_s = now - transfer.began
        whole_s = waited_s - took_s + took_s * transfer.num_bytes / max(transfer.arrived_bytes, 1)
        tokens = int(transfer.num_bytes / self.bytes_per_token)
        return whole_s if whole_s < self.prefill.seconds(tokens) else None

    # Learning

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """The engine says what computing so many tokens took."""
        self.prefill.tell(tokens, seconds)
        self._regret.least_s = 0.0

    def note_answer(self, tokens: int, seconds: float, *, in_time: bool) -> None:
        """The tier has said within `seconds` what it has of `tokens`, or was waited for so long in
        vain: then it is taken to need twice that for whatever it is asked."""
        if in_time:
            self._answers.add(tokens, seconds)
            return
        self._note_in_vain()
        if seconds > self._answers.seconds(0):
            self._answers.add(0, 2 * seconds)

    def note_fetch(self, num_bytes: float, seconds: float, *, is_whole: bool = True) -> None:
        """A fetch moved so many bytes in so much time. Of one given up, what it had moved: that is
        news only if it should have taken less. Of nothing at all it is taken to need twice that."""
        if not is_whole:
            self._note_in_vain()
        if is_whole or seconds > self.transfer.seconds(num_bytes):
            self.transfer.add(num_bytes, seconds if num_bytes else 2 * seconds)

    def note_wait(self, tokens: int, seconds: float) -> None:
        """A request that could have computed has waited so long, from its question on, and has so
        many tokens for it."""
        saved_s = self.prefill.seconds(tokens) + (self._slack_s if tokens else 0.0)
        self._regret.add(saved_s - seconds)

    def begin_transfer(self, tokens: int, now: float) -> Transfer:
        """So many are fetched from now on: others queue behind them."""
        num_bytes = tokens * self.bytes_per_token
        transfer = Transfer(num_bytes, now, self._queued_bytes, self._arrived_bytes)
        self._queued_bytes += num_bytes
        return transfer

    def arrived(self, transfer: Transfer, tokens: int) -> None:
        """`tokens` of it are here by now."""
        num_bytes = tokens * self.bytes_per_token
        self._arrived_bytes += num_bytes - transfer.arrived_bytes
        transfer.arrived_bytes = num_bytes

    def end_transfer(self, transfer: Transfer, now: float, *, is_late: bool) -> None:
        """No more of it comes. is_late: since it took too long."""
        self._queued_bytes -= transfer.num_bytes
        is_whole = transfer.arrived_bytes >= transfer.num_bytes
        if is_whole or is_late:
            # Of what was queued before it, only what came: if nothing did, the tier is slow.
            by_others = self._arrived_bytes - transfer.arrived_before - transfer.arrived_bytes
            queued = min(transfer.queued_before, by_others)
            moved = transfer.arrived_bytes + queued
            self.note_fetch(moved, now - transfer.began, is_whole=is_whole)


@dataclass(slots=True)
class Transfer:
    """One fetch's bytes on their way. queued_before, arrived_before: of all others, when it began:
    bytes that were queued, and that had come since the start."""

    num_bytes: float
    began: float
    queued_before: float
    arrived_before: float
    arrived_bytes: float = 0.0
