"""The routes of a node's life cycle, drain, pause, sleep and wake, and of its event stream."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec
from aiohttp import hdrs, web

from tierkv.api.routes import Routes
from tierkv.api.types import LifeAnswer, SleepBody, WakeBody
from tierkv.errors import BadRequestError, ConfigError, OwnershipError, ShuttingDownError
from tierkv.http.bodies import EVENT_STREAM, event_stream, open_stream, write
from tierkv.http.callers import Access
from tierkv.http.problems import WrongStateError
from tierkv.http.route import Disconnect, Route
from tierkv.sched.events import CacheEvent
from tierkv.tasks import deadline


class LifeRoutes(Routes):
    @Route("POST", "/v1/drain", Access.ADMIN, answer=LifeAnswer, on_disconnect=Disconnect.DETACH)
    async def drain(self, _: web.BaseRequest) -> LifeAnswer:
        """Take no more work; what runs goes on."""
        self._node.check_started()
        self._node.drain()
        return self._life()

    @Route("POST", "/v1/pause", Access.ADMIN, answer=LifeAnswer, on_disconnect=Disconnect.DETACH)
    async def pause(self, _: web.BaseRequest) -> LifeAnswer:
        """Let new requests wait until /v1/resume."""
        self._node.check_started()
        self._node.service.pause()
        return self._life()

    @Route("POST", "/v1/resume", Access.ADMIN, answer=LifeAnswer, on_disconnect=Disconnect.DETACH)
    async def resume(self, _: web.BaseRequest) -> LifeAnswer:
        """Admit requests again."""
        self._node.check_started()
        if self._node.service.is_asleep:
            raise WrongStateError("the device sleeps: wake it")
        self._node.service.unpause()
        return self._life()

    def _life(self) -> LifeAnswer:
        service = self._node.service
        return LifeAnswer(
            is_draining=self._node.is_draining,
            is_paused=service.scheduler.is_paused,
            is_asleep=service.is_asleep,
            running_requests=len(service.scheduler.running_requests),
            waiting_requests=service.scheduler.num_waiting,
            open_requests=self._node.desk.num_open,
        )

    @Route(
        "POST", "/v1/sleep", Access.ADMIN, body=SleepBody, answer=LifeAnswer, is_body_optional=True
    )
    async def sleep(self, request: web.BaseRequest) -> LifeAnswer:
        """Give the device's memory back until /v1/wake; requests wait."""
        async with self._node.work():
            body = await self._read_optional(request, SleepBody)

            def late() -> WrongStateError:
                running = len(self._node.service.scheduler.running_requests)
                return WrongStateError(
                    f"{running} requests and the pins still held blocks after {body.deadline_s:g} s"
                )

            try:
                async with deadline(body.deadline_s, late):
                    await self._node.service.sleep(keeps_blocks=body.keep_blocks)
            except OwnershipError as error:
                raise WrongStateError(str(error)) from error
        return self._life()

    @Route(
        "POST", "/v1/wake", Access.ADMIN, body=WakeBody, answer=LifeAnswer, is_body_optional=True
    )
    async def wake(self, request: web.BaseRequest) -> LifeAnswer:
        """Take device memory again, and admit requests."""
        async with self._node.work():
            body = await self._read_optional(request, WakeBody)
            try:
                await self._node.service.wake(body.device_blocks)
            except OwnershipError as error:
                raise WrongStateError(str(error)) from error
            except ConfigError as error:
                raise BadRequestError(str(error)) from error
        return self._life()


_ID = re.compile(r"(\d{1,18})-(\d{1,18})")
_QUIET_S = 15.0  # then a comment line tells that the connection is alive
_MOST = 256  # events in one write


class EventRoutes(Routes):
    @Route("GET", "/v1/events", Access.ADMIN, content_type=EVENT_STREAM)
    async def stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """What happens to cached blocks, as server-sent events.

        Each event has an id; a client that comes back with it as Last-Event-ID goes on there.
        `lost` says how many could not be told: ask for /v1/blocks then."""
        node = self._node
        node.check_started()
        if node.is_draining:
            raise ShuttingDownError("this node is shutting down")
        known = _ID.fullmatch(request.headers.get("Last-Event-ID", ""))
        epoch = int(known[1]) if known else None
        number = int(known[2]) if known else 0
        if request.method == hdrs.METH_HEAD:  # a body would be taken for the next answer
            return event_stream(request)
        async with node.feed.reading(epoch, number) as reader:
            response = await open_stream(request)
            told = 0
            with suppress(ConnectionError):
                await write(response, b"retry: 1000\n\n")
                while True:
                    events = await node.feed.next(reader, most=_MOST, timeout_s=_QUIET_S)
                    if events is None:
                        await write(response, b"event: end\ndata: {}\n\n")
                        await response.write_eof()
                        break
                    first = reader.number - len(events) + 1
                    chunk = b"".join(
                        _encode(reader.epoch, number, event)
                        for number, event in enumerate(events, start=first)
                    )
                    if reader.num_lost > told:
                        lost = b'event: lost\ndata: {"events":%d}\n\n' % (reader.num_lost - told)
                        told, chunk = reader.num_lost, lost + chunk
                    await write(response, chunk or b":\n\n")
        return response


def _encode(epoch: int, number: int, event: CacheEvent) -> bytes:
    data = msgspec.json.encode(
        {
            "tier": event.tier,
            "space": event.space,
            "start": event.start,
            "stop": event.stop,
            "digests": [digest.hex() for digest in event.digests],
        }
    )
    kind = event.kind.value.encode()
    return b"id: %d-%d\nevent: %s\ndata: %s\n\n" % (epoch, number, kind, data)
