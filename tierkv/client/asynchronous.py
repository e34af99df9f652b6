"""The client for programs with an event loop, with one method for each route of a node."""

from __future__ import annotations

import ssl
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from tierkv.api.types import (
    AbortAnswer,
    BlocksAnswer,
    ConfigAnswer,
    DecodeAnswer,
    DecodeBody,
    GenerateAnswer,
    GenerateBody,
    LifeAnswer,
    LiveAnswer,
    LookupAnswer,
    LookupBody,
    PinAnswer,
    PinBody,
    PinsAnswer,
    PrefetchAnswer,
    PrefetchBody,
    PrefillAnswer,
    PrefillBody,
    QuotaAnswer,
    QuotaBody,
    ReadyAnswer,
    ResetAnswer,
    ResizeBody,
    SleepBody,
    StorageBody,
    TicketAnswer,
    TiersAnswer,
    TokenizeAnswer,
    TokenizeBody,
    VerifyAnswer,
    VersionAnswer,
    WakeBody,
)
from tierkv.client.calls import Calls, Retries, named
from tierkv.client.errors import NotANodeError
from tierkv.client.http import Http
from tierkv.client.streams import TokenStream
from tierkv.observe import Stats
from tierkv.sched.explain import Explanation


class AsyncClient:
    """A client of one node. Enter it with `async with`, and use it for many calls.

    The client keeps connections open between calls. If the node answers with an error, the call
    raises an error of the same class as on the node, which is also a RemoteError. If there is no
    answer, the call raises CallError. A cancelled call closes its connection, and the node ends the
    work of the call as soon as it can.

    Args:
        url: http://host:port, https://host:port, or unix:/path of the node's socket.
        token: A bearer token; None without authentication.
        tls: TLS context for https, made with `client_tls` if the node has its own authority or
            requires a client certificate; None trusts the system's authorities.
        timeout_s: Seconds for a whole call, its retries included. For a stream, seconds until the
            first event, and between two events.
        retries: Number of attempts of a failed call, and the pauses between them; None for the
            default.
        max_connections: Largest number of connections. A call that needs one more waits for a free
            one.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8100",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 60.0,
        retries: Retries | None = None,
        max_connections: int = 100,
    ) -> None:
        http = Http(url, token=token, tls=tls, max_connections=max_connections)
        self._node = Calls(http, timeout_s, retries or Retries())
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._node.running())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    # State of a node

    async def livez(self) -> LiveAnswer:
        """Check that the node is alive: its event loop answers."""
        return await self._node.ask("GET", "/livez", LiveAnswer)

    async def readyz(self) -> ReadyAnswer:
        """Return the health of the node and of each of its parts.

        Raises:
            NotReadyError: The node accepts no requests now.
        """
        return await self._node.ask("GET", "/readyz", ReadyAnswer, query="?verbose")

    async def healthz(self) -> ReadyAnswer:
        """Return the answer of `readyz`, from the path that some load balancers use."""
        return await self._node.ask("GET", "/healthz", ReadyAnswer, query="?verbose")

    async def version(self) -> VersionAnswer:
        return await self._node.ask("GET", "/version", VersionAnswer)

    async def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return (await self._node.ask("GET", "/metrics", bytes)).decode("utf-8", "replace")

    async def stats(self) -> Stats:
        return await self._node.ask("GET", "/v1/stats", Stats)

    async def verify(self) -> VerifyAnswer:
        """Make the node recount its blocks, slots and leases.

        The answer has a sentence for each fault.
        """
        return await self._node.ask("GET", "/v1/verify", VerifyAnswer)

    async def openapi(self) -> dict[str, object]:
        """Return the OpenAPI document of this node's routes.

        Raises:
            NotANodeError: The answer is not a JSON document.
        """
        raw = await self._node.ask("GET", "/openapi.json", bytes)
        try:
            return msgspec.json.decode(raw, type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotANodeError(f"the document cannot be read: {error}", status=200) from error

    # Requests to the node's own model, and lookups of prompts

    async def generate(
        self, body: GenerateBody, *, timeout_s: float | None = None
    ) -> GenerateAnswer:
        """Generate from a prompt, and return the whole answer.

        Args:
            body: The prompt, the number of tokens, and the sampling parameters.
            timeout_s: Seconds for the whole call; None for the client's own limit.
        """
        body = named(replace(body, stream=False))
        return await self._node.ask(
            "POST", "/v1/generate", GenerateAnswer, body=body, timeout_s=timeout_s
        )

    async def prefill(self, body: PrefillBody, *, timeout_s: float | None = None) -> PrefillAnswer:
        """Compute a prompt and the first token of its answer, and publish both for a decode node.

        Args:
            body: The prompt, the ticket's id, and the sampling parameters of the first token.
            timeout_s: Seconds for the whole call; None for the client's own limit.

        Raises:
            HandoffError: The prompt cannot be published.
        """
        body = named(replace(body, stream=False))
        return await self._node.ask(
            "POST", "/v1/prefill", PrefillAnswer, body=body, timeout_s=timeout_s
        )

    async def decode(self, body: DecodeBody, *, timeout_s: float | None = None) -> DecodeAnswer:
        """Claim a prompt that a prefill node has published, and generate from it.

        Args:
            body: The ticket's id, the prompt, the claim policy, and the number of tokens.
            timeout_s: Seconds for the whole call; None for the client's own limit.

        Raises:
            HandoffError: The prompt cannot be claimed.
        """
        body = named(replace(body, stream=False))
        return await self._node.ask(
            "POST", "/v1/decode", DecodeAnswer, body=body, timeout_s=timeout_s
        )

    async def tokenize(self, body: TokenizeBody) -> TokenizeAnswer:
        """Return the tokens of a text or a chat, from the tokenizer of the node's model."""
        return await self._node.ask("POST", "/v1/tokenize", TokenizeAnswer, body=body)

    async def lookup(self, body: LookupBody) -> LookupAnswer:
        """Return the number of cached tokens at the start of a prompt, for each tier."""
        return await self._node.ask("POST", "/v1/lookup", LookupAnswer, body=body)

    async def explain(self, body: LookupBody) -> Explanation:
        """Return the tier of each cached block of a prompt, and the reason of the first miss."""
        return await self._node.ask("POST", "/v1/explain", Explanation, body=body)

    # Streams: async with client.stream_generate(body) as stream: async for tokens in stream: ...

    def stream_generate(
        self, body: GenerateBody
    ) -> AbstractAsyncContextManager[TokenStream[GenerateAnswer]]:
        return self._node.stream("/v1/generate", GenerateAnswer, replace(body, stream=True))

    def stream_prefill(
        self, body: PrefillBody
    ) -> AbstractAsyncContextManager[TokenStream[PrefillAnswer]]:
        """Compute and publish a prompt, and receive its first token before the publish ends.

        The context manager's value is a stream: it yields the first token, and ends with the answer
        once the prompt is published.
        """
        return self._node.stream("/v1/prefill", PrefillAnswer, replace(body, stream=True))

    def stream_decode(
        self, body: DecodeBody
    ) -> AbstractAsyncContextManager[TokenStream[DecodeAnswer]]:
        return self._node.stream("/v1/decode", DecodeAnswer, replace(body, stream=True))

    async def abort(self, name: str) -> AbortAnswer:
        """Abort the request with the id `name`, whether it waits or runs."""
        return await self._node.ask("DELETE", "/v1/requests/{id}", AbortAnswer, name)

    # Prefetches, pins and tickets

    async def prefetch(self, body: PrefetchBody) -> PrefetchAnswer:
        """Start to fetch a prompt's blocks from storage to the host, and return without waiting."""
        return await self._node.ask("POST", "/v1/prefetches", PrefetchAnswer, body=named(body))

    async def prefetch_state(self, name: str) -> PrefetchAnswer:
        return await self._node.ask("GET", "/v1/prefetches/{id}", PrefetchAnswer, name)

    async def cancel_prefetch(self, name: str) -> PrefetchAnswer:
        return await self._node.ask("DELETE", "/v1/prefetches/{id}", PrefetchAnswer, name)

    async def pins(self) -> PinsAnswer:
        """Return all pins of the caller's tenant."""
        return await self._node.ask("GET", "/v1/pins", PinsAnswer)

    async def pin(self, name: str, body: PinBody) -> PinAnswer:
        """Protect the cached blocks of a prompt from eviction for a time.

        Args:
            name: Id of the pin, chosen by the caller. A pin that has this id already is replaced.
            body: The prompt, the seconds, and whether the blocks may be evicted after all others.
        """
        return await self._node.ask("PUT", "/v1/pins/{id}", PinAnswer, name, body)

    async def pin_state(self, name: str) -> PinAnswer:
        return await self._node.ask("GET", "/v1/pins/{id}", PinAnswer, name)

    async def unpin(self, name: str) -> PinAnswer:
        return await self._node.ask("DELETE", "/v1/pins/{id}", PinAnswer, name)

    async def ticket(self, name: str) -> TicketAnswer:
        """Return the state of a ticket (the record of a published prompt), without a wait."""
        return await self._node.ask("GET", "/v1/tickets/{id}", TicketAnswer, name)

    async def forget_ticket(self, name: str) -> TicketAnswer:
        """Delete a ticket, which no node can claim after that.

        The stored blocks that the ticket names stay until they expire.
        """
        return await self._node.ask("DELETE", "/v1/tickets/{id}", TicketAnswer, name)

    # Operation of a node: tiers, quotas, blocks, life cycle

    async def drain(self) -> LifeAnswer:
        """Make the node refuse new requests until its process ends; running requests continue."""
        return await self._node.ask("POST", "/v1/drain", LifeAnswer)

    async def pause(self) -> LifeAnswer:
        """Make new requests wait until `unpause`; running requests continue."""
        return await self._node.ask("POST", "/v1/pause", LifeAnswer)

    async def unpause(self) -> LifeAnswer:
        """Admit requests again, those that have waited since `pause` included."""
        return await self._node.ask("POST", "/v1/resume", LifeAnswer)

    async def sleep(self, body: SleepBody | None = None) -> LifeAnswer:
        """Free the node's device memory until `wake` is called; requests wait until then.

        Args:
            body: Whether to keep blocks, and how long to wait for running requests; None for the
                defaults.
        """
        return await self._node.ask("POST", "/v1/sleep", LifeAnswer, body=body)

    async def wake(self, body: WakeBody | None = None) -> LifeAnswer:
        """Allocate the device's memory again after `sleep`, and admit requests."""
        return await self._node.ask("POST", "/v1/wake", LifeAnswer, body=body)

    async def resize(self, body: ResizeBody) -> TiersAnswer:
        """Change the capacity of the device or host tier while the node runs."""
        return await self._node.ask("POST", "/v1/resize", TiersAnswer, body=body)

    async def reset(self) -> ResetAnswer:
        """Remove from device and host all blocks that no request or pin uses.

        Stored blocks stay.
        """
        return await self._node.ask("POST", "/v1/reset", ResetAnswer)

    async def forget_blocks(self, *, storage: bool = False) -> ResetAnswer:
        """Remove from device and host all blocks that no request or pin uses.

        Args:
            storage: True to delete also all stored blocks of the node's fingerprints, and the
                tickets of their prompts. Other nodes that share the store lose these blocks and
                tickets too.
        """
        query = "?storage=true" if storage else ""
        return await self._node.ask("DELETE", "/v1/blocks", ResetAnswer, query=query)

    async def blocks(self, *, cursor: str | None = None, limit: int = 100) -> BlocksAnswer:
        """Return one page of the list of all tenants' cached blocks.

        Args:
            cursor: Cursor from the page before; None for the first page.
            limit: Largest number of blocks on the page.
        """
        query = {"limit": str(limit)} | ({"cursor": cursor} if cursor is not None else {})
        return await self._node.ask("GET", "/v1/blocks", BlocksAnswer, query=f"?{urlencode(query)}")

    async def config(self) -> ConfigAnswer:
        """Return the node's settings, with secrets masked."""
        return await self._node.ask("GET", "/v1/config", ConfigAnswer)

    async def tiers(self) -> TiersAnswer:
        return await self._node.ask("GET", "/v1/tiers", TiersAnswer)

    async def attach_storage(self, body: StorageBody) -> TiersAnswer:
        return await self._node.ask("PUT", "/v1/tiers/storage", TiersAnswer, body=body)

    async def detach_storage(self) -> TiersAnswer:
        return await self._node.ask("DELETE", "/v1/tiers/storage", TiersAnswer)

    async def set_quota(self, tenant: str, body: QuotaBody) -> QuotaAnswer:
        """Limit the numbers of blocks of a tenant.

        Args:
            tenant: Name of the tenant.
            body: Largest numbers of device and host blocks; None for no limit.
        """
        return await self._node.ask("PUT", "/v1/quotas/{id}", QuotaAnswer, tenant, body)

    async def quota(self, tenant: str) -> QuotaAnswer:
        return await self._node.ask("GET", "/v1/quotas/{id}", QuotaAnswer, tenant)

    async def drop_quota(self, tenant: str) -> QuotaAnswer:
        return await self._node.ask("DELETE", "/v1/quotas/{id}", QuotaAnswer, tenant)
