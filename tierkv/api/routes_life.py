"""The routes of a node's life cycle: drain, pause and resume, sleep and wake."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.refusals import WrongStateError
from tierkv.api.route import Disconnect, Route
from tierkv.api.routes_base import Routes
from tierkv.api.types_node import LifeAnswer, SleepBody, WakeBody
from tierkv.errors import BadRequestError, ConfigError, OwnershipError
from tierkv.tasks import deadline


class LifeRoutes(Routes):
    def routes(self) -> list[Route]:
        return [
            _post("/v1/drain", self.drain, "Take no more work; what runs goes on."),
            _post("/v1/pause", self.pause, "Let new requests wait until /v1/resume."),
            _post("/v1/resume", self.resume, "Admit requests again."),
            Route(
                method="POST",
                path="/v1/sleep",
                handler=self.sleep,
                access=Access.ADMIN,
                summary="Give the device's memory back until /v1/wake; requests wait.",
                body=SleepBody,
                answer=LifeAnswer,
                is_body_optional=True,
            ),
            Route(
                method="POST",
                path="/v1/wake",
                handler=self.wake,
                access=Access.ADMIN,
                summary="Take device memory again, and admit requests.",
                body=WakeBody,
                answer=LifeAnswer,
                is_body_optional=True,
            ),
        ]

    async def drain(self, request: web.Request) -> web.Response:
        self._node.check_started()
        self._node.drain()
        return self._life(request)

    async def pause(self, request: web.Request) -> web.Response:
        self._node.check_started()
        self._node.service.pause()
        return self._life(request)

    async def resume(self, request: web.Request) -> web.Response:
        self._node.check_started()
        if self._node.service.is_asleep:
            raise WrongStateError("the device sleeps: wake it")
        self._node.service.unpause()
        return self._life(request)

    def _life(self, request: web.Request) -> web.Response:
        service = self._node.service
        return bodies.answer(
            request,
            LifeAnswer(
                is_draining=self._node.is_draining,
                is_paused=service.scheduler.is_paused,
                is_asleep=service.is_asleep,
                running_requests=len(service.scheduler.running_requests),
                waiting_requests=service.scheduler.num_waiting,
                open_requests=self._node.desk.num_open,
            ),
        )

    async def sleep(self, request: web.Request) -> web.Response:
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
        return self._life(request)

    async def wake(self, request: web.Request) -> web.Response:
        async with self._node.work():
            body = await self._read_optional(request, WakeBody)
            try:
                await self._node.service.wake(body.device_blocks)
            except OwnershipError as error:
                raise WrongStateError(str(error)) from error
            except ConfigError as error:
                raise BadRequestError(str(error)) from error
        return self._life(request)


def _post(path: str, handler: Handler, summary: str) -> Route:
    return Route(
        method="POST",
        path=path,
        handler=handler,
        access=Access.ADMIN,
        summary=summary,
        answer=LifeAnswer,
        on_disconnect=Disconnect.DETACH,
    )
