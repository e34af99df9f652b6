"""A node: device, store, cache service and engine, put together and kept alive in order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from enum import Enum

from tierkv.api.settings import NO_STORAGE, NodeSettings, default_storage_url
from tierkv.cache.fingerprint import Fingerprint
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, ShuttingDownError, StoreUnavailableError, TierKVError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Device
from tierkv.refmodel.engine import ReferenceEngine
from tierkv.refmodel.model import ReferenceModel
from tierkv.service import Service
from tierkv.storage.factory import open_store
from tierkv.storage.protocol import Store

_PING_DEADLINE_S = 1.0

DEVICES: dict[str, Callable[[], Device]] = {"cpu": CpuDevice}


class Health(Enum):
    """What a probe sees of one dependency, or of the node as a whole."""

    OK = "ok"
    DEGRADED = "degraded"  # answers are right, but slower than they could be
    DOWN = "down"


class NotReadyError(TierKVError):
    """The node cannot answer this now: ask again, or another one."""


class Node:
    """Everything behind the HTTP interface. Use it inside `running()`, from one event loop.

    device, store: for tests; the settings name them otherwise.
    """

    def __init__(
        self,
        settings: NodeSettings,
        *,
        device: Device | None = None,
        store: Store | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.settings = settings
        node, model = settings.node, settings.model
        self.name = node.name or f"{node.role.value}@{node.host}:{node.port}"
        self.store = store or _open_store(settings, environ)
        self.device = device or _open_device(node.device)
        layout = model.layout(settings.cache.block_size)
        self.service = Service(
            self.device,
            Fingerprint(
                model=model.name,
                revision=model.weights_id,
                layout=layout,
                tenant=settings.cache.tenant,
            ),
            settings.cache,
            settings.handoff,
            self.store,
            name=self.name,
        )
        self.engine = ReferenceEngine(
            self.service, ReferenceModel(model, settings.cache.block_size), settings.engine
        )
        self.has_started = False
        self._work: set[asyncio.Timeout] = set()
        self._changed = asyncio.Event()  # a work has ended, or there is a hurry
        self._is_hurried = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens all. At the end cuts off what work there still is, waits for publishes and copies,
        checks the books, closes all.

        Raises StoreUnavailableError or ConfigError if the store cannot be used.
        """
        try:
            async with self.service.running(), self.engine.running():
                self.has_started = True
                try:
                    yield
                finally:
                    self.drain()
                    await self.idle(grace_s=0)
        finally:
            self.device.close()

    def check_started(self) -> None:
        """Raise NotReadyError if there is nothing to ask yet."""
        if not self.has_started:
            raise NotReadyError("this node has not started yet")

    # Work and its end

    @property
    def is_draining(self) -> bool:
        return self.service.is_draining

    @property
    def num_working(self) -> int:
        return len(self._work)

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """One request's work. Raises ShuttingDownError once draining, and in the middle of the
        work when its time is up."""
        self.check_started()
        if self.is_draining:
            raise ShuttingDownError("this node is shutting down")
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._work.add(scope)
                try:
                    yield
                finally:
                    self._work.discard(scope)
                    self._changed.set()
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise ShuttingDownError("this node was stopped before the request was done") from error

    def drain(self) -> None:
        """Be unready, and take no more work; what runs goes on."""
        self.service.drain()

    def hurry(self) -> None:
        """Wait for nobody's work any more, publishes included."""
        self._is_hurried = True
        self.engine.stop_publishing()
        self._changed.set()

    async def idle(self, *, grace_s: float) -> None:
        """Return when no work is left: all done, or cut off after `grace_s` or a `hurry`."""
        try:
            async with asyncio.timeout(grace_s):
                while self._work and not self._is_hurried:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        for scope in self._work:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        while self._work:
            self._changed.clear()
            await self._changed.wait()

    # Health

    async def health(self) -> dict[str, tuple[Health, str]]:
        """Each dependency with its state and a word on it. A store that is down only slows a node,
        since computing is a right answer too."""
        parts = {"service": self._service_health()}
        if self.store is None:
            parts["storage"] = (Health.OK, "no storage tier")
            return parts
        try:
            async with asyncio.timeout(_PING_DEADLINE_S):
                await self.store.ping()
            parts["storage"] = (Health.OK, self.store.url)
        except TimeoutError:
            parts["storage"] = (Health.DEGRADED, f"{self.store.url} does not answer")
        except StoreUnavailableError as error:
            parts["storage"] = (Health.DEGRADED, str(error))
        return parts

    def _service_health(self) -> tuple[Health, str]:
        if not self.has_started:
            return Health.DOWN, "this node has not started yet"
        if self.is_draining:
            return Health.DOWN, "this node is shutting down"
        return Health.OK, "takes requests"


def _open_device(name: str) -> Device:
    if name not in DEVICES:
        raise ConfigError(f"there is no device {name!r}; known here: {', '.join(sorted(DEVICES))}")
    return DEVICES[name]()


def _open_store(settings: NodeSettings, environ: Mapping[str, str]) -> Store | None:
    url = settings.storage.url or default_storage_url(environ)
    if url == NO_STORAGE:
        return None
    return open_store(url, settings.storage.of_kinds(), SystemClock())
