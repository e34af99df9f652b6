"""Results of HTTP calls by request id: a repeated call gets the result of the first call."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import xxhash

from tierkv.api.types import PromptBody
from tierkv.errors import DuplicateRequestError, TierKVError

T = TypeVar("T")

Key = tuple[str, str]  # tenant, id


def content_of(body: PromptBody, tokens: bytes) -> bytes:
    """Return a digest of a call's body, to check that a repeated call has the same content.

    The digest does not depend on the request id, or on whether the prompt is given as text or
    tokens.

    Args:
        body: The body of the call.
        tokens: The prompt's token ids, as little-endian int32 bytes.
    """
    rest = msgspec.structs.replace(body, prompt=None, tokens=None, request_id=None)
    digest = xxhash.xxh3_128(tokens)
    digest.update(repr(rest).encode())  # msgspec's encoders fail for a seed above 64 bits
    return digest.digest()


@dataclass(slots=True)
class _Entry(Generic[T]):
    """The result of a call with an idempotency key, or a pending future while the call runs.

    Attributes:
        content: Digest of the call's content; another call with the same key must have the same.
        expires_at: Time at which the result is removed, in seconds of the clock of `Once`; 0 before
            `Once.release`.
    """

    content: bytes
    outcome: asyncio.Future[T]
    expires_at: float = 0.0


@dataclass(slots=True)
class OnceCall(Generic[T]):
    """One call with an idempotency key, yielded by `Once.call`.

    Attributes:
        result: The result of an earlier call with the same key. If it is None, there is no such
            result: the `with` block of `Once.call` must compute the result and set it here.
    """

    result: T | None = None


class Once(Generic[T]):
    """A cache of results by key: of all calls with the same key, one computes the result.

    A result is kept until `ttl_s` seconds after `release` is called for its key. If the call that
    computes fails, nothing is kept, and the next call with the key computes.

    Args:
        max_answers: Largest number of released results that are kept; the oldest are removed first.
        ttl_s: Seconds for which a released result is kept.
        now: A monotonic clock, in seconds.
    """

    def __init__(self, *, max_answers: int, ttl_s: float, now: Callable[[], float]) -> None:
        self._max_answers = max_answers
        self._ttl_s = ttl_s
        self._now = now
        self._open: dict[Hashable, _Entry[T]] = {}
        self._past: OrderedDict[Hashable, _Entry[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._past)

    @asynccontextmanager
    async def call(
        self, key: Hashable, content: bytes, *, stays_open: bool = True
    ) -> AsyncIterator[OnceCall[T]]:
        """Provide the result for `key`, from an earlier call or from the `async with` block.

        If an earlier call with this key is still computing, this call waits for its result before
        the block runs. If the earlier call is cancelled, one of the waiting calls computes the
        result instead.

        Args:
            key: The key of the result.
            content: A digest of the call's content, which must be the same in all calls with this
                key.
            stays_open: True to keep the result until `release` is called; False to release it when
                the block ends.

        Yields:
            The call. Its `result` is the earlier call's result. If it is None, the block must
                compute the result and set it.

        Raises:
            DuplicateRequestError: An earlier call with this key had other content.
            TierKVError: An earlier call, for which this call waited, failed with this error.
        """
        while (known := self._find(key)) is not None:
            if known.content != content:
                raise DuplicateRequestError(
                    "this id was used for a request with another body: use a new id, or "
                    "send the same body"
                )
            if not known.outcome.done():
                await asyncio.wait([known.outcome])
            if not known.outcome.cancelled():
                result = known.outcome.result()
                yield OnceCall(result)
                return
        entry: _Entry[T] = _Entry(content, asyncio.get_running_loop().create_future())
        self._open[key] = entry
        call: OnceCall[T] = OnceCall()
        try:
            yield call
            assert call.result is not None, "the body sets it"
        except TierKVError as error:
            del self._open[key]
            entry.outcome.set_exception(error)
            entry.outcome.exception()  # marks the error as retrieved: it is raised below, too
            raise
        except BaseException:  # the first caller disconnected: a waiting call does the work
            del self._open[key]
            entry.outcome.cancel()
            raise
        entry.outcome.set_result(call.result)
        if not stays_open:
            self.release(key)

    def release(self, key: Hashable) -> None:
        """Let the result of `key` expire, `ttl_s` seconds from now.

        If more than `max_answers` released results are kept, the oldest ones are removed earlier.
        """
        entry = self._open.pop(key, None)
        if entry is None:
            return
        entry.expires_at = self._now() + self._ttl_s
        self._past[key] = entry
        self._expire()

    def find(self, key: Hashable) -> T | None:
        """Return the result of `key`; None if there is none, or if a call is still computing it."""
        known = self._find(key)
        return known.outcome.result() if known is not None and known.outcome.done() else None

    def _find(self, key: Hashable) -> _Entry[T] | None:
        self._expire()
        return self._open.get(key) or self._past.get(key)

    def _expire(self) -> None:
        past, now = self._past, self._now()
        while past:
            oldest = next(iter(past))  # all have the same lifetime
            if len(past) <= self._max_answers and past[oldest].expires_at > now:
                return
            del past[oldest]
