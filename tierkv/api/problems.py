"""Every failure as one shape: RFC 9457 problem+json with a code that does not change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

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
from tierkv.api.refusals import (
    AnswerError,
    NotReadyError,
    TooManyError,
    UnknownIdError,
    WrongStateError,
)
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
INTERNAL = (500, "internal_error", "tierkv has a bug")


@web.middleware
async def problem_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, and turn whatever a handler raises into a problem."""
    request[REQUEST_ID] = first_id(request)
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client has gone: there is nobody to answer
    except Exception as error:  # noqa: BLE001 - what nobody expected is logged
        log_if_unexpected(request, error)
        found = problem_of(request, error)
        return problem_response(found, headers_of(error, found) | _challenge(error))


def problem_of(
    request: web.Request,
    error: Exception,
    *,
    what_is_here: str = "GET /openapi.json tells what there is",
) -> Problem:
    """What an error means for the client. What nobody expected is told in no words of its own."""
    row = status, code, title = _row(error)
    if row == INTERNAL:
        detail = "Something unexpected happened; the log has the details."
    elif isinstance(error, web.HTTPException):
        detail = _sentence(request, error, what_is_here)
    else:
        detail = as_given(str(error))
    found = Problem(
        title=title, status=status, detail=detail, code=code, request_id=request[REQUEST_ID]
    )
    # What an error of these kinds carries besides its sentence, so that a client can raise it.
    if isinstance(error, HandoffError):
        return msgspec.structs.replace(found, reason=error.reason)
    if isinstance(error, OutOfBlocksError):
        return msgspec.structs.replace(
            found, tier=error.tier, needed=error.needed, available=error.available
        )
    return found


def _row(error: Exception) -> tuple[int, str, str]:
    """Status, code, title."""
    if isinstance(error, web.HTTPException):
        return error.status, HTTP_CODES.get(error.status, f"http_{error.status}"), error.reason
    if isinstance(error, AnswerError):
        return error.status, error.code, error.title
    for kind, status, code, title in ERRORS:
        if isinstance(error, kind):
            return status, code, title
    return INTERNAL


def _sentence(request: web.Request, error: web.HTTPException, what_is_here: str) -> str:
    """What is wrong, and what would be right."""
    path = request.path[:200]
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body has more than {request.client_max_size} bytes, the most that is taken"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{path} does not take {request.method}, only {_allowed(error)}"
    if isinstance(error, web.HTTPNotFound):
        return f"there is no {path} here; {what_is_here}"
    return f"{request.method} {path}: {error.reason}"


def log_if_unexpected(request: web.Request, error: Exception) -> None:
    """A traceback of what can only be a bug of ours."""
    if _row(error) == INTERNAL:
        log.error("request %s to %s failed", request[REQUEST_ID], request.path, exc_info=error)


def headers_of(error: Exception, found: Problem) -> dict[str, str]:
    headers = {REQUEST_ID_HEADER: found.request_id}
    not_now = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
    if found.status in not_now or found.reason in PASSING_REASONS:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers[hdrs.ALLOW] = _allowed(error)
    return headers


def _allowed(error: web.HTTPMethodNotAllowed) -> str:
    return ", ".join(sorted(error.allowed_methods))


def _challenge(error: Exception) -> dict[str, str]:
    """The header that RFC 6750 asks for."""
    if isinstance(error, UnauthenticatedError):
        why = ', error="invalid_token"' if error.was_given else ""
    elif isinstance(error, ForbiddenError):
        why = ', error="insufficient_scope"'
    else:
        return {}
    return {hdrs.WWW_AUTHENTICATE: f'Bearer realm="tierkv"{why}'}


def problem_response(found: Problem, headers: Mapping[str, str]) -> web.Response:
    """A problem, or one with more to it, on its way."""
    response = web.Response(
        body=msgspec.json.encode(found),
        status=found.status,
        content_type=PROBLEM_JSON,
        headers=headers,
    )
    if found.status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        response.force_close()  # the rest of the body is not read
    return response
