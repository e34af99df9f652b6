"""How long an engine's request is kept while nobody calls: one that died leaves nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierkv.api.held import Held
from tierkv.errors import OwnershipError

log = logging.getLogger("tierkv.desk")


class Leases:
    """on_expired: called with a request that was not heard of for its `ttl_s`."""

    def __init__(self, on_expired: Callable[[Held], None]) -> None:
        self._on_expired = on_expired

    def renew(self, held: Held) -> None:
        held.expires_at = asyncio.get_running_loop().time() + held.ttl_s
        if held.timer is None:
            self._look_again(held)

    @contextmanager
    def called(self, held: Held) -> Iterator[None]:
        """A call that takes time: the lease does not end under it."""
        held.num_calls += 1
        try:
            yield
        except OwnershipError as error:  # it ended, or was preempted, while the call waited
            raise held.wrong_state() from error
        finally:
            held.num_calls -= 1
            self.renew(held)

    def _look_again(self, held: Held) -> None:
        """Look at the lease when it would end; that it was renewed meanwhile costs nothing."""
        loop = asyncio.get_running_loop()
        held.timer = loop.call_at(held.expires_at, self._look, held)

    def _look(self, held: Held) -> None:
        now = asyncio.get_running_loop().time()
        if held.num_calls:
            held.expires_at = now + held.ttl_s
        if now < held.expires_at:
            self._look_again(held)
            return
        log.warning("request %s was not heard of for %g s: ended", held.key[1], held.ttl_s)
        self._on_expired(held)
