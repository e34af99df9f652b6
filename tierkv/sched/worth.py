"""Fetch or recompute: running estimates of tiers and prefill, and what they say about a run.

A transfer takes `latency + bytes / bandwidth`, behind what is queued; a prefill takes
`tokens / speed`. Both are fitted to what was seen, the newest counting most. The cache must never
be why a request is slower than without one, so waiting for a fetch is bounded whatever the
estimate says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

# What waiting in vain may cost in the long run, as a share of computing; and before that, once, as
# computing so many of the largest requests.
SHARE = 0.02
MOST_IN_VAIN = 2.0
_FADING = 0.98  # of what was usual, with each request
MOST_AT_ONCE_S = 0.5  # twice what is waited for one store that hangs


@dataclass(slots=True)
class Purse:
    """Seconds that requests may still wait for a tier in vain: what fetches have saved, less what
    waiting for them and for answers has cost, and SHARE of what computing takes on top.

    Each wait is bounded by itself; this bounds all of them together, where a tier answers in time
    and never has anything, or has nothing but damage.
    """

    seconds: float = 0.0
    usual_s: float = 0.0  # what computing one of the larger requests took lately
    largest_s: float = 0.0

    def allow(self, compute_s: float) -> bool:
        """Whether one more may wait, which could compute instead in so long."""
        if math.isfinite(compute_s):
            self.usual_s = max(compute_s, self.usual_s * _FADING)
            grown = max(compute_s - self.largest_s, 0.0)
            self.largest_s += grown
            self.add(SHARE * compute_s + MOST_IN_VAIN * grown)
        return self.seconds > 0

    def add(self, seconds: float) -> None:
        """So many were saved, or lost. One wait that was far too long is not held against a tier
        for ever."""
        most = MOST_IN_VAIN * self.usual_s
        self.seconds = max(-most, min(self.seconds + seconds, most))

    def fill(self) -> None:
        """Nothing is known of the tier: as at the start."""
        self.seconds = MOST_IN_VAIN * self.usual_s


@dataclass(slots=True)
class Allowance:
    """Seconds that those who need room may wait for a store to make some: SHARE of the time that
    goes by, and MOST_AT_ONCE_S before that. Where a store takes less than engines make, what it
    cannot take is forgotten, or all would go at its speed."""

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


class FetchPolicy(Enum):
    """BEST_EFFORT fetches what is estimated to be faster than computing, and gives up in time.
    WAIT_COMPLETE fetches all there is, as long as some of it arrives before each deadline.
    DEADLINE fetches, until its time is up."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    DEADLINE = "deadline"


_SURPRISE = 2.0  # times faster or slower than expected
_TICK_S = 0.001  # of uvloop's clock: what takes less has taken nothing, or twice that


@dataclass(slots=True)
class Line:
    """A least-squares line through decaying samples: seconds = fixed + per_unit x units."""

    decay: float = 0.9
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        """One more sample. One that is far off begins anew: a tier that broke, or came back, is
        another tier, and an average over both would be wrong for a long time."""
        if not self.x or self._is_surprise(units, seconds):
            self.weight = self.x = self.y = self.xx = self.xy = 0.0
        for name, value in (
            ("weight", 1.0),
            ("x", units),
            ("y", seconds),
            ("xx", units * units),
            ("xy", units * seconds),
        ):
            setattr(self, name, getattr(self, name) * self.decay + value)

    @property
    def is_known(self) -> bool:
        return self.weight > 0

    def seconds(self, units: float) -> float:
        """What `units` are expected to take; 0 as long as nothing is known."""
        if not self.is_known:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        if not mean_x:
            return mean_y  # nothing ever came: all that is known is how long that took
        if self._is_of_one_size:
            return units * mean_y / mean_x  # no fixed part can be told apart
        slope = (self.xy / self.weight - mean_x * mean_y) / self._spread
        if slope <= 0:
            return mean_y
        fixed = mean_y - slope * mean_x
        return fixed + slope * units if fixed > 0 else units * mean_y / mean_x

    def at_least(self, units: float) -> float:
        """As `seconds`, but as long as the fixed part cannot be told from the rest, with all or
        with nothing of it, whichever is less."""
        expected = self.seconds(units)
        is_open = self.is_known and self._is_of_one_size
        return min(expected, self.y / self.weight) if is_open else expected

    def _is_surprise(self, units: float, seconds: float) -> bool:
        """Until the fixed part can be told from the rest, nothing is that lies between all and
        nothing of it: else small and big ones in turn would begin anew for ever."""
        least, most = self.at_least(units), self.seconds(units)
        if self._is_of_one_size:
            most = max(most, self.y / self.weight)
        return not least / _SURPRISE - _TICK_S < seconds < most * _SURPRISE + _TICK_S

    @property
    def _spread(self) -> float:
        return self.xx / self.weight - (self.x / self.weight) ** 2

    @property
    def _is_of_one_size(self) -> bool:
        return self._spread <= 1e-9 * (self.x / self.weight) ** 2  # that much is rounding


@dataclass(frozen=True, slots=True)
class Decision:
    """fetches: whether to; give_up_s: when to stop waiting and compute, None for never.
    The estimates and the reason are for `explain`."""

    fetches: bool
    give_up_s: float | None
    fetch_s: float
    compute_s: float
    reason: str


