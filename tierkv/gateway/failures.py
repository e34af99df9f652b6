"""Errors that the gateway answers with, and errors of its calls to nodes.

The body of an error answer has both the fields of RFC 9457 and OpenAI's `error` object.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from aiohttp import web
from msgspec.structs import asdict

from tierkv.errors import TierKVError
from tierkv.http.problems import AnswerError, Problem, problem_of


class GatewayError(AnswerError):
    """The base class of errors that the gateway sends to callers."""


class InvalidRequestError(GatewayError):
    """The caller's request is wrong: correct the field that `param` names.

    Args:
        message: What is wrong, and what to do.
        param: Name of the wrong field; None if the error concerns no single field.
        status: HTTP status; None for 400.
        code: Stable code of the error, for programs; None for "invalid_request".
    """

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
    """The request names an unknown model: use the name that `GET /v1/models` lists."""

    def __init__(self, asked: str, ours: str) -> None:
        super().__init__(
            f"there is no model {asked!r} here: use {ours!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


class OverloadedError(GatewayError):
    """All nodes are busy, or the prompt waited too long: retry."""

    status = 503
    code = "overloaded"
    title = "The gateway is busy"


class TooManyWaitingError(OverloadedError):
    """The queue of waiting prompts is full: retry, or add nodes."""

    status = 429
    code = "too_many_requests"
    title = "Too many requests"


class NoNodesError(GatewayError):
    """No node can answer: check the nodes with `tierkv status`."""

    status = 503
    code = "no_nodes"
    title = "No node can answer"


class GatewayShuttingDownError(GatewayError):
    """The gateway is shutting down: use another gateway, or wait for its restart."""

    status = 503
    code = "shutting_down"
    title = "This gateway is shutting down"


class OutOfTimeError(GatewayError):
    """The deadline passed before the answer was complete: allow more time, or fewer tokens."""

    status = 504
    code = "deadline_exceeded"
    title = "The deadline passed"


class AttemptError(TierKVError):
    """A call to a node failed, or no node is available: another attempt may succeed."""


class NodeFailedError(AttemptError):
    """The node died, hung, or sent an unexpected answer.

    The node receives no requests for a while.
    """


class NodeBusyError(AttemptError):
    """The node is healthy, but accepts no further requests, because it is full or shutting down."""


class HandoffRefusedError(AttemptError):
    """A healthy node rejected the hand-off of a prompt from a prefill node to a decode node.

    Attributes:
        reason: The node's reason, a value of `HandoffProblem`.

    Args:
        reason: The node's reason, a value of `HandoffProblem`.
        message: The node's error sentence.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class Failure(Problem, frozen=True, kw_only=True):
    """A body of type `application/problem+json` that also contains OpenAI's `error` object."""

    error: OpenAIError


def failure_of(request: web.BaseRequest, error: Exception) -> Failure:
    """Return the body of the error answer to `request`.

    Args:
        request: The request that failed.
        error: The error that its handler raised.
    """
    found = problem_of(request, error, unknown_path_hint="send prompts to POST /v1/completions")
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
