"""Does the work of an id once: who asks again, at the same time or later, gets the first result."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import xxhash

from tierkv.api.types import PromptBody
from tierkv.errors import DuplicateRequestError, TierKVError

T = TypeVar("T")


def content_of(body: PromptBody, tokens: bytes) -> bytes:
    """A digest of all that a body asks for, whatever form its tokens and its id came in."""
    rest = msgspec.structs.replace(body, prompt=None, tokens=None, request_id=None)
    digest = xxhash.xxh3_128(tokens)
    digest.update(repr(rest).encode())  # no encoder: a seed may be an integer of any size
    return digest.digest()


@dataclass(slots=True)
class _Entry(Generic[T]):
    content: bytes
    outcome: asyncio.Future[T]
    forgotten_at: float = 0.0


class Once(Generic[T]):
    """Results by key. One is kept while it is open, and for `ttl_s` seconds after `let_go`, unless
    `most` newer ones have been let go since.

    A failure is not kept: the next call tries again. now: a clock that does not go back.
    """

    def __init__(self, *, most: int, ttl_s: float, now: Callable[[], float]) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._now = now
        self._open: dict[Hashable, _Entry[T]] = {}
        self._past: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self.num_repeats = 0  # that were answered with what another call had brought about

    def __len__(self) -> int:
        return len(self._open) + len(self._past)

    async def do(
        self,
        key: Hashable,
        content: bytes,
        work: Callable[[], Awaitable[T]],
        *,
        stays_open: bool = True,
    ) -> T:
        """The result of `work`, which runs if there is none yet for `key`.

        content: a digest of what is asked for. stays_open: the result stands for something that
        ends with `let_go`. Raises DuplicateRequestError if the same key was
        used for something else, and what `work` raises. If who runs it is cancelled, one of those
        that wait runs it instead.
        """
        while (known := self._find(key)) is not None:
            if known.content != content:
                raise DuplicateRequestError("another request with other content has this id")
            if not known.outcome.done():
                await asyncio.wait([known.outcome])
            if not known.outcome.cancelled():
                result = known.outcome.result()
                self.num_repeats += 1
                return result
        entry: _Entry[T] = _Entry(content, asyncio.get_running_loop().create_future())
        self._open[key] = entry
        try:
            made = await work()
        except TierKVError as error:
            self._drop(key)
            entry.outcome.set_exception(error)
            entry.outcome.exception()  # seen: it is raised here too
            raise
        except BaseException:  # the first caller has gone: one of those who wait does it
            self._drop(key)
            entry.outcome.cancel()
            raise
        entry.outcome.set_result(made)
        if not stays_open:
            self.let_go(key)
        return made

    def let_go(self, key: Hashable) -> None:
        """The result of `key` need not be kept for long any more."""
        entry = self._open.pop(key, None)
        if entry is None:
            return
        entry.forgotten_at = self._now() + self._ttl_s
        self._past[key] = entry
        self._forget()

    def find(self, key: Hashable) -> T | None:
        """The result of `key`, None if there is none, or none yet."""
        known = self._find(key)
        if known is None or not known.outcome.done() or known.outcome.cancelled():
            return None
        return known.outcome.result()

    def _drop(self, key: Hashable) -> None:
        self._open.pop(key, None)
        self._past.pop(key, None)

    def _find(self, key: Hashable) -> _Entry[T] | None:
        self._forget()
        return self._open.get(key) or self._past.get(key)

    def _forget(self) -> None:
        past, now = self._past, self._now()
        while past:
            oldest = next(iter(past))  # all live equally long, so the first is the first to go
            if len(past) <= self._most and past[oldest].forgotten_at > now:
                return
            del past[oldest]
