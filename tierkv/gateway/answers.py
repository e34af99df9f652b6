"""Failures as one body that both OpenAI's clients and readers of RFC 9457 understand."""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tierkv.api.bodies import REQUEST_ID, REQUEST_ID_HEADER, first_id
from tierkv.api.problems import ERRORS, HTTP_CODES, problem_response
from tierkv.gateway.failures import GatewayError, InvalidRequestError

log = logging.getLogger("tierkv.gateway")

_RETRY_AFTER_S = 1
_MOST_ID = 200  # what nodes get is longer by the number of the call


class OpenAIError(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A problem with the error object that OpenAI's clients look for."""

    title: str
    status: int
    detail: str
    code: str
    request_id: str
    error: OpenAIError


def failure_of(request: web.Request, error: Exception) -> Failure:
    """What an error means for the caller."""
    if isinstance(error, GatewayError):
        param = error.param if isinstance(error, InvalidRequestError) else None
        return _failure(request, error.status, error.code, error.title, str(error), param=param)
    if isinstance(error, web.HTTPException):
        code = HTTP_CODES.get(error.status, f"http_{error.status}")
        return _failure(request, error.status, code, error.reason, _sentence(request, error))
    for kind, status, code, title in ERRORS:
        if isinstance(error, kind):
            return _failure(request, status, code, title, str(error))
    said = "Something unexpected happened; the log of the gateway has the details."
    return _failure(request, 500, GatewayError.code, GatewayError.title, said)


def _sentence(request: web.Request, error: web.HTTPException) -> str:
    """What is wrong, and what would be right."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body has more than {request.client_max_size} bytes, the most that is taken"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return f"{request.path} does not take {request.method}, only {allowed}"
    if isinstance(error, web.HTTPNotFound):
        return f"there is no {request.path[:_MOST_ID]} here; prompts go to POST /v1/completions"
    return error.reason


def log_if_unexpected(request: web.Request, error: Exception) -> None:
    """A traceback of what can only be a bug of ours."""
    if failure_of(request, error).code == GatewayError.code:
        log.error("request %s failed", request[REQUEST_ID], exc_info=error)


def _failure(
    request: web.Request,
    status: int,
    code: str,
    title: str,
    detail: str,
    *,
    param: str | None = None,
) -> Failure:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    return Failure(
        title=title,
        status=status,
        detail=detail,
        code=code,
        request_id=request[REQUEST_ID],
        error=OpenAIError(message=detail, type=kind, param=param, code=code),
    )


def answer_of(failure: Failure) -> web.Response:
    headers = {REQUEST_ID_HEADER: failure.request_id}
    if failure.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if failure.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return problem_response(failure, failure.status, headers)


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
        answer = answer_of(failure_of(request, error))
        if isinstance(error, web.HTTPMethodNotAllowed):
            answer.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return answer
