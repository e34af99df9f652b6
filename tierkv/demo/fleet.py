"""The last scene's cast: a gateway, and decode nodes of which one is killed while it answers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp

from tierkv.demo.processes import DemoError, NodeProcess

_RUNNING = "tierkv_gateway_node_requests"
_RESUMED = 'tierkv_gateway_routed_total{how="resumed"}'
_ANSWER_S = 300.0
_TOKENS_BEFORE = 20  # that have arrived when the node is killed


@dataclass(frozen=True)
class FleetAnswer:
    """first_token_s: from the call to the first text, as the caller saw it."""

    text: str
    first_token_s: float
    event: str


class Fleet:
    """decode: the decode nodes by URL, as the gateway knows them."""

    def __init__(self, gateway: NodeProcess, decode: Mapping[str, NodeProcess]) -> None:
        self._gateway = gateway
        self._decode = decode

    async def complete_and_kill(self, prompt: str, max_tokens: int) -> FleetAnswer:
        """Have the gateway answer, and kill (SIGKILL) the decode node that is at it when some
        tokens have come. Raises DemoError if the answer does not come whole."""
        started = time.monotonic()
        first_token_s, text, event = 0.0, "", "no decode node was answering when looked at"
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        try:
            async for piece in self._pieces(body):
                first_token_s = first_token_s or time.monotonic() - started
                before, text = len(text), text + piece
                if before < _TOKENS_BEFORE <= len(text) and (at_it := await self._at_it()):
                    at_it.process.kill()
                    await at_it.process.wait()
                    event = f"the decode node was killed after {len(text)} of {max_tokens} tokens"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise DemoError(f"the gateway at {self._gateway.url} failed: {error}") from error
        if await self._metric(_RESUMED):
            event += ", the other one went on"
        return FleetAnswer(text, first_token_s, event)

    async def _pieces(self, body: Mapping[str, object]) -> AsyncIterator[str]:
        url = self._gateway.url + "/v1/completions"
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(url, json=body) as response,
        ):
            if response.content_type != "text/event-stream":
                raise DemoError(f"the gateway answered {response.status}: {await response.text()}")
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                piece = json.loads(data) if data else {}
                if "error" in piece:
                    raise DemoError(f"the gateway gave up: {piece['error']['message']}")
                for choice in piece.get("choices", ()):
                    yield choice["text"]
        raise DemoError("the gateway broke off its answer")

    async def _at_it(self) -> NodeProcess | None:
        """The decode node that works for the gateway right now."""
        for url, node in self._decode.items():
            if await self._metric(f'{_RUNNING}{{node="{url}"}}'):
                return node
        return None

    async def _metric(self, name: str) -> float:
        lines = (await self._gateway.client.metrics()).splitlines()
        values = [line.removeprefix(name) for line in lines if line.startswith(f"{name} ")]
        return float(values[0]) if values else 0.0
