"""All that a prompt's way through the gateway needs, and the question who holds a prefix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tierkv.gateway.admission import Admission
from tierkv.gateway.calls import NodeCalls
from tierkv.gateway.failures import AttemptError
from tierkv.gateway.health import probing
from tierkv.gateway.job import Job
from tierkv.gateway.metrics import GatewayMetrics
from tierkv.gateway.nodes import BackendNode, Nodes
from tierkv.gateway.prefixes import PrefixMemory
from tierkv.gateway.routing import Held
from tierkv.gateway.settings import GatewaySettings

_SHORT_PROMPT = 64  # tokens; who holds so few matters less than asking costs


class Backend:
    """Use it inside `running()`. Raises ConfigError if the settings name no usable nodes."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.nodes = Nodes(settings.gateway, settings.health)
        self.calls = NodeCalls(settings, self.nodes)
        self.memory = PrefixMemory()
        self.admission = Admission(settings.limits)
        self.metrics = GatewayMetrics(self.nodes, self.admission)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.calls.running(), probing(self.nodes, self.calls, self.settings.health):
            yield

    async def who_holds(self, job: Job, nodes: Sequence[BackendNode]) -> dict[str, Held]:
        """What each node has of the prompt, by URL: its own word if it comes in time, else what
        we remember."""
        remembered = self.memory.matched(job.tokens, {node.url: node.lives for node in nodes})
        held = {url: Held(near) for url, near in remembered.items()}
        if len(nodes) > 1 and job.num_tokens >= _SHORT_PROMPT:
            async with asyncio.TaskGroup() as tasks:
                asked = {node.url: tasks.create_task(self._ask(node, job)) for node in nodes}
            answers = {url: task.result() for url, task in asked.items()}
            held |= {url: answer for url, answer in answers.items() if answer is not None}
        return held

    async def _ask(self, node: BackendNode, job: Job) -> Held | None:
        try:
            return await self.calls.lookup(node, job)
        except AttemptError:
            return None

    def remember(self, node: BackendNode, tokens: bytes) -> None:
        self.memory.remember(tokens, node.url, node.lives)
