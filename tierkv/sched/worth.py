"""The choice between fetching from storage and computing, and the measured speeds of both.

A request waits for storage if fetching its missing tokens is estimated to be faster than computing
them, or slower by at most PREFERENCE_S. The wait is limited to twice the estimated fetch time or to
the computing time, whichever is shorter. If computing is faster than the fetch, the limit is the
estimated fetch time. In each case, the limit is extended by 10 % of the computing time and 30 ms.

The speed of storage is kept as two moving averages: the seconds of a round trip, and bytes a
second. Failures of a store are handled by its circuit breaker (`storage/guard.py`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

# Storage is preferred even if a fetch takes this many seconds longer than computing, since the
# engine can then serve other requests. The second value is for claims.
PREFERENCE_S, CLAIM_PREFERENCE_S = 0.02, 0.05
# A request waits longer than estimated by SLACK_SHARE of the computing time plus SLACK_S.
SLACK_S, SLACK_SHARE = 0.03, 0.1
# A request or claim that may compute stops waiting for a store that is silent for this long.
SILENT_S = 1.25
# The pause between two measurements of a tier that is estimated to be slower than computing. A
# claim waits for such a measurement as long as the slack, another request does not wait at all.
TRY_EVERY_S = 2.0
# Assumed speed of an engine before the first measurement, in tokens a second; shortest time, in s.
_UNKNOWN_TOKENS_PER_S, _UNKNOWN_S = 4000.0, 0.1
_PATIENCE = 2.0  # the longest wait for a fetch, in estimated fetch times
_DECAY = 0.7  # weight of earlier measurements when a new one is added
_LINE_DECAY = 0.9  # the same in a `Line`
_FOUND_SHARE = 0.2  # weight of the newest answer in `found_share`
# To measure the engine's speed, the last tokens of some prompts are computed although storage has
# them. The first samples are _SAMPLE_SHARE of the prompt each, a later one is _REACH times as long
# as the longest before it.
_FIRST_SAMPLES, _SAMPLE_SHARE, _REACH = 3, 1 / 64, 4
_MAX_SAMPLES = 6
_MANY_TOKENS = 1024
_MAX_OBSERVED = 64  # samples kept: 64 samples later, one has a weight of 0.9 ** 64 = 0.001
_SURPRISE = 2.0  # a time this many times longer or shorter than expected restarts an average
_TICK_S = 0.001  # resolution of uvloop's clock: a shorter time is measured as 0 or 1 ms
# Seconds that requests may lose by waiting for each other: SHARE of all computing time, and once
# MAX_WASTED times the computing time of the largest request.
SHARE = 0.02
MAX_WASTED = 2.0
_FADING = 0.98  # factor of `usual_s` with each request
# A request waits for another request's blocks longer than estimated by this share of the time to
# compute them.
HEDGE = 0.25


class FetchPolicy(Enum):
    """The time that a request waits for its blocks from storage.

    With BEST_EFFORT, a request waits only while fetching is estimated to be faster than computing.
    With the other policies, a request waits for all blocks: with WAIT_COMPLETE as long as no more
    than `fetch_deadline_s` pass without a new block, with DEADLINE for at most `fetch_deadline_s`
    in total.
    """

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    DEADLINE = "deadline"


@dataclass(slots=True)
class Regret:
    """The seconds that requests can still lose by waiting for blocks of other requests.

    A request that waits for blocks which another request computes loses this time if the blocks do
    not come in time. Every new request adds 2 % of its computing time to the balance. A request
    with the longest computing time so far also adds twice the seconds by which it exceeds the
    longest before. Every successful wait adds the seconds that it saved, and every lost wait
    subtracts its seconds.

    Attributes:
        seconds: the balance, between -2 and 2 times `usual_s`.
        usual_s: largest computing time of the recent requests, in seconds. The value decreases by 2
            % with each smaller request.
        largest_s: computing time of the largest request so far, in seconds.
    """

    seconds: float = 0.0
    usual_s: float = 0.0
    largest_s: float = 0.0

    def allow(self, compute_s: float) -> None:
        """Raise the balance for a new request that needs `compute_s` seconds to compute.

        The balance is the number of seconds that requests may still lose by waiting for each other.
        It rises by 2 % of `compute_s`. If no request before took as long, the balance also rises by
        twice the difference to the longest one.
        """
        if 0 < compute_s < float("inf"):
            self.usual_s = max(compute_s, self.usual_s * _FADING)
            grown = max(compute_s - self.largest_s, 0.0)
            self.largest_s += grown
            self.add(SHARE * compute_s + MAX_WASTED * grown)

    def add(self, seconds: float) -> None:
        """Add to the balance the seconds that a wait for another request's blocks has saved.

        The balance stays between -2 and 2 times `usual_s`, the largest computing time of recent
        requests.

        Args:
            seconds: seconds saved; negative if the wait lost time.
        """
        most = MAX_WASTED * self.usual_s
        self.seconds = max(-most, min(self.seconds + seconds, most))


@dataclass(slots=True)
class Line:
    """A least-squares line through measured times: seconds = fixed part + slope × units.

    A unit is, for example, a token to compute or a byte to transfer.

    Attributes:
        weight: sum of the samples' weights; 0 without a sample.
        x: weighted sum of units.
        y: weighted sum of seconds.
        xx: weighted sum of units².
        xy: weighted sum of units × seconds.
        is_of_one_size: True if all samples have the same number of units; the fixed part is then
            unknown.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    is_of_one_size: bool = False  # all samples have the same units

    def add(self, units: float, seconds: float) -> None:
        """Add the measured time of some work.

        A time of more than twice or less than half of the expected one discards all earlier
        samples, because the speed has changed.

        Args:
            units: amount of work, at least 0.
            seconds: time that the work took.
        """
        least = most = self.seconds(units)
        if self.x and self.is_of_one_size:
            # While the fixed part is unknown, any time between "all fixed" and "nothing fixed" is
            # expected: alternating small and big samples would otherwise always restart.
            mean = self.y / self.weight
            least, most = min(least, mean), max(most, mean)
        is_expected = least / _SURPRISE - _TICK_S < seconds < most * _SURPRISE + _TICK_S
        if not (self.x and is_expected):
            self.weight = self.x = self.y = self.xx = self.xy = 0.0
        self.weight = weight = self.weight * _LINE_DECAY + 1.0
        self.x = x = self.x * _LINE_DECAY + units
        self.y = self.y * _LINE_DECAY + seconds
        self.xx = xx = self.xx * _LINE_DECAY + units * units
        self.xy = self.xy * _LINE_DECAY + units * seconds
        self.is_of_one_size = xx * weight - x * x <= 1e-9 * x * x

    @property
    def is_known(self) -> bool:
        return self.weight > 0

    def seconds(self, units: float) -> float:
        """Return the estimated seconds for `units` units of work; 0 while there is no sample."""
        if not self.weight:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        if not mean_x:
            return mean_y
        if self.is_of_one_size:
            return units * mean_y / mean_x  # the fixed part is unknown
        slope = (self.xy - self.x * mean_y) / (self.xx - self.x * mean_x)
        if slope <= 0:
            return mean_y
        fixed = mean_y - slope * mean_x
        return fixed + slope * units if fixed > 0 else units * mean_y / mean_x

    def at_least(self, units: float) -> float:
        """Return a lower bound of the seconds that `units` units of work take; 0 without a sample.

        The bound is the estimate `seconds(units)`. If all samples had the same number of units, it
        is unknown how the time grows with the units; the bound is then at most the mean time of a
        sample.
        """
        expected = self.seconds(units)
        is_open = self.is_known and self.is_of_one_size
        return min(expected, self.y / self.weight) if is_open else expected


