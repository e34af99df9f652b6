"""A node computes with whatever engine its settings name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.api.nodes import Client, settings
from tests.gateway.scripted import in_front
from tierkv import engines
from tierkv.api.node import Node
from tierkv.api.server import listening
from tierkv.cache.keys import Fingerprint, Prompt, pack, unpack
from tierkv.cache.layout import Layout, attention_layout
from tierkv.cache.shards import ShardScheme
from tierkv.clock import SystemClock
from tierkv.engine import EngineStats, GenerateRequest, Generation, Prefilled
from tierkv.engines import EngineTables
from tierkv.errors import BadRequestError
from tierkv.gateway.settings import GatewaySection, GatewaySettings
from tierkv.gpu.cpu import CpuDevice
from tierkv.http.server import bind
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import PublishWait
from tierkv.pd.tickets import Ticket
from tierkv.sched.request import RequestSpec
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.tokenizers import Messages, TextDecoder

WORDS = ("<end>", "one", "two", "three", "four")


class WordDecoder:
    """Words with a space between: what a token adds depends on the token before it."""

    def __init__(self) -> None:
        self._has_begun = False

    def feed(self, token: int) -> str:
        space, self._has_begun = " " if self._has_begun else "", True
        return space + WORDS[token]

    def rest(self) -> str:
        return ""


class WordTokenizer:
    vocab_size = len(WORDS)
    stop_tokens = frozenset([0])

    def encode(self, text: str) -> bytes:
        try:
            return pack([WORDS.index(word) for word in text.split()])
        except ValueError as error:
            raise BadRequestError(f"not a word of this model: {error}") from error

    def encode_chat(self, messages: Messages) -> bytes:
        return self.encode(" ".join(message["content"] for message in messages))

    def fewest_tokens(self, text: str) -> int:
        return 0

    def decode(self, tokens: Iterable[int]) -> str:
        decoder = WordDecoder()
        return "".join(decoder.feed(token) for token in tokens)

    def decoder(self, before: bytes) -> TextDecoder:
        return WordDecoder()


class CountingEngine:
    """Counts on from the last word of the prompt, and stops at the last word that there is."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.stats = EngineStats()
        self.is_running = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.is_running = True
        yield
        self.is_running = False

    async def generate(self, job: GenerateRequest) -> Generation:
        return await self._counted(job, job.max_tokens, None)

    async def prefill(
        self, job: GenerateRequest, ticket_id: str, *, waits_for: PublishWait
    ) -> Prefilled:
        return Prefilled(await self._counted(job, 1, ticket_id), None)

    async def decode(
        self,
        job: GenerateRequest,
        ticket_id: str,
        *,
        policy: ClaimPolicy,
        deadline_s: float | None,
    ) -> tuple[Generation, Ticket | None]:
        prompt = Prompt(job.tokens, self._service.settings.block_size, space=job.space)
        spec = RequestSpec(job.request_id, prompt, 0, needs_logits=False)
        session = Session(self._service, spec)
        await session.claim(ticket_id, policy, deadline_s, job.sampling.readable())
        try:
            return self._answer(job, session, job.max_tokens), session.ticket
        finally:
            session.end()

    async def _counted(self, job: GenerateRequest, most: int, ticket_id: str | None) -> Generation:
        assert self.is_running
        prompt = Prompt(job.tokens, self._service.settings.block_size, space=job.space)
        session = Session(self._service, RequestSpec(job.request_id, prompt, 0))
        await session.admit()
        try:
            await session.loaded_or_recovered(10.0)
            await session.commit(job.tokens)
            found = self._answer(job, session, most)
            if ticket_id is not None:
                how = job.sampling.readable()
                await session.publish(ticket_id, found.tokens, sampling=how).published()
            return found
        finally:
            session.end()

    def _answer(self, job: GenerateRequest, session: Session, most: int) -> Generation:
        prompt = unpack(job.tokens).tolist()
        after = [*range(prompt[-1] + 1, len(WORDS))][:most]
        if job.on_tokens is not None:
            job.on_tokens(after)
        return Generation(
            tokens=tuple(after),
            text=WordTokenizer().decode(after),
            prompt_tokens=len(prompt),
            computed_tokens=len(prompt) - session.request.cached_tokens,
            matched=session.matched,
            load_problem=None,
            queue_s=0.0,
            first_token_s=0.0,
            total_s=0.0,
            finish_reason="stop" if len(after) < most else "length",
        )


