"""The pins of each tenant, as their names and ends; what they hold, the cache knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierkv.api.held import Key
from tierkv.api.refusals import TooManyError, UnknownIdError
from tierkv.cache.keys import Prompt
from tierkv.service import Service

MOST_PINS = 10_000  # of one tenant


@dataclass(frozen=True, slots=True)
class Pin:
    """num_blocks: whole blocks of the prompt that it keeps. ends_at: on the clock of `now`."""

    pin_id: str
    num_blocks: int
    prompt_tokens: int
    is_soft: bool
    ends_at: float


class PinBook:
    """now: a clock that does not go back, the event loop's."""

    def __init__(self, service: Service, now: Callable[[], float]) -> None:
        self._service = service
        self._now = now
        self._pins: dict[str, dict[str, Pin]] = {}

    def put(self, key: Key, prompt: Prompt, ttl_s: float, *, is_soft: bool) -> Pin:
        """Pin what is cached of `prompt`, in place of a pin of the same key. Raises
        TooManyError."""
        tenant, pin_id = key
        pins = self._of(tenant)
        if pin_id not in pins and len(pins) >= MOST_PINS:
            raise TooManyError(f"{MOST_PINS} pins are set")
        num_blocks = self._service.pin(_name(key), prompt, ttl_s, is_soft=is_soft)
        pin = Pin(pin_id, num_blocks, prompt.num_tokens, is_soft, self._now() + ttl_s)
        pins[pin_id] = pin
        self._pins[tenant] = pins
        return pin

    def get(self, key: Key) -> Pin:
        """Raises UnknownIdError."""
        pin = self._of(key[0]).get(key[1])
        if pin is None:
            raise UnknownIdError(f"there is no pin {key[1]!r}")
        return pin

    def remove(self, key: Key) -> Pin:
        """Raises UnknownIdError."""
        pin = self.get(key)
        del self._pins[key[0]][key[1]]
        self._service.unpin(_name(key))
        return pin

    def all_of(self, tenant: str) -> list[Pin]:
        return list(self._of(tenant).values())

    def _of(self, tenant: str) -> dict[str, Pin]:
        """Those whose time is not over."""
        now = self._now()
        pins = {key: pin for key, pin in self._pins.get(tenant, {}).items() if pin.ends_at > now}
        if tenant in self._pins:
            self._pins[tenant] = pins
        return pins


def _name(key: Key) -> str:
    return f"{len(key[0])}:{key[0]}:{key[1]}"  # no two keys have the same
