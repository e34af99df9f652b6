"""The routes that compute: generate, prefill and decode, with a complete or a streamed answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from tierkv.api.idempotency import content_of
from tierkv.api.node import Routes, principal_of
from tierkv.api.settings import Role
from tierkv.api.types import (
    AbortAnswer,
    DecodeAnswer,
    DecodeBody,
    GenerateAnswer,
    GenerateBody,
    Logprobs,
    PrefillAnswer,
    PrefillBody,
    SamplingBody,
    TokenizeAnswer,
    TokenizeBody,
    TokensEvent,
    check_length,
    job_of,
    with_texts,
)
from tierkv.cache.keys import Prompt, count, pack
from tierkv.engine import GenerateRequest, Generation, TokenLogprobs
from tierkv.http import bodies
from tierkv.http.bodies import open_stream, write
from tierkv.http.callers import Access
from tierkv.http.problems import UnknownIdError, WrongRoleError, log_if_unexpected, problem_of
from tierkv.http.route import Route
from tierkv.tasks import task_group
from tierkv.tokenizers import AnswerDecoder, Tokenizer


class _Stream:
    """An answer that is sent to one client as server-sent events.

    Tokens wait in this object until the client reads them, so a slow client does not slow the
    engine down.
    """

    def __init__(
        self, request: web.BaseRequest, job: GenerateRequest, tokenizer: Tokenizer
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._decoder = AnswerDecoder(
            tokenizer,
            job.tokens,
            num_answered=job.answered_tokens,
            stops=job.stops,
            min_tokens=job.min_tokens,
        )
        self.response: web.StreamResponse | None = None
        self.scope = asyncio.timeout(None)
        self.connection_error: ConnectionError | None = None
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs | None] = []
        self._changed = asyncio.Event()
        self._is_over = False

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] = (), /) -> None:
        # A request that is computed again repeats its tokens: only later ones are new.
        known = len(self._tokens)
        new = tokens[known:]
        self._logprobs += with_texts(new, logprobs[known:], self._tokenizer) or ()
        self._tokens += new
        self._changed.set()

    def add_all(self, answer: GenerateAnswer) -> None:
        known = len(self._tokens)
        self._tokens += answer.tokens[known:]
        self._logprobs += (answer.logprobs or ())[known:]
        self._changed.set()

    def end(self) -> None:
        self._is_over = True
        self._changed.set()

    async def send(self) -> None:
        sent = 0
        try:
            while not self._is_over or sent < len(self._tokens):
                if new := self._tokens[sent:]:
                    pieces = [self._decoder.feed(token) for token in new]
                    await self._tokens_event(new, pieces, self._logprobs[sent:] or None)
                    sent += len(new)
                else:
                    self._changed.clear()
                    await self._changed.wait()
        except ConnectionError as error:
            self.connection_error = error
            if not self._is_over:
                self.scope.reschedule(asyncio.get_running_loop().time())

    async def done(self, answer: GenerateAnswer | None) -> web.StreamResponse:
        """Send the text that the decoder holds back, and then `answer` as the event "done".

        The data of the event is `null` if `answer` is None.
        """
        if rest := self._decoder.rest():
            await self._tokens_event((), (), rest=rest)
        return await self.event("done", msgspec.json.encode(answer))

    async def _tokens_event(
        self,
        tokens: Sequence[int],
        pieces: Sequence[str],
        logprobs: Sequence[Logprobs | None] | None = None,
        *,
        rest: str = "",
    ) -> None:
        body = TokensEvent(tokens, "".join(pieces) + rest, pieces, logprobs)
        await self.event("tokens", msgspec.json.encode(body))

    async def event(self, event: str, data: bytes) -> web.StreamResponse:
        self.response = self.response or await open_stream(self._request)
        await write(self.response, b"event: %b\ndata: %b\n\n" % (event.encode(), data))
        return self.response


@dataclass(slots=True)
class Answering:
    """A call to generate, prefill or decode, from its start until the answer has been sent.

    Attributes:
        operation: "generate", "prefill" or "decode".
        request_id: Id of the request, as the caller knows it.
        tenant: The caller's tenant; "" for the node's own.
        content: Digest of the call's body, which repeated calls must have too.
        job: The request to the engine.
        prompt: The prompt.
        session_id: Id of the session of the call; None if it has none.
        final: The complete answer; None until this call, or an earlier call with the same id, has
            computed it.
        response: The stream on which the answer was sent; None if the answer is not streamed.
    """

    operation: str
    request_id: str
    tenant: str
    content: bytes
    job: GenerateRequest
    prompt: Prompt
    session_id: str | None
    final: GenerateAnswer | None = None
    response: web.StreamResponse | None = None

    @property
    def result(self) -> web.StreamResponse | GenerateAnswer:
        """The stream on which the answer was sent, or the answer if it is not streamed."""
        found = self.response or self.final
        assert found is not None, "the body of `with` makes it"
        return found


@asynccontextmanager
async def streaming(
    request: web.BaseRequest, answer: Answering, tokenizer: Tokenizer
) -> AsyncIterator[None]:
    """Stream the tokens of `answer.job` to the client while the `async with` block runs.

    If the client disconnects, the block is cancelled. If the block raises an error before a token
    was sent, this context manager raises the error. A later error is sent to the client as the
    event `error`.

    Args:
        request: The HTTP request to answer.
        answer: The call. Its `job` is replaced by one that passes new tokens to the stream, and its
            `response` is set to the stream.
        tokenizer: The tokenizer of the model.

    Raises:
        ConnectionError: The client has disconnected.
    """
    stream = _Stream(request, answer.job, tokenizer)
    answer.job = replace(answer.job, on_tokens=stream.add)
    failure: Exception | None = None
    async with task_group() as tasks:
        tasks.create_task(stream.send(), name="tierkv-stream")
        try:
            async with stream.scope:
                yield
            if answer.final is not None:  # a repeated call sends all tokens at once
                stream.add_all(answer.final)
        except Exception as error:  # noqa: BLE001 - an unexpected error is logged
            failure = error
        finally:
            stream.end()
    if stream.connection_error is not None:
        raise stream.connection_error
    if failure is None:
        answer.response = await stream.done(answer.final)
    elif stream.response is None:
        raise failure
    else:
        log_if_unexpected(request, failure)
        problem = msgspec.json.encode(problem_of(request, failure))
        answer.response = await stream.event("error", problem)
    await answer.response.write_eof()


class WorkRoutes(Routes):
    @Route("POST", "/v1/tokenize", Access.READ, body=TokenizeBody, answer=TokenizeAnswer)
    async def tokenize(self, request: web.BaseRequest) -> TokenizeAnswer:
        """Return the tokens of a text or a chat, made by the model's tokenizer."""
        async with self._node.work():
            tokenizer = self._node.spec.tokenizer
            body = await self._node.bodies.read(request, TokenizeBody)
            tokens = await self._node.bodies.in_thread_if_large(
                body.num_characters, lambda: body.encoded(tokenizer)
            )
            num_tokens = count(tokens)
            check_length(num_tokens, self._max_tokens)
        return TokenizeAnswer(tokens=tokens, num_tokens=num_tokens)

    @Route(
        "POST",
        "/v1/generate",
        Access.WRITE,
        body=GenerateBody,
        answer=GenerateAnswer,
        is_stream=True,
    )
    async def generate(self, request: web.BaseRequest) -> web.StreamResponse | GenerateAnswer:
        """Generate tokens with the node's engine.

        Cached blocks of the prompt are not computed again.
        """
        async with self._node.work():
            body = await self._read_prompt(request, GenerateBody)
            answer = self._asked(
                request, "generate", body, body.max_tokens, uses_cache=body.use_cache
            )
        async with self._answering(request, answer, streams=body.stream):
            if answer.final is None:
                generation = await self._node.engine.generate(answer.job)
                answer.final = self._answer_of(answer, generation)
        return answer.result

    @Route(
        "POST", "/v1/prefill", Access.WRITE, body=PrefillBody, answer=PrefillAnswer, is_stream=True
    )
    async def prefill(self, request: web.BaseRequest) -> web.StreamResponse | GenerateAnswer:
        """Compute a prompt and its first token, and publish the prompt for a decode node."""
        self._check_role(Role.PREFILL)
        async with self._node.work():
            body = await self._read_prompt(request, PrefillBody)
            answer = self._asked(request, "prefill", body)
            ticket_id = answer.request_id if body.ticket_id is None else body.ticket_id
            ticket_name = self._ticket_name(request, ticket_id)
        async with self._answering(request, answer, streams=body.stream):
            if answer.final is None:
                with self._metrics.handing("publish"):
                    prefilled = await self._node.engine.prefill(
                        answer.job, ticket_name, waits_for=body.wait
                    )
                block_size = self._node.settings.cache.block_size
                answer.final = PrefillAnswer.of_prefill(
                    self._answer_of(answer, prefilled.generation), prefilled, ticket_id, block_size
                )
        return answer.result

    @Route("POST", "/v1/decode", Access.WRITE, body=DecodeBody, answer=DecodeAnswer, is_stream=True)
    async def decode(self, request: web.BaseRequest) -> web.StreamResponse | GenerateAnswer:
        """Claim a prompt that a prefill node published, and generate the tokens after it."""
        self._check_role(Role.DECODE)
        async with self._node.work():
            body = await self._read_prompt(request, DecodeBody)
            answer = self._asked(request, "decode", body, body.max_tokens)
            ticket_name = self._ticket_name(request, body.ticket_id)
        async with self._answering(request, answer, streams=body.stream):
            if answer.final is None:
                with self._metrics.handing("claim"):
                    generation, ticket = await self._node.engine.decode(
                        answer.job, ticket_name, policy=body.policy, deadline_s=body.deadline_s
                    )
                answer.final = DecodeAnswer.of_ticket(
                    self._answer_of(answer, generation), body.ticket_id, ticket
                )
        return answer.result

    @Route("DELETE", "/v1/requests/{id}", Access.WRITE, answer=AbortAnswer)
    async def abort(self, request: web.BaseRequest) -> AbortAnswer:
        """Abort a request that waits for blocks or is being computed."""
        async with self._node.call():
            tenant, request_id = self._key(request)
            bodies.name_request(request, request_id)
            if not self._node.service.abort(self._node.request_name(request_id, tenant)):
                raise UnknownIdError(f"there is no request {request_id!r}")
        return AbortAnswer(request_id)

    def _asked(
        self,
        request: web.BaseRequest,
        operation: str,
        body: SamplingBody,
        max_tokens: int = 1,
        *,
        uses_cache: bool = True,
    ) -> Answering:
        tenant = principal_of(request).tenant
        request_id = self._request_id(request, body.request_id)
        prompt = self._prompt(request, body)
        request_name = self._node.request_name(request_id, tenant)
        spec = self._node.spec
        job = job_of(body, spec, request_name, prompt, max_tokens, uses_cache=uses_cache)
        if isinstance(body, GenerateBody):
            job = replace(job, answered_tokens=body.answered_tokens)
        plain = msgspec.structs.replace(body, stream=False, session_id=None, kv_hints=None)
        content = content_of(plain, prompt.tokens)
        session_id = bodies.session_of(request, body.session_id)
        if session_id is not None:
            job = replace(job, session_id=session_id)
        if body.kv_hints is not None:
            self._node.hints.note(body.kv_hints)
        return Answering(operation, request_id, tenant, content, job, prompt, session_id)

    def _keep_turn(self, answer: Answering) -> None:
        if answer.session_id is None or answer.final is None:
            return
        prompt, tokens = answer.prompt, answer.prompt.tokens + pack(answer.final.tokens)
        turn = Prompt(tokens, prompt.block_size, prompt.extras, prompt.space)
        ttl_s = self._node.settings.node.session_ttl_s
        self._node.pins.keep_turn((answer.tenant, answer.session_id), turn, ttl_s)

    @asynccontextmanager
    async def _answering(
        self, request: web.BaseRequest, answer: Answering, *, streams: bool
    ) -> AsyncIterator[None]:
        """Let the caller's `async with` block set `answer.final`, and send it.

        It is already set if an earlier call with the same request id has produced it. With
        `streams`, the answer is sent as server-sent events.
        """
        key = (answer.operation, answer.tenant, answer.request_id)
        async with (
            streaming(request, answer, self._node.spec.tokenizer) if streams else nullcontext(),
            self._node.work(),
            self._node.answers.call(key, answer.content, stays_open=False) as call,
        ):
            answer.final = call.result
            yield
            call.result = answer.final
            self._keep_turn(answer)

    def _answer_of(self, answer: Answering, generation: Generation) -> GenerateAnswer:
        self._metrics.observe(answer.operation, generation)
        return GenerateAnswer.of(answer.request_id, generation, self._node.spec.tokenizer)

    def _check_role(self, needed: Role) -> None:
        mine = self._node.settings.node.role
        if mine not in (needed, Role.BOTH):
            raise WrongRoleError(
                f"this is a {mine.value} node: send the request to a node with the "
                f"role {needed.value} or both"
            )