class PrefillSpeed:
    """Estimate of the seconds that the engine needs to compute a number of prompt tokens.

    The estimate is made from samples (measured prefills): the times that the engine reports
    (`note`). Before the first report the samples are the times from a request's admission to the
    commit of its last block (`observe`).

    Attributes:
        is_reported: True once the engine has reported a time itself.
        num_samples: number of samples so far.
        max_tokens: number of tokens of the largest sample in use.
        sample: range of token counts in which the next sample is expected, because a request
            computes stored tokens only to measure the speed (see `sample_tokens`). Empty if no such
            request runs.
    """

    def __init__(self) -> None:
        self._fitted = Line()
        # Samples that are not in the fitted line yet; they are added when it is read.
        self._observed: deque[tuple[int, float]] = deque(maxlen=_MAX_OBSERVED)
        self.is_reported = False
        self.num_samples = 0
        self.max_tokens = 0
        self.sample = range(0)
        self._num_chosen = 0  # samples that `sample_tokens` has chosen

    @property
    def _line(self) -> Line:
        while self._observed:
            self._add(*self._observed.popleft())
        return self._fitted

    @property
    def is_known(self) -> bool:
        return bool(self._observed) or self._fitted.is_known

    def seconds(self, tokens: int) -> float:
        """Return the estimated seconds to compute `tokens` tokens; 0 while no speed is known."""
        return self._line.seconds(tokens)

    def at_least(self, tokens: int) -> float:
        """Return a lower bound of the seconds to compute `tokens` tokens of a prompt.

        Below twice the largest measured number of tokens (`max_tokens`), the bound comes from a
        line fitted to the measured times. Above that, it is half of the line's value, because the
        measured tokens may have been at the end of prompts, where a token takes up to twice as
        long. From four times `max_tokens` on, the bound no longer grows.
        """
        known = self.max_tokens
        seconds = self._line.at_least(min(tokens, _REACH * known))
        return seconds if tokens < _REACH / 2 * known else seconds / 2

    @property
    def seconds_of_one_more(self) -> float:
        """Mean seconds that a token after the first 1,024 adds to a prompt's computing time."""
        return max(self.seconds(2 * _MANY_TOKENS) - self.seconds(_MANY_TOKENS), 0.0) / _MANY_TOKENS

    def sample_tokens(self, tokens: int, fetch_s: float) -> int:
        """Return how many stored tokens a request computes to measure the engine's speed.

        The number is 0 for most requests. Without samples, a node that finds every prompt in
        storage would never learn the engine's speed. The first samples are a few tokens each. Later
        ones are larger, and are chosen only while the choice between fetching and computing is
        uncertain: `fetch_s` lies between the lower bound and the estimate of the computing time.

        Args:
            tokens: number of tokens that storage has and that are on neither device nor host.
            fetch_s: estimated seconds to fetch these tokens.

        Returns:
            The number of tokens at the end of the prompt to compute instead of fetching: 0 to
                `tokens`.
        """
        if self._num_chosen >= _MAX_SAMPLES:
            return 0
        if self.num_samples < _FIRST_SAMPLES:
            sample = int(tokens * _SAMPLE_SHARE)
        elif self.at_least(tokens) < fetch_s <= self.seconds(tokens):
            sample = _REACH * self.max_tokens
        else:
            return 0
        self._num_chosen += 1
        return min(max(sample, 1), tokens)

    def note(self, tokens: int, seconds: float) -> None:
        """Record a prefill time that the engine itself reports.

        These times are more exact than those that tierkv measures. The first report therefore
        discards all times given to `observe`, and later calls of `observe` do nothing.

        Args:
            tokens: number of computed tokens.
            seconds: time that computing took.
        """
        if not self.is_reported:
            self._fitted, self.is_reported = Line(), True
            self._observed.clear()
        self._add(tokens, seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        """Record how long a request took to compute tokens of its prompt.

        The method does nothing if the engine itself has reported such times, which are more exact.

        Args:
            tokens: number of computed tokens.
            seconds: time from the request's admission until its last prompt block was committed,
                including other delays of the engine.
        """
        if not self.is_reported:
            self._observed.append((tokens, seconds))

    def _add(self, tokens: int, seconds: float) -> None:
        line = self._fitted
        self.num_samples += 1
        if tokens in self.sample:
            self.sample = range(0)
            if line.is_known and seconds > _SURPRISE * line.seconds(tokens) + _TICK_S:
                return  # a stall: a small chosen sample counts only if it is fast
        line.add(tokens, seconds)
        begins_anew = line.weight == 1.0
        self.max_tokens = tokens if begins_anew else max(self.max_tokens, tokens)


@dataclass(slots=True)
class TierSpeed:
    """Measured speed of storage, as two moving averages, and counts of running fetches.

    Attributes:
        round_trip_s: mean seconds from a lookup to its answer; 0 while unknown.
        found_share: share of recent lookups that found at least one block, 0 to 1.
        num_tries: number of running fetches that measure storage because its speed is unknown or
            was estimated to be too low.
        num_late: number of running fetches whose request has stopped waiting.
        queued_bytes: bytes of all running fetches.
        arrived_bytes: bytes that have arrived since the start of the node.
        try_at: earliest time of the next fetch that measures storage although computing is
            estimated to be faster, in seconds of the loop's clock.
    """

    round_trip_s: float = 0.0
    found_share: float = 1.0
    num_tries: int = 0
    num_late: int = 0
    queued_bytes: float = 0.0
    arrived_bytes: float = 0.0
    try_at: float = -math.inf
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        """True if the throughput of storage (bytes per second) was measured."""
        return self._seconds > 0

    def forget(self) -> None:
        """Discard all measurements, because the store was replaced or is available again."""
        self.round_trip_s = self._bytes = self._seconds = 0.0
        self.found_share, self.try_at = 1.0, -math.inf

    def transfer_s(self, num_bytes: float) -> float:
        """Return the estimated seconds until `num_bytes` have arrived after all queued bytes.

        While the throughput is unknown, the result is the round trip alone. If no byte arrived in
        any measured transfer, it is infinite.
        """
        if not self._seconds:
            return self.round_trip_s
        if not self._bytes:
            return math.inf
        return self.round_trip_s + (num_bytes + self.queued_bytes) * self._seconds / self._bytes

    def note_answer(self, seconds: float, *, has_found: bool | None = None) -> None:
        """Record how long the store took to answer a lookup.

        Args:
            seconds: time from the lookup to its answer. The average of these times is kept; a time
                below half of the average becomes the new average.
            has_found: True if the store had at least one of the blocks, False if it had none. None
                if the lookup says nothing about how often blocks are found.
        """
        if not self.round_trip_s or seconds < self.round_trip_s / _SURPRISE - _TICK_S:
            self.round_trip_s = max(seconds, 1e-6)
        else:
            self.round_trip_s += (1 - _DECAY) * (seconds - self.round_trip_s)
        if has_found is not None:
            self.found_share += _FOUND_SHARE * (has_found - self.found_share)

    def note_silence(self, seconds: float) -> None:
        """Record that a lookup had no answer within `seconds`.

        `round_trip_s` becomes at least twice that time.
        """
        self.round_trip_s = max(self.round_trip_s, 2 * seconds)

    def note_transfer(self, num_bytes: float, seconds: float) -> None:
        """Record the time of a transfer; large transfers weigh more than small ones.

        A time of more than twice or less than half of the expected one discards all earlier
        transfers.

        Args:
            num_bytes: bytes that have arrived.
            seconds: time of the transfer, one round trip included.
        """
        moving_s = max(seconds - self.round_trip_s, seconds / 10, 1e-6)
        if self._bytes and num_bytes:
            expected_s = num_bytes * self._seconds / self._bytes
            is_expected = moving_s < _SURPRISE * expected_s + _TICK_S
            if not (is_expected and moving_s > expected_s / _SURPRISE - _TICK_S):
                self._bytes = self._seconds = 0.0  # the tier has changed
        self._bytes = self._bytes * _DECAY + num_bytes
        self._seconds = self._seconds * _DECAY + moving_s

    def begin(self, num_bytes: float, now: float) -> Transfer:
        """Count the bytes of a new transfer as queued, so that later estimates include them.

        Args:
            num_bytes: bytes of the transfer.
            now: seconds on the loop's clock.

        Returns:
            The transfer; pass it to `arrived` and `end`.
        """
        transfer = Transfer(num_bytes, now, self.queued_bytes, self.arrived_bytes)
        self.queued_bytes += num_bytes
        return transfer

    def arrived(self, transfer: Transfer, num_bytes: float) -> None:
        """Record the progress of a transfer.

        Args:
            transfer: the transfer, from `begin`.
            num_bytes: number of its bytes that have arrived since its start.
        """
        self.arrived_bytes += num_bytes - transfer.arrived_bytes
        transfer.arrived_bytes = num_bytes

    def end(self, transfer: Transfer, now: float, *, is_late: bool) -> None:
        """End a transfer, and use its bytes and seconds to measure the speed.

        A transfer that ended early, for example with an error, is not used unless `is_late` is
        True.

        Args:
            transfer: the transfer; no more of its bytes will arrive.
            now: seconds on the loop's clock.
            is_late: True if the transfer was ended because it took too long.
        """
        self.queued_bytes -= transfer.num_bytes
        if transfer.arrived_bytes >= transfer.num_bytes or is_late:
            # Bytes queued before this transfer count only if they have arrived.
            by_others = self.arrived_bytes - transfer.arrived_before - transfer.arrived_bytes
            queued = min(transfer.queued_before, by_others)
            self.note_transfer(transfer.arrived_bytes + queued, now - transfer.began)


@dataclass(slots=True)
class Transfer:
    """One running fetch, with the byte counts that measure the speed of storage.

    Attributes:
        num_bytes: bytes to transfer.
        began: start, in seconds of the loop's clock.
        queued_before: bytes of the transfers that were running when this one began.
        arrived_before: bytes of all transfers that had arrived when this one began.
        arrived_bytes: bytes of this transfer that have arrived.
    """

    num_bytes: float
    began: float
    queued_before: float
    arrived_before: float
    arrived_bytes: float = 0.0

    def remaining_s(self, now: float) -> float:
        """Return the estimated seconds until all missing bytes have arrived.

        The estimate assumes the average speed of the transfer so far. Before the first byte, it
        counts one byte as arrived, so the result is very large.
        """
        took_s = now - self.began
        return took_s * (self.num_bytes / max(self.arrived_bytes, 1.0) - 1.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision whether a request waits for storage or computes its missing tokens.

    Attributes:
        wait_s: seconds that the request may wait from now on; 0 to compute at once.
        fetch_s: estimated seconds to fetch the tokens.
        compute_s: estimated seconds to compute the tokens.
        reason: the reason in words, for explanations and logs.
        is_asked: False if storage must not be asked for the tokens at all.
        is_try: True if the fetch is made to measure storage, whose speed is unknown or was
            estimated to be too low.
    """

    wait_s: float
    fetch_s: float
    compute_s: float
    reason: str
    is_asked: bool = True
    is_try: bool = False


@dataclass(slots=True)
class Estimator:
    """The choice between fetching blocks from storage and computing them, on one node.

    The estimator compares the measured speeds of storage and of the engine.

    Attributes:
        bytes_per_token: KV bytes of one token.
        prefill: measured speed at which the engine computes prompts.
        tier: measured speed of storage.
    """

    bytes_per_token: float
    prefill: PrefillSpeed = field(default_factory=PrefillSpeed)
    tier: TierSpeed = field(default_factory=TierSpeed)

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; call only when no fetch runs."""
        queued = self.tier.queued_bytes
        if abs(queued) < 1:
            return []
        return [f"no fetch runs, but {queued:.0f} bytes are counted as queued"]

    def compute_s(self, tokens: int) -> float:
        """Return the estimated seconds to compute `tokens` tokens of a prompt.

        Before the first measurement, a speed of 4,000 tokens a second is assumed, and the result is
        at least 0.1 s.
        """
        if not self.prefill.is_known:
            return max(tokens / _UNKNOWN_TOKENS_PER_S, _UNKNOWN_S)
        return self.prefill.seconds(tokens)

    def judge(
        self, tokens: int, now: float, *, is_answered: bool = False, is_claim: bool = False
    ) -> Decision:
        """Decide whether a request waits for storage, and for how long.

        At most once in 2 seconds, storage is asked although computing is estimated to be faster, to
        measure its speed again.

        Args:
            tokens: number of the prompt's tokens that are on neither device nor host.
            now: seconds on the loop's clock.
            is_answered: True if storage has already confirmed that it has these tokens.
            is_claim: True if a decode node claims a prompt that a prefill node has computed.

        Returns:
            The decision, with its reason.
        """
        tier, compute_s = self.tier, self.compute_s(tokens)
        if is_claim and not self.prefill.is_known:
            compute_s = max(compute_s, SILENT_S)
        share = 1.0 if is_answered or is_claim else tier.found_share
        ask_s = 0.0 if is_answered else tier.round_trip_s
        fetch_s = ask_s + share * tier.transfer_s(tokens * self.bytes_per_token)
        slack_s = SLACK_SHARE * compute_s + SLACK_S
        if tier.num_late and not (is_claim or is_answered):
            reason = "storage is late for another request"
            return Decision(0.0, fetch_s, compute_s, reason, is_asked=False)
        preference_s = CLAIM_PREFERENCE_S if is_claim else PREFERENCE_S
        if fetch_s > share * compute_s + preference_s:
            reason = "computing is estimated to be faster"
            is_try = not is_answered and now >= tier.try_at
            if is_try:
                tier.try_at = now + TRY_EVERY_S
            wait_s = slack_s if is_claim and is_try else 0.0
            return Decision(wait_s, fetch_s, compute_s, reason, is_asked=is_try, is_try=is_try)
        if tier.is_known:
            most_s = ask_s + tier.transfer_s(tokens * self.bytes_per_token)
            wait_s = max(most_s, min(_PATIENCE * most_s, compute_s)) + slack_s
            return Decision(wait_s, fetch_s, compute_s, "fetching is estimated to be faster")
        if tier.num_tries and not (is_claim or is_answered):
            reason = "another request is measuring the speed of storage"
            return Decision(0.0, fetch_s, compute_s, reason, is_asked=False)
        wait_s = max(compute_s, SILENT_S) + slack_s if is_claim else slack_s
        reason = "the speed of storage is not measured yet"
        return Decision(wait_s, fetch_s, compute_s, reason, is_try=True)