class CountingSpec:
    takes_media = False
    takes_adapters = False
    tokenizer = WordTokenizer()

    def __init__(self, cache: CacheSettings) -> None:
        self._cache = cache

    @property
    def layout(self) -> Layout:
        return attention_layout(
            num_layers=2,
            num_kv_heads=1,
            head_dim=4,
            dtype="float16",
            item_bytes=2,
            block_size=self._cache.block_size,
        )

    @property
    def shards(self) -> ShardScheme:
        return ShardScheme(self.layout, {"key": 1, "value": 1})

    def fingerprint(self, tenant: str) -> Fingerprint:
        return Fingerprint(model="counting", layout=self.layout, tenant=tenant)

    def open(self, service: Service) -> CountingEngine:
        return CountingEngine(service)


def _counting(_: EngineTables, cache: CacheSettings, __: str, ___: str) -> CountingSpec:
    return CountingSpec(cache)


@asynccontextmanager
async def counting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setitem(engines._ENGINES, "counting", _counting)  # noqa: SLF001 - its own row
    chosen = settings(engine="counting")
    store = MemoryStore(MemorySettings(), SystemClock())
    node = Node(chosen, device=CpuDevice(), store=store)
    async with (
        listening(node, bind(chosen.node)) as url,
        node.running(),
        aiohttp.ClientSession() as session,
    ):
        yield Client(url, session)
        assert node.service.verify() == []


async def test_an_engine_of_another_vocabulary_generates_streams_and_hands_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with counting(monkeypatch) as client:
        version = (await client.get("/version")).body
        assert version["fingerprint"]["model"] == "counting"
        answer = (await client.post("/v1/generate", {"prompt": "one", "max_tokens": 9})).body
        assert (answer["text"], answer["finish_reason"]) == ("two three four", "stop")
        short = (await client.post("/v1/generate", {"prompt": "one", "max_tokens": 2})).body
        assert (short["text"], short["finish_reason"]) == ("two three", "length")
        events = await client.events("/v1/generate", {"prompt": "one", "max_tokens": 9})
        pieces = [text for name, data in events if name == "tokens" for text in data["pieces"]]
        assert pieces == ["two", " three", " four"]
        prompt = "one two " * 9
        await client.post("/v1/prefill", {"prompt": prompt, "ticket_id": "t"})
        claim = {"prompt": prompt, "ticket_id": "t", "max_tokens": 2}
        claimed = (await client.post("/v1/decode", claim)).body
        assert (claimed["text"], claimed["computed_tokens"]) == ("three four", 0)
        refused = await client.post("/v1/generate", {"prompt": "five"})
        assert (refused.status, refused.code) == (400, "bad_request")


async def test_a_gateway_speaks_the_words_of_its_nodes_and_ends_where_their_model_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with counting(monkeypatch) as node:
        front = GatewaySettings(gateway=GatewaySection(both=(node.url,)))
        async with in_front(front) as (gateway, caller):
            chat = {"messages": [{"role": "user", "content": "one two"}]}
            answer = (await caller.ask(chat, "/v1/chat/completions")).body
            assert answer["choices"][0]["message"]["content"] == "three four"
            assert answer["model"] == gateway.model == "counting"
            assert (await caller.ask({"prompt": "five"})).status == 400
            assert [one.num_failures for one in gateway.backend.nodes.all] == [0]
