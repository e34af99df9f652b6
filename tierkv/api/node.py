"""A node (device, store, cache service and engine), and the base class of its HTTP routes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from tierkv.api.idempotency import Key, Once
from tierkv.api.pins import PinBook
from tierkv.api.prefetches import Prefetches
from tierkv.api.settings import NO_STORAGE, NodeSettings, default_storage_url, masked_url
from tierkv.api.types import GenerateAnswer, PromptBody
from tierkv.cache.keys import MediaItem, Prompt
from tierkv.clock import SystemClock
from tierkv.engine import EngineSpec, NodeEngine
from tierkv.errors import BadRequestError, ConfigError, OwnershipError, ShuttingDownError
from tierkv.gpu import open_device
from tierkv.gpu.protocol import Device
from tierkv.http import bodies
from tierkv.http.callers import PRINCIPAL, Access, Principal, request_name, ticket_name
from tierkv.http.live import LiveFeed
from tierkv.http.problems import NoEngineError, NotReadyError, WrongStateError
from tierkv.http.process import CallUnderWay, Heartbeat, Working
from tierkv.http.route import in_path
from tierkv.kv_hints import HintCounts
from tierkv.ranks.memory import SharedCpuDevice
from tierkv.ranks.ranked import RankedDevice
from tierkv.sched.explain import Explanation, Miss
from tierkv.service import Service
from tierkv.storage.factory import open_guarded_store
from tierkv.storage.protocol import Store
from tierkv.tokenizers import Tokenizer
from tierkv.transfer.tier import StorageOptions, StoreState

if TYPE_CHECKING:
    from tierkv.api.metrics import Metrics
    from tierkv.embed.external import ExternalEngines  # only nodes with an engine socket need it

_MAX_ANSWERS = 1024  # answers of generations kept for repeated calls: 5 bytes per token
_ANSWERS_TTL_S = 300.0


class Node:
    """All parts of a node except its HTTP server.

    Use it inside `running()`, from one event loop.

    Args:
        settings: The settings of all parts.
        device: The device, given by tests; None to open the device that the settings name.
        store: The store, given by tests; None to open the store that the settings name.
        environ: The environment variables, which determine the folder of the default store.
        external: Engines in other processes, which compute instead of an engine of the node; None
            if the node has its own engine.
    """

    def __init__(
        self,
        settings: NodeSettings,
        *,
        device: Device | None = None,
        store: Store | None = None,
        environ: Mapping[str, str] = os.environ,
        external: ExternalEngines | None = None,
    ) -> None:
        self.settings = settings
        self._external = external
        node = settings.node
        self._spec = None if external else settings.engine_spec()
        self.name = node.name or f"{node.role.value}@{node.host}:{node.port}"
        self.device = device or (
            SharedCpuDevice() if self._spec is None else _open_device(settings, self._spec)
        )
        self.service = Service(
            self.device,
            external.sizes.fingerprint
            if external
            else self.spec.fingerprint(settings.cache.tenant),
            settings.cache,
            settings.handoff,
            store or _open_store(settings, environ),
            storage=_storage_options(settings, self._spec),
            name=self.name,
            other_groups=external.sizes.other_groups() if external else (),
            kv_events=settings.events,
        )
        self._engine: NodeEngine | None = None
        if self._spec is not None:
            with self.device.computing():
                self._engine = self._spec.open(self.service)
        self._working = Working(
            lambda: ShuttingDownError(
                f"this node {self._why_ends('was stopped')} before the request was done"
            )
        )
        self.prefetches = Prefetches(self.service)
        self.pins = PinBook(self.service, lambda: asyncio.get_running_loop().time())
        self.hints = HintCounts()
        self.answers: Once[GenerateAnswer] = Once(
            max_answers=_MAX_ANSWERS,
            ttl_s=_ANSWERS_TTL_S,
            now=lambda: asyncio.get_running_loop().time(),
        )
        self.bodies = bodies.BodyReader(settings.node)
        self.heartbeat = Heartbeat()
        self.live = LiveFeed()
        self.started_at = time.time()
        self.has_started = False

    @property
    def has_engine(self) -> bool:
        """True if the node has its own engine, False if engines in other processes compute."""
        return self._engine is not None

    @property
    def engine(self) -> NodeEngine:
        """The node's own engine.

        Raises:
            NoEngineError: The node has no engine of its own, because engines in other processes
                compute.
        """
        if self._engine is None:
            raise _no_engine()
        return self._engine

    @property
    def spec(self) -> EngineSpec:
        """The description of the node's own engine: model identity, layout and tokenizer.

        Raises:
            NoEngineError: The node has no engine of its own, because engines in other processes
                compute.
        """
        if self._spec is None:
            raise _no_engine()
        return self._spec

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the node's own engine; None if engines in other processes compute."""
        return None if self._spec is None else self._spec.tokenizer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open all parts of the node; close them in reverse order when the `async with` block ends.

        At the end, running requests are cancelled, publishes and copies are awaited, and the
        service checks that no block or lease was lost.

        Raises:
            StoreUnavailableError: The store does not answer.
            ConfigError: The store cannot be used.
        """
        external = self._external
        try:
            async with (
                self.service.running(),
                external.running(self.service) if external else self.engine.running(),
                self.prefetches.running(),
                self.heartbeat.running(),
                self.live.running(),
            ):
                self.has_started = True
                try:
                    yield
                finally:
                    self.drain()
                    await self.idle(grace_s=0)
        finally:
            self.device.close()

    async def verify(self) -> list[str]:
        """Check the bookkeeping of blocks and leases; return one sentence for each fault found.

        The blocks of attached engines in other processes are checked too.
        """
        return self.service.verify() if self._external is None else await self._external.verify()

    def check_started(self) -> None:
        """Raise an error if the node is not ready for requests yet.

        Raises:
            NotReadyError: The node is still starting.
        """
        if not self.has_started:
            raise NotReadyError("this node is starting: try again later")

    def prompt(
        self, tokens: bytes, tenant: str, media: Sequence[MediaItem] = (), adapter: str = ""
    ) -> Prompt:
        """Return a `Prompt` of these tokens, for one tenant and one adapter.

        Args:
            tokens: The token ids, as little-endian int32 bytes.
            tenant: The tenant; "" for the node's own.
            media: Images, audio and video of the prompt.
            adapter: Name of the LoRA adapter; "" for none.

        Raises:
            BadRequestError: The placeholder tokens of an item of `media` lie beyond the end of the
                prompt.
        """
        space = self.space(tenant, adapter)
        return Prompt.of(tokens, self.settings.cache.block_size, media, space=space)

    def request_name(self, request_id: str, tenant: str) -> str:
        """Return the scheduler's name for a request, made of the tenant's space and the id.

        The name is unique even if two tenants use the same id.

        Args:
            request_id: The id that the caller gave.
            tenant: The caller's tenant; "" for the node's own.
        """
        return request_name(self.space(tenant), request_id)

    def space(self, tenant: str, adapter: str = "") -> str:
        """Return the name of the space of a tenant and adapter; "" for the node's own space.

        A space is the part of the cache for one fingerprint; different spaces share no blocks.

        Args:
            tenant: The tenant; "" for the node's own.
            adapter: Name of the LoRA adapter; "" for none.
        """
        if not (tenant or adapter):
            return ""
        return self.service.space_of_tenant(tenant or self.settings.cache.tenant, adapter)

    # Work and its end

    @property
    def is_draining(self) -> bool:
        return self.service.is_draining

    def _why_ends(self, words: str) -> str:
        failure = self.service.failure
        return words if failure is None else f"has failed ({failure}) and is shutting down"

    @property
    def num_working(self) -> int:
        return len(self._working)

    def work(self) -> CallUnderWay:
        """Return a context manager that registers one running request.

        A shutdown waits for running requests.

        Raises:
            NotReadyError: The node is still starting.
            ShuttingDownError: The node is shutting down. The context manager also raises this error
                if a shutdown cancels the request.
        """
        self.check_started()
        if self.is_draining:
            raise ShuttingDownError(f"this node {self._why_ends('is shutting down')}")
        return self._working.call()

    def call(self) -> CallUnderWay:
        """Return a context manager whose `with` block counts as a running request.

        A node that shuts down waits for the block and still accepts the call. Use it for calls
        about requests that run already, such as an abort.

        Raises:
            NotReadyError: The node is still starting.
            ShuttingDownError: A shutdown cancelled the block.
        """
        self.check_started()
        return self._working.call()

    def drain(self) -> None:
        """Reject new requests and report not ready; running requests continue."""
        self.service.drain()

    def end_grace(self) -> None:
        """Cancel running publishes, and do not let running requests delay a shutdown any longer.

        If `idle` is waiting for requests, the requests are cancelled now; otherwise a later call of
        `idle` cancels them at once.
        """
        self.service.publishings.give_up()
        self._working.end_grace()

    async def idle(self, *, grace_s: float) -> None:
        """Wait until no request runs; cancel requests that still run after `grace_s` seconds.

        A call of `end_grace` cancels them earlier.
        """
        await self._working.idle(grace_s=grace_s)


def _no_engine() -> NoEngineError:
    return NoEngineError(
        "this node has no model of its own: send the request to an engine that uses "
        "this node (node.engine_socket), or to a node with an engine"
    )


def _open_device(settings: NodeSettings, spec: EngineSpec) -> Device:
    name = settings.node.device
    ranks = settings.cache.tensor_parallel
    if ranks == 1:
        return open_device(name)
    return RankedDevice([open_device(name) for _ in range(ranks)], spec.shards)


def _open_store(settings: NodeSettings, environ: Mapping[str, str]) -> Store | None:
    url = settings.storage.url or default_storage_url(environ)
    if url == NO_STORAGE:
        return None
    return _opener(settings)(url)


def _opener(settings: NodeSettings) -> Callable[[str], Store]:
    return lambda url: open_guarded_store(url, settings.storage, SystemClock())


def _storage_options(settings: NodeSettings, spec: EngineSpec | None) -> StorageOptions:
    storage = settings.storage
    opener = _opener(settings)
    return StorageOptions(
        open=opener,
        tenants={tenant: opener(url) for tenant, url in storage.tenants.items()},
        codecs=storage.codecs(),
        small=storage.small_codec(),
        touches_per_ttl=storage.touches_per_ttl,
        peer_tensor_parallel=storage.peer_tensor_parallel,
        scheme=None if spec is None else spec.shards,
    )


_LONG = 16_384  # tokens, bytes or characters, which take 0.1 ms to pack
P = TypeVar("P", bound=PromptBody)

IDEMPOTENCY_HEADER = "Idempotency-Key"


def principal_of(request: web.BaseRequest) -> Principal:
    """Return the authenticated caller of `request`."""
    return request[PRINCIPAL]


async def explained(node: Node, caller: Principal, prompt: Prompt) -> Explanation:
    """Explain which blocks of a prompt are cached, and why the first missing block is missing.

    Only an admin learns that blocks are cached for another tenant, model or adapter.

    Args:
        node: The node.
        caller: The caller of the route.
        prompt: The prompt to look up.
    """
    is_admin = caller.access >= Access.ADMIN
    deadline_s = node.settings.handoff.lookup_deadline_s
    found = await node.service.explain_with_storage(
        prompt, deadline_s=deadline_s, names_fields=is_admin
    )
    if is_admin or found.reason != Miss.OTHER_FINGERPRINT.value:
        return found
    return msgspec.structs.replace(found, reason=Miss.NEVER_STORED.value, detail="")


@contextmanager
def refused() -> Iterator[None]:
    """Raise as errors of the caller what the service refuses inside the `with`.

    Raises:
        BadRequestError: The service raised a ConfigError: a value of the request is wrong.
        WrongStateError: The service raised an OwnershipError.
    """
    try:
        yield
    except ConfigError as error:
        raise BadRequestError(str(error)) from error
    except OwnershipError as error:
        raise WrongStateError(str(error)) from error


class Routes:
    """The base class of classes with methods that are HTTP routes of a node.

    Args:
        node: The node.
        metrics: The node's metrics, in which answers and times are recorded.
    """

    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics
        self._max_tokens = node.settings.node.max_prompt_tokens

    async def _read_prompt(self, request: web.BaseRequest, kind: type[P]) -> P:
        """Return the request's decoded body, with a long prompt replaced by its packed tokens."""
        return await self._node.bodies.read(request, kind, self._pack)

    def _pack(self, body: P) -> P:
        given = body.tokens if body.prompt is None else body.prompt
        if given is None or len(given) <= _LONG:
            return body
        tokens = body.packed(self._node.tokenizer, self._max_tokens)
        return msgspec.structs.replace(body, prompt=None, tokens=tokens)

    def _request_id(self, request: web.BaseRequest, given: str | None) -> str:
        if given is None:
            given = request.headers.get(IDEMPOTENCY_HEADER)
        return bodies.name_request(request, given)

    def _key(self, request: web.BaseRequest) -> Key:
        return principal_of(request).tenant, bodies.check_id(in_path(request, "id"), "the id")

    def _ticket_name(self, request: web.BaseRequest, ticket_id: str) -> str:
        tenant = principal_of(request).tenant
        return ticket_name(bodies.check_id(ticket_id, "ticket_id"), tenant)

    def _stores(self) -> list[StoreState]:
        """Return the state of each attached store, without secrets."""
        return [
            msgspec.structs.replace(one, url=masked_url(one.url), part=masked_url(one.part))
            for one in self._node.service.storage_state()
        ]

    def _prompt(self, request: web.BaseRequest, body: PromptBody) -> Prompt:
        tokens = body.packed(self._node.tokenizer, self._max_tokens)
        tenant = principal_of(request).tenant
        return self._node.prompt(tokens, tenant, body.media_items(), body.adapter)
