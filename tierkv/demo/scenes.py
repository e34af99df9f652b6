"""The scenes of the demo. Each answer is compared with that of a node that caches nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import msgspec

from tierkv.api.types import DecodeBody, GenerateAnswer, GenerateBody, LookupBody, PrefillBody
from tierkv.cache.keys import unpack
from tierkv.demo.processes import (
    DemoError,
    Fleet,
    FleetAnswer,
    NodeProcess,
    gateway,
    node,
    stop,
    together,
)
from tierkv.demo.prompts import Fields, Prompts
from tierkv.transfer.storage_io import StorageStats

_ATTEMPTS_TO_KILL = 5


@dataclass(frozen=True)
class Scene:
    """The results of one scene.

    Attributes:
        title: what the scene shows.
        prompt_tokens: number of tokens of the prompt.
        matched: numbers of cached prompt tokens, by tier; None if several nodes took part.
        tail_tokens: number of tokens in the prompt's partial last block; 0 if none was handed over.
        moved: numbers of bytes that the node fetched, loaded, offloaded and flushed; None if
            several nodes took part.
        ttft_s, ttft_without_s: seconds to the first token, with the cache and without.
        text: the answer.
        is_identical: True if the node that caches nothing gave the same answer.
        event: a sentence about an event during the scene; "" for none.
    """

    title: str
    prompt_tokens: int
    matched: dict[str, int] | None
    tail_tokens: int
    moved: dict[str, int] | None
    ttft_s: float
    ttft_without_s: float
    text: str
    is_identical: bool
    event: str = ""


class DemoNodes:
    """The nodes of the demo. Use it inside `running()`.

    Attributes:
        prefill: a prefill node that shares only a store with `decode`.
        decode: a decode node that shares only a store with `prefill`.
        single: a node without a shared store, which computes every answer without its cache.
        prefill_2: a prefill node that also shares its memory with `decode_2`.
        decode_2: a decode node that reads blocks from the memory of `prefill_2`.

    Args:
        storage: URL of the store that all nodes except `single` share.
        config: config file of all nodes.
        folder: directory for the nodes' logs.
    """

    def __init__(self, storage: str, config: Path, folder: Path) -> None:
        self._storage = storage
        self._config = config
        self._folder = folder
        self._decode_life = AsyncExitStack()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop_decode)
            started = await together(
                stack.enter_async_context(self._node("prefill", "prefill")),
                stack.enter_async_context(self._node("single", "both", storage="memory://")),
                self._start_decode(),
                stack.enter_async_context(self._node("prefill-2", "prefill", direct="memory")),
                stack.enter_async_context(self._node("decode-2", "decode", direct="memory")),
            )
            self.prefill, self.single, self.decode, self.prefill_2, self.decode_2 = started
            yield

    def _node(
        self, name: str, role: str, storage: str | None = None, direct: str = "off"
    ) -> AbstractAsyncContextManager[NodeProcess]:
        return node(
            name,
            role=role,
            config=self._config,
            storage=storage or self._storage,
            folder=self._folder,
            direct=direct,
        )

    async def _start_decode(self) -> NodeProcess:
        return await self._decode_life.enter_async_context(self._node("decode", "decode"))

    async def restart_decode(self) -> None:
        """Stop the decode node with SIGTERM, and start another with empty device and host tiers.

        Raises:
            DemoError: the old node did not exit with 0, or the new one did not start.
        """
        status = await stop(self.decode.process)
        if status != 0:
            raise DemoError(f"the decode node ended with status {status} on SIGTERM, not 0")
        await self._stop_decode()
        self._decode_life = AsyncExitStack()
        self.decode = await self._start_decode()

    async def _stop_decode(self) -> None:
        await self._decode_life.aclose()

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        """Run a gateway in front of two prefill and two decode nodes."""
        prefill, decode = (self.prefill, self.prefill_2), (self.decode, self.decode_2)
        async with gateway(
            self._folder, prefill=[one.url for one in prefill], decode=[one.url for one in decode]
        ) as front:
            yield Fleet(front, {one.url: one for one in decode})

    async def check_blocks(self) -> None:
        """Check that no block or lease is lost on any running node.

        Raises:
            DemoError: a node has found a fault in its own blocks and leases.
        """
        for where in (self.prefill, self.decode, self.single, self.prefill_2, self.decode_2):
            if where.process.returncode is not None:
                continue
            if findings := (await where.client.verify()).findings:
                raise DemoError(f"{where.url} found inconsistent blocks or leases: {findings}")


class Play:
    """The scenes of the demo, each of which sends prompts to nodes and compares the answers.

    Args:
        nodes: the running nodes.
        prompts: the prompts of all scenes.
        say: prints a line of progress.
    """

    def __init__(self, nodes: DemoNodes, prompts: Prompts, say: Callable[[str], None]) -> None:
        self._nodes = nodes
        self._prompts = prompts
        self._prompt = prompts.first
        self._max_tokens = prompts.max_tokens
        self._say = say
        self._expected_answers: dict[tuple[str | bytes, int], GenerateAnswer] = {}

    async def scenes(self) -> AsyncIterator[Scene]:
        yield await self._hand_off()
        yield await self._direct_hand_off()
        yield await self._device_hit()
        yield await self._host_hit()
        yield await self._storage_hit()
        yield await self._gateway()

    async def _hand_off(self) -> Scene:
        claim, tail_tokens = await self._published(self._nodes.prefill)
        answer = self._nodes.decode.client.decode(claim)
        title = "PD hand-off through storage (direct paths are off)"
        return await self._compare(title, self._prompt, answer, tail_tokens)

    async def _direct_hand_off(self) -> Scene:
        claim, tail_tokens = await self._published(self._nodes.prefill_2)
        node = self._nodes.decode_2
        answer = node.client.decode(claim)
        title = "PD hand-off straight from the prefill node's memory (handoff.direct = memory)"
        scene = await self._compare(title, self._prompt, answer, tail_tokens, at=node)
        num_blocks = (await node.client.stats()).handoff.memory_blocks
        event = f"{num_blocks} blocks came from the prefill node's memory, the rest from storage"
        return replace(scene, event=event)

    async def _published(self, node: NodeProcess) -> tuple[DecodeBody, int]:
        ticket_id = f"demo-{uuid4().hex[:12]}"
        self._say("prefill node: reading the prompt, publishing its blocks and a ticket ...")
        prefilled = await node.client.prefill(PrefillBody(ticket_id=ticket_id, **self._prompt))
        tail_tokens = prefilled.tail_tokens
        self._say(
            f"  {prefilled.num_blocks} blocks in storage, tail of {tail_tokens} tokens included"
        )
        self._say("decode node: claiming the ticket, going on from the second token ...")
        claim = DecodeBody(ticket_id=ticket_id, max_tokens=self._max_tokens, **self._prompt)
        return claim, tail_tokens

    async def _device_hit(self) -> Scene:
        self._follow_up = self._prompts.follow_up(self._last_text)
        self._say("decode node: the next turn of the same conversation ...")
        return await self._generate("Follow-up turn, hits Device", self._follow_up)

    async def _host_hit(self) -> Scene:
        client = self._nodes.decode.client
        self._say(
            "decode node: other prompts arrive until the conversation has left the device ..."
        )
        for number in range(1, 101):
            unrelated = self._prompts.unrelated(number)
            await client.generate(GenerateBody(max_tokens=1, **unrelated))
            where = await client.lookup(LookupBody(**self._follow_up))
            if where.device_tokens == 0:
                break
        self._say(f"  {number} prompts later its blocks are on the host only")
        return await self._generate("After pressure, hits Host", self._follow_up)

    async def _storage_hit(self) -> Scene:
        self._say("decode node: SIGTERM, exit 0, and a fresh start with empty device and host ...")
        await self._nodes.restart_decode()
        return await self._generate("After a restart, hits Storage", self._prompt)

    async def _gateway(self) -> Scene:
        nodes, prompt = self._nodes, self._prompts.through_gateway
        max_tokens, early = self._prompts.gateway_tokens, self._prompts.tokens_before_kill
        given = prompt["prompt"] if "prompt" in prompt else unpack(prompt["tokens"]).tolist()
        self._say("gateway: two prefill and two decode nodes behind one OpenAI-compatible URL ...")
        async with nodes.fleet() as fleet:
            ask = partial(fleet.complete_and_kill, given, max_tokens, tokens_before_kill=early)
            answer = await ask()
            for _ in range(_ATTEMPTS_TO_KILL - 1):
                if answer.killed_after is not None:
                    break
                self._say("  the answer was complete before the node was killed: asking again ...")
                answer = await ask()
            expected = await self._expected(prompt, max_tokens)
        return Scene(
            title="A decode node killed in the middle of an answer",
            prompt_tokens=expected.prompt_tokens,
            matched=None,
            tail_tokens=0,
            moved=None,
            ttft_s=answer.first_token_s,
            ttft_without_s=expected.time_to_first_token_s,
            text=answer.text,
            is_identical=answer.text == expected.text,
            event=_fate(answer, max_tokens),
        )

    async def _generate(self, title: str, prompt: Fields) -> Scene:
        body = GenerateBody(max_tokens=self._max_tokens, **prompt)
        return await self._compare(title, prompt, self._nodes.decode.client.generate(body), 0)

    async def _compare(
        self,
        title: str,
        prompt: Fields,
        asked: Awaitable[GenerateAnswer],
        tail_tokens: int,
        at: NodeProcess | None = None,
    ) -> Scene:
        where = at or self._nodes.decode
        before = await _moved(where)
        answer = await asked
        expected = await self._expected(prompt, self._max_tokens)
        after = await _moved(where)
        self._last_text = answer.text
        return Scene(
            title=title,
            prompt_tokens=answer.prompt_tokens,
            matched=msgspec.to_builtins(answer.matched),
            tail_tokens=tail_tokens,
            moved={leg: after[leg] - before[leg] for leg in after},
            ttft_s=answer.time_to_first_token_s,
            ttft_without_s=expected.time_to_first_token_s,
            text=answer.text,
            is_identical=answer.tokens == expected.tokens,
        )

    async def _expected(self, prompt: Fields, max_tokens: int) -> GenerateAnswer:
        content = prompt["prompt"] if "prompt" in prompt else prompt["tokens"]
        if (content, max_tokens) not in self._expected_answers:
            self._say("single node: computing the same from the first token on, no cache ...")
            body = GenerateBody(max_tokens=max_tokens, use_cache=False, **prompt)
            self._expected_answers[content, max_tokens] = await self._nodes.single.client.generate(
                body
            )
        return self._expected_answers[content, max_tokens]


def _fate(answer: FleetAnswer, max_tokens: int) -> str:
    if answer.killed_after is None:
        return f"no node was killed: {_ATTEMPTS_TO_KILL} answers were complete before that"
    killed = f"the decode node was killed after {answer.killed_after} of {max_tokens} tokens"
    return killed + (", the other one went on" if answer.is_resumed else "")


async def _moved(node: NodeProcess) -> dict[str, int]:
    stats = await node.client.stats()
    storage = stats.storage or StorageStats()
    return {
        "fetched": storage.fetched_bytes,
        "loaded": stats.loaded_bytes,
        "offloaded": stats.offloaded_bytes,
        "flushed": storage.flushed_bytes,
    }
