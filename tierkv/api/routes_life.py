"""The routes of a node's life cycle: drain, pause and resume, sleep and wake."""

from __future__ import annotations

from aiohttp import web

from tierkv.api.access import Access
from tierkv.api.refusals import WrongStateError
from tierkv.api.route import Disconnect, Route
from tierkv.api.routes_base import Routes
from tierkv.api.types_node import LifeAnswer, SleepBody, WakeBody
from tierkv.errors import BadRequestError, ConfigError, OwnershipError
from tierkv.tasks import deadline


class LifeRoutes(Routes):
    @Route("POST", "/v1/drain", Access.ADMIN, answer=LifeAnswer, on_disconnect=Disconnect.DETACH)
    async def drain(self, _: web.Request) -> LifeAnswer:
        """Take no more work; what runs goes on."""
        self._node.check_started()
        self._node.drain()
        return self._life()

    @Route("POST", "/v1/pause", Access.ADMIN, answer=LifeAnswer, on_disconnect=Disconnect.DETACH)
    async def pause(self, _: web.Request) -> LifeAnswer:
        """Let new requests wait until /v1/resume."""
        self._node.check_started()
        self._node.service.pause()
        return self._life()

    @Route("POST", "/v1/resume", Access.ADMIN, answer=LifeAnswer, on_disconnect=Disconnect.DETACH)
    async def resume(self, _: web.Request) -> LifeAnswer:
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
    async def sleep(self, request: web.Request) -> LifeAnswer:
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
    async def wake(self, request: web.Request) -> LifeAnswer:
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
