"""Errors between callers, the gateway and its nodes, named for what the gateway does about them;
and the body of an answer that both OpenAI's clients and readers of RFC 9457 understand."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from aiohttp import web
from msgspec.structs import asdict

from tierkv.errors import TierKVError
from tierkv.http.problems import AnswerError, Problem, problem_of


class GatewayError(AnswerError):
    """An answer to the caller."""


class InvalidRequestError(GatewayError):
    """The caller's request is wrong. param: the field that is, if it is one."""

    status = 400
    code = "invalid_request"
    title = "The request is wrong"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.param = param
        self.status = status or self.status
        self.code = code or self.code


class NoSuchModelError(InvalidRequestError):
    """A model other than the one there is."""

    def __init__(self, asked: str, ours: str) -> None:
        super().__init__(
            f"there is no model {asked!r} here: use {ours!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


class OverloadedError(GatewayError):
    """There is no room, here or at the nodes: try again later."""

    status = 503
    code = "overloaded"
    title = "The gateway is busy"


class TooManyWaitingError(OverloadedError):
    """The queue of waiting prompts is full."""

    status = 429
    code = "too_many_requests"
    title = "Too many requests"


class NoNodesError(GatewayError):
    """No node is left for this request."""

    status = 503
    code = "no_nodes"
    title = "No node can answer"


class GatewayShuttingDownError(GatewayError):
    status = 503
    code = "shutting_down"
    title = "This gateway is shutting down"


class OutOfTimeError(GatewayError):
    status = 504
    code = "deadline_exceeded"
    title = "The deadline passed"


class AttemptError(TierKVError):
    """An attempt at one node came to nothing; another may do better."""


class NodeFailedError(AttemptError):
    """The node died, hung, or answered what no node should: leave it alone for a while."""


class NodeBusyError(AttemptError):
    """The node is well but takes no more now, because it is full or draining."""


class HandoffRefusedError(AttemptError):
    """The node is well, but the prompt cannot be handed over. reason: as the node gave it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class Failure(Problem, frozen=True, kw_only=True):
    """A problem with the error object that OpenAI's clients look for."""

    error: OpenAIError


def failure_of(request: web.BaseRequest, error: Exception) -> Failure:
    """Return the body of the answer to `error`."""
    found = problem_of(request, error, what_is_here="send prompts to POST /v1/completions")
    kind = (
        "server_error"
        if found.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        else "invalid_request_error"
    )
    if found.status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    param = error.param if isinstance(error, InvalidRequestError) else None
    inner = OpenAIError(message=found.detail, type=kind, param=param, code=found.code)
    return Failure(**asdict(found), error=inner)