# Waiting for a fetch that comes to nothing costs at most this share of what computing takes, but
# for some of the rare tries.
HEDGE = 0.25
# After so many refusals one fetch is tried all the same: a tier that got faster is noticed. It is
# a prime, so that of small and big ones that come in turn not always the same are tried.
PROBE_EVERY = 31
# One of so many tries has as long as computing takes, for a tier that is not HEDGE times as fast.
_PATIENT_EVERY = 5
# How long a request waits for the answer, and then for the bytes, as long as the engine has not
# told its speed, so that nothing can be compared; what came by then is used. In ten times as much,
# an H200 computes 300k tokens (8B model); in less, a machine that stands still is a slow store.
FIRST_TRY_S = 1.0


class Estimator:
    """One tier's path to the device. bytes_per_token: KV bytes of a token. prefill: what computing
    takes, by tokens, which others may look at, too."""

    def __init__(
        self,
        *,
        bytes_per_token: float,
        policy: FetchPolicy,
        deadline_s: float | None = None,
        prefill: Line | None = None,
    ) -> None:
        if policy is FetchPolicy.DEADLINE and deadline_s is None:
            raise ValueError("the deadline policy needs deadline_s")
        self.bytes_per_token = bytes_per_token
        self.policy = policy
        self.deadline_s = deadline_s
        self.transfer = Line()
        self.prefill = prefill or Line()
        self.queued_bytes = 0.0
        self._refused = 0
        self._answers = Line()  # what a question takes, by the tokens that it is about
        self._unasked = 0
        self._purse = Purse()

    def begin_anew(self) -> None:
        """The tier is another one, or has come back: nothing is known of it."""
        self.transfer, self._answers = Line(), Line()
        self._purse.fill()

    def note_wait(self, tokens: int, seconds: float) -> None:
        """A request has waited so long, from its question on, and has so many tokens for it."""
        if self.prefill.is_known:
            self._purse.add(self.prefill.seconds(tokens) - seconds)

    def note_fetch(self, num_bytes: float, seconds: float, *, is_whole: bool = True) -> None:
        """A fetch moved so many bytes in so much time. Of one given up, what it had moved: that is
        news only if it should have taken less. Of nothing at all it was waited for a share of what
        computing takes, and it is taken to be no faster than that."""
        if is_whole or seconds > self.transfer.seconds(num_bytes):
            self.transfer.add(num_bytes, seconds if num_bytes else seconds / HEDGE)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        self.prefill.add(tokens, seconds)

    def note_answer(self, tokens: int, seconds: float, *, in_time: bool) -> None:
        """The tier has said within `seconds` what it has of `tokens`, or was waited for so long in
        vain: then it is taken to need twice that for whatever it is asked."""
        if in_time:
            self._answers.add(tokens, seconds)
        elif seconds > self._answers.seconds(0):
            self._answers.add(0, 2 * seconds)

    def decide_question(self, tokens: int, policy: FetchPolicy | None = None) -> Decision:
        """Whether to ask the tier what it has of `tokens` missing tokens, and how long to wait for
        the answer. Of those for whom it is estimated to come too late, one of PROBE_EVERY asks;
        who can wait for more than twice as long as was waited in vain, at once. Nobody while the
        waits of others have cost more than they brought."""
        compute_s = self.prefill.seconds(tokens)
        patience: float | None = compute_s * HEDGE
        reason = "asked for a share of computing"
        if (policy or self.policy) is not FetchPolicy.BEST_EFFORT:
            patience, reason = None, "asked until the deadline"
        elif not self.prefill.is_known:
            patience, reason = FIRST_TRY_S, "prefill speed not known yet: a try"
        elif not self._purse.allow(compute_s):
            patience, reason = 0.0, "waiting for the tier has cost more than it has saved"
        elif compute_s * HEDGE <= self._answers.at_least(tokens):
            self._unasked += 1
            if self._unasked % PROBE_EVERY:
                patience, reason = 0.0, "the tier did not answer in time"
        return Decision(patience != 0, patience, 0.0, compute_s, reason)

    def decide(self, tokens: int, policy: FetchPolicy | None = None) -> Decision:
        """For a run of `tokens` tokens that the tier has. policy: None for the usual one."""
        compute_s = self.prefill.seconds(tokens)
        fetch_s = self.transfer.seconds(tokens * self.bytes_per_token + self.queued_bytes)
        patience, reason = self._patience(fetch_s, compute_s, policy or self.policy)
        return Decision(patience != 0, patience, fetch_s, compute_s, reason)

    def _patience(  # noqa: PLR0911 - one return for each rule reads best
        self, fetch_s: float, compute_s: float, policy: FetchPolicy
    ) -> tuple[float | None, str]:
        """How long to wait, None for as long as it takes, 0 for not at all; and why."""
        if policy is FetchPolicy.WAIT_COMPLETE:
            return None, "the policy waits for all there is"
        if policy is FetchPolicy.DEADLINE:
            return self.deadline_s, "until the deadline"
        if not self.prefill.is_known:
            return FIRST_TRY_S, "prefill speed not known yet: a try"
        bound = compute_s * HEDGE
        if not self.transfer.is_known:
            return bound, "bandwidth not known yet: a try"
        if fetch_s < compute_s:
            # What is waited for beyond the estimate is lost if it comes to nothing.
            return min(compute_s, fetch_s + bound), "fetching is estimated to be faster"
        self._refused += 1
        if self._refused % PROBE_EVERY == 0:
            is_patient = self._refused // PROBE_EVERY % _PATIENT_EVERY == 0
            return compute_s if is_patient else bound, "a try, whether it is still slower"
        return 0.0, "computing is estimated to be faster"
