"""Failures as one body that both OpenAI's clients and readers of RFC 9457 understand."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec.structs import asdict

from tierkv.gateway.failures import InvalidRequestError
from tierkv.http.bodies import REQUEST_ID, first_id
from tierkv.http.problems import (
    Problem,
    headers_of,
    log_if_unexpected,
    problem_of,
    problem_response,
)

_MOST_ID = 200  # what nodes get is longer by the number of the call


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class Failure(Problem, frozen=True, kw_only=True):
    """A problem with the error object that OpenAI's clients look for."""

    error: OpenAIError


def failure_of(request: web.Request, error: Exception) -> Failure:
    """What an error means for the caller."""
    found = problem_of(request, error, what_is_here="prompts go to POST /v1/completions")
    kind = (
        "server_error"
        if found.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        else "invalid_request_error"
    )
    if found.status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    param = error.param if isinstance(error, InvalidRequestError) else None
    told = OpenAIError(message=found.detail, type=kind, param=param, code=found.code)
    return Failure(**asdict(found), error=told)


@web.middleware
async def failure_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, and turn whatever a handler raises into a failure."""
    request[REQUEST_ID] = first_id(request)[:_MOST_ID]
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client has gone: there is nobody to answer
    except Exception as error:  # noqa: BLE001 - what nobody expected is logged
        log_if_unexpected(request, error)
        failure = failure_of(request, error)
        headers = headers_of(error, failure)
        if failure.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return problem_response(failure, headers)
