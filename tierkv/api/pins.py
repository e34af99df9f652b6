"""Pins by tenant and id. A pin protects the cached blocks of a prompt from eviction for a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.api.idempotency import Key
from tierkv.cache.keys import Prompt
from tierkv.http.problems import TooManyError, UnknownIdError
from tierkv.service import Service

MAX_PINS = 10_000  # per tenant


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin, which protects the cached blocks of a prompt from eviction until a given time.

    Attributes:
        pin_id: Id of the pin, unique in its tenant.
        num_blocks: Number of the prompt's leading blocks that are pinned. A tail is never pinned.
        prompt_tokens: Number of tokens of the prompt.
        is_soft: True if the blocks may be evicted after all blocks without a pin; False if they may
            not be evicted at all.
        ends_at: Time at which the pin ends, in seconds of the monotonic clock given to `PinBook`.
    """

    pin_id: str
    num_blocks: int
    prompt_tokens: int
    is_soft: bool
    ends_at: float


class PinBook:
    """The pins of all callers, by tenant and id.

    The blocks of a session's last turn (one prompt and its answer) are pinned here too.

    Args:
        service: The service whose blocks are pinned.
        now: A monotonic clock, in seconds.

    Attributes:
        num_kept_turns: Number of session turns with blocks that were pinned.
        num_other_turns: Number of session turns with blocks that were not pinned, because the
            tenant had too many pins or the time of the pin was 0.
    """

    def __init__(self, service: Service, now: Callable[[], float]) -> None:
        self._service = service
        self._now = now
        self._pins: dict[str, dict[str, Pin]] = {}
        # In the order of `ends_at`, because a node keeps all turns for the same time.
        self._sessions: OrderedDict[Key, Pin] = OrderedDict()
        self.num_kept_turns = 0
        self.num_other_turns = 0

    def put(self, key: Key, prompt: Prompt, ttl_s: float, *, is_soft: bool) -> Pin:
        """Pin the cached blocks of `prompt`, in place of an earlier pin with the same key.

        Args:
            key: Tenant and id of the pin.
            prompt: The prompt whose cached blocks are pinned.
            ttl_s: Seconds until the pin ends.
            is_soft: True to let the blocks be evicted after all blocks without a pin.

        Raises:
            TooManyError: The tenant has `MAX_PINS` other pins.
        """
        tenant, pin_id = key
        pins = self._pins.setdefault(tenant, {})
        if len(pins) >= MAX_PINS and pin_id not in pins and len(self.all_of(tenant)) >= MAX_PINS:
            raise TooManyError(
                f"{MAX_PINS} pins are set, the maximum: remove one, or wait until one expires"
            )
        num_blocks = self._service.pin(_name(key), prompt, ttl_s, is_soft=is_soft)
        pin = Pin(pin_id, num_blocks, prompt.num_tokens, is_soft, self._now() + ttl_s)
        pins[pin_id] = pin
        self._sessions.pop(key, None)
        return pin

    def keep_turn(self, key: Key, prompt: Prompt, ttl_s: float) -> None:
        """Pin the blocks of a session's last turn softly, and end the pin of the turn before.

        If the tenant already has MAX_PINS pins of other sessions or requests, no pin is set, and no
        error is raised.

        Args:
            key: Tenant and id of the session.
            prompt: Prompt and answer of the turn.
            ttl_s: Seconds until the pin ends; 0 to leave all pins unchanged.
        """
        try:
            if ttl_s > 0:
                self._sessions[key] = self.put(key, prompt, ttl_s, is_soft=True)
                self.num_kept_turns += 1
                return
        except TooManyError:
            pass
        self.num_other_turns += 1

    def count_sessions(self) -> int:
        """Return the number of sessions that have a pinned last turn now."""
        now = self._now()
        while self._sessions:
            (tenant, pin_id), pin = next(iter(self._sessions.items()))
            if pin.ends_at > now:
                break
            del self._sessions[tenant, pin_id]
            if self._pins[tenant].get(pin_id) is pin:
                del self._pins[tenant][pin_id]
        return len(self._sessions)

    def get(self, key: Key) -> Pin:
        """Return the pin that was put under `key`, the tenant and the pin's id.

        Raises:
            UnknownIdError: There is no such pin, or it has ended.
        """
        pin = self._pins.get(key[0], {}).get(key[1])
        if pin is None or pin.ends_at <= self._now():
            raise UnknownIdError(f"there is no pin {key[1]!r}")
        return pin

    def remove(self, key: Key) -> Pin:
        """Remove the pin of `key` and return it; its blocks may be evicted from now on.

        Raises:
            UnknownIdError: There is no such pin, or it has ended.
        """
        pin = self.get(key)
        del self._pins[key[0]][key[1]]
        self._sessions.pop(key, None)
        self._service.unpin(_name(key))
        return pin

    def all_of(self, tenant: str) -> list[Pin]:
        """Return the tenant's pins that have not ended."""
        now, pins = self._now(), self._pins.get(tenant, {})
        for pin_id in [pin_id for pin_id, pin in pins.items() if pin.ends_at <= now]:
            del pins[pin_id]
        return list(pins.values())


def _name(key: Key) -> str:
    return f"{len(key[0])}:{key[0]}:{key[1]}"  # unique, even if an id has a colon
