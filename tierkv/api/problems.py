"""Every failure as one shape: RFC 9457 problem+json with a code that does not change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec.structs import replace

from tierkv.api.access import ForbiddenError, UnauthenticatedError
from tierkv.api.bodies import (
    REQUEST_ID,
    REQUEST_ID_HEADER,
    BodyError,
    BodyTimeoutError,
    MediaTypeError,
    first_id,
)
from tierkv.api.names import as_given
from tierkv.api.refusals import NotReadyError, TooManyError, UnknownIdError, WrongStateError
from tierkv.api.types import FieldError
from tierkv.errors import (
    BadRequestError,
    DeviceFailedError,
    DuplicateRequestError,
    HandoffError,
    OutOfBlocksError,
    RequestAbortedError,
    RequestTooLargeError,
    ShuttingDownError,
    StoreError,
    TierKVError,
    TransferError,
)
from tierkv.pd.ticket import ClaimProblem

log = logging.getLogger("tierkv.api")

PROBLEM_JSON = "application/problem+json"
_RETRY_AFTER_S = 1
# Of hand-offs: another claim may go well, at once or when the prompt is prefilled again.
PASSING_REASONS = frozenset(
    problem.value
    for problem in (
        ClaimProblem.NOT_YET,
        ClaimProblem.PRODUCER_FAILED,
        ClaimProblem.PRODUCER_LOST,
        ClaimProblem.UNAVAILABLE,
    )
)


class WrongRoleError(BadRequestError):
    """This node's role does not include what was asked: ask a node that has it."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """code: stable, for programs. reason: of a hand-off that failed, stable too.

    tier, needed, available: which one has no room, how many blocks were asked for and are there.
    """

    title: str
    status: int
    detail: str
    code: str
    request_id: str
    reason: str | None = None
    tier: str | None = None
    needed: int | None = None
    available: int | None = None


# The first line whose class fits, so subclasses come before their bases.
ERRORS: tuple[tuple[type[TierKVError], int, str, str], ...] = (
    (UnauthenticatedError, 401, "unauthenticated", "This node must know who calls"),
    (ForbiddenError, 403, "forbidden", "This caller may not do this"),
    (BodyError, 400, "malformed_body", "The body cannot be read"),
    (FieldError, 422, "invalid_body", "The body's fields are wrong"),
    (MediaTypeError, 415, "unsupported_media_type", "The body's type is not supported"),
    (BodyTimeoutError, 408, "body_timeout", "The body did not arrive in time"),
    (WrongRoleError, 409, "wrong_role", "Another node does this"),
    (UnknownIdError, 404, "unknown_id", "There is nothing of this id"),
    (TooManyError, 429, "too_many", "There are too many of these"),
    (WrongStateError, 409, "wrong_state", "This cannot be done now"),
    (RequestAbortedError, 409, "aborted", "The request was ended by another call"),
    (DuplicateRequestError, 409, "duplicate_request", "This id is in use"),
    (RequestTooLargeError, 422, "request_too_large", "The request needs more than there is"),
    (BadRequestError, 400, "bad_request", "The request can never succeed"),
    (ShuttingDownError, 503, "shutting_down", "This node takes no more work"),
    (NotReadyError, 503, "not_ready", "This node takes no requests now"),
    (OutOfBlocksError, 503, "out_of_blocks", "There is no room now"),
    (HandoffError, 502, "handoff_failed", "The prompt could not be handed over"),
    (DeviceFailedError, 503, "device_failed", "The device is unusable"),
    (TransferError, 503, "transfer_failed", "Blocks could not be moved"),
    (StoreError, 503, "store_unavailable", "The storage tier does not answer"),
)

HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}


@web.middleware
async def problem_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, and turn whatever a handler raises into a problem."""
    request[REQUEST_ID] = first_id(request)
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _http_problem(request, error)
    except TierKVError as error:
        return known_problem(request, error)
    except ConnectionError:
        raise  # the client has gone: there is nobody to answer
    except Exception:  # a bug of ours: the log gets the traceback, the client one clean answer
        log.exception("request %s to %s failed", request[REQUEST_ID], request.path)
        return internal_problem(request)


_INTERNAL = "Something unexpected happened; the log of this node has the details."


def known_problem(request: web.Request, error: TierKVError) -> web.Response:
    """The answer to an error of ours."""
    for kind, status, code, title in ERRORS:
        if isinstance(error, kind):
            body = Problem(
                title=title,
                status=status,
                detail=as_given(str(error)),
                code=code,
                request_id=request[REQUEST_ID],
            )
            return _answer(_with_facts(body, error), _challenge(error))
    log.error("request %s failed: %s", request[REQUEST_ID], error, exc_info=error)
    return internal_problem(request)


def _with_facts(body: Problem, error: TierKVError) -> Problem:
    """What an error of this kind carries besides its sentence, so that a client can raise it."""
    if isinstance(error, HandoffError):
        return replace(body, reason=error.reason)
    if isinstance(error, OutOfBlocksError):
        return replace(body, tier=error.tier, needed=error.needed, available=error.available)
    return body


def _challenge(error: TierKVError) -> dict[str, str]:
    """The header that RFC 6750 asks for."""
    if isinstance(error, UnauthenticatedError):
        why = ', error="invalid_token"' if error.was_given else ""
    elif isinstance(error, ForbiddenError):
        why = ', error="insufficient_scope"'
    else:
        return {}
    return {"WWW-Authenticate": f'Bearer realm="tierkv"{why}'}


def internal_problem(request: web.Request) -> web.Response:
    """The answer to what nobody expected; the log says more."""
    return problem(request, 500, "internal_error", "tierkv has a bug", _INTERNAL)


def _http_problem(request: web.Request, error: web.HTTPException) -> web.Response:
    code = HTTP_CODES.get(error.status, f"http_{error.status}")
    headers = {}
    detail = f"{request.method} {request.path[:200]}: {error.reason}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        headers["Allow"] = allowed
        detail = f"{request.path[:200]} takes {allowed}"
    elif isinstance(error, web.HTTPNotFound):
        detail = f"there is no {request.path[:200]} here; GET /openapi.json tells what there is"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        detail = error.text or error.reason
    return problem(request, error.status, code, error.reason, detail, headers=headers)


def problem(
    request: web.Request,
    status: int,
    code: str,
    title: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    body = Problem(
        title=title, status=status, detail=detail, code=code, request_id=request[REQUEST_ID]
    )
    return _answer(body, headers or {})


def _answer(body: Problem, headers: Mapping[str, str]) -> web.Response:
    all_headers = {REQUEST_ID_HEADER: body.request_id, **headers}
    not_now = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
    if body.status in not_now or body.reason in PASSING_REASONS:
        all_headers["Retry-After"] = str(_RETRY_AFTER_S)
    return problem_response(body, body.status, all_headers)


def problem_response(body: msgspec.Struct, status: int, headers: Mapping[str, str]) -> web.Response:
    """`body`, a problem of whatever shape, on its way."""
    response = web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type=PROBLEM_JSON,
        headers=headers,
    )
    if status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        response.force_close()  # the rest of the body is not read
    return response
