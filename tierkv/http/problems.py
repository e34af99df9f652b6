"""Error answers, all in one form: RFC 9457 problem+json with a stable code.

`ERRORS` maps each error that a handler raises to its HTTP status. `PROBLEMS` lists the answers to
requests that are not valid HTTP, or that use a part of HTTP that the server does not support.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus

import msgspec
from aiohttp import hdrs, web

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
from tierkv.http.bodies import (
    REQUEST_ID,
    REQUEST_ID_HEADER,
    SERVER,
    BodyError,
    BodyTimeoutError,
    FieldError,
    MediaTypeError,
    TooMuchInWorkError,
)
from tierkv.http.callers import ForbiddenError, UnauthenticatedError, as_given
from tierkv.pd.tickets import HandoffProblem


class UnknownIdError(BadRequestError):
    """The id is unknown, or belongs to another tenant: check the id."""


class WrongStateError(BadRequestError):
    """The state of the node or of the named object does not allow this call: change it first."""


class TooManyError(BadRequestError):
    """The limit of pins or prefetches is reached: remove one, or wait until one ends."""


class NotReadyError(TierKVError):
    """The node accepts no requests now: retry, or use another node."""


class AnswerError(TierKVError):
    """Base class of errors that define their own HTTP error answer.

    Attributes:
        status: HTTP status.
        code: stable name of the error, for programs.
        title: summary of the kind of error, for people.
    """

    status: int
    code: str
    title: str


log = logging.getLogger(__name__)

PROBLEM_JSON = "application/problem+json"
_RETRY_AFTER_S = 1
# Reasons why a hand-off fails because of a producer or a store: another claim may succeed, at once
# or after the prompt is prefilled again.
PASSING_REASONS = frozenset(
    problem.value
    for problem in (
        HandoffProblem.PRODUCER_FAILED,
        HandoffProblem.PRODUCER_LOST,
        HandoffProblem.UNAVAILABLE,
    )
)


class NoEngineError(BadRequestError):
    """The node has no model of its own: send the request to a node or engine that has one."""


class WrongRoleError(BadRequestError):
    """The node's role does not allow the request: use a node with the role that the error names."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of an error answer.

    Attributes:
        title: The kind of the error, in words.
        status: HTTP status.
        detail: What is wrong, with which value, and what to do.
        code: A stable name of the kind of error, for programs.
        request_id: Id of the request, as in the log.
        reason: A stable name of the reason why a hand-off failed; only for failed hand-offs.
        tier: The tier that has too few free blocks; only if a tier has too few.
        needed, available: Number of blocks that the request needs, and number that the tier has.
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


# The first row with a matching class applies, so subclasses come before their bases.
ERRORS: tuple[tuple[type[TierKVError], int, str, str], ...] = (
    (UnauthenticatedError, 401, "unauthenticated", "The caller must authenticate"),
    (ForbiddenError, 403, "forbidden", "The caller's role does not allow this"),
    (BodyError, 400, "malformed_body", "The body cannot be read"),
    (FieldError, 422, "invalid_body", "The body's fields are wrong"),
    (MediaTypeError, 415, "unsupported_media_type", "The body's type is not supported"),
    (BodyTimeoutError, 408, "body_timeout", "The body did not arrive in time"),
    (NoEngineError, 409, "no_engine", "This node has no engine of its own"),
    (WrongRoleError, 409, "wrong_role", "The node's role does not include this"),
    (UnknownIdError, 404, "unknown_id", "The id is unknown"),
    (TooManyError, 429, "too_many", "The limit of such objects is reached"),
    (WrongStateError, 409, "wrong_state", "The object's state does not allow this"),
    (RequestAbortedError, 409, "aborted", "The request was aborted"),
    (DuplicateRequestError, 409, "duplicate_request", "The id is in use"),
    (RequestTooLargeError, 422, "request_too_large", "The request exceeds a limit"),
    (BadRequestError, 400, "bad_request", "The request is wrong"),
    (TooMuchInWorkError, 503, "too_much_in_work", "The memory for bodies is full"),
    (ShuttingDownError, 503, "shutting_down", "This node is shutting down"),
    (NotReadyError, 503, "not_ready", "This node is not ready"),
    (OutOfBlocksError, 503, "out_of_blocks", "A tier has no free blocks"),
    (HandoffError, 502, "handoff_failed", "The prompt could not be handed over"),
    (DeviceFailedError, 503, "device_failed", "The device is unusable"),
    (TransferError, 503, "transfer_failed", "Blocks could not be moved"),
    (StoreError, 503, "store_unavailable", "The storage tier does not answer"),
)

# Reasons why a hand-off fails without a fault of a producer or a store. The status is 503, because
# another claim may succeed, and not 502, which load balancers and alerts take for an outage.
HANDOFF_STATUS = {
    HandoffProblem.OTHER_PROMPT.value: 409,
    HandoffProblem.INCOMPATIBLE.value: 409,
    HandoffProblem.EXPIRED.value: 410,
    HandoffProblem.CLAIMED.value: 410,
    HandoffProblem.NOT_YET.value: 503,
    HandoffProblem.NO_ROOM.value: 503,
    HandoffProblem.LOAD_FAILED.value: 503,
}

HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}
# Errors for bytes that are not valid HTTP for this server.
FRAMING = (web.HTTPVersionNotSupported, web.HTTPExpectationFailed)
INTERNAL = (500, "internal_error", "tierkv has a bug")


def problem_of(
    request: web.BaseRequest,
    error: Exception,
    *,
    unknown_path_hint: str = "GET /openapi.json lists all routes",
) -> Problem:
    """Return the body of the error answer to `request`.

    An error that the table `ERRORS` does not list is a bug. The answer then does not contain the
    error's text, which is only in the log.

    Args:
        request: The request that failed.
        error: The error that its handler raised.
        unknown_path_hint: Words that end the answer to an unknown path, and name the place where
            the routes are listed.
    """
    row = status, code, title = _row(error)
    if row == INTERNAL:
        detail = "An unexpected error happened: the log of this server has the details."
    elif isinstance(error, web.HTTPException):
        detail = _sentence(request, error, unknown_path_hint)
    else:
        detail = as_given(str(error)) or title  # a MemoryError has no text
    found = Problem(
        title=title, status=status, detail=detail, code=code, request_id=request[REQUEST_ID]
    )
    # With these fields, a client can raise the same error.
    if isinstance(error, HandoffError):
        return msgspec.structs.replace(found, reason=error.reason)
    if isinstance(error, OutOfBlocksError):
        return msgspec.structs.replace(
            found, tier=error.tier, needed=error.needed, available=error.available
        )
    return found


def _row(error: Exception) -> tuple[int, str, str]:
    if isinstance(error, web.HTTPException):
        return error.status, HTTP_CODES.get(error.status, f"http_{error.status}"), error.reason
    if isinstance(error, AnswerError):
        return error.status, error.code, error.title
    if isinstance(error, MemoryError):  # one body was too large; its memory is free again
        error = TooMuchInWorkError(
            "this process has no memory for the request now: send it again later"
        )
    for kind, status, code, title in ERRORS:
        if isinstance(error, kind):
            if isinstance(error, HandoffError):
                status = HANDOFF_STATUS.get(error.reason, status)  # noqa: PLW2901 - a more exact status
            return status, code, title
    return INTERNAL


def _sentence(request: web.BaseRequest, error: web.HTTPException, unknown_path_hint: str) -> str:
    path = request.path[:200]
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return (
            f"the body has more than {request.client_max_size} bytes, the maximum: make it smaller"
        )
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{path} does not support {request.method}: use {_allowed(error)}"
    if isinstance(error, web.HTTPNotFound):
        return f"there is no route {path}: {unknown_path_hint}"
    return f"{request.method} {path}: {error.reason}"


def log_if_unexpected(request: web.BaseRequest, error: Exception) -> None:
    """Log an error that has no row in `ERRORS`, with its traceback; such an error is a bug.

    Args:
        request: The request that failed.
        error: The error that its handler raised.
    """
    if _row(error) == INTERNAL:
        path = request.path[:200]
        log.error("request %s to %s failed", request[REQUEST_ID], path, exc_info=error)


def problem_headers(error: Exception, found: Problem) -> dict[str, str]:
    """Return the headers of an error answer: request id, Retry-After, Allow and WWW-Authenticate.

    Args:
        error: The error that the handler raised.
        found: The body of the answer.
    """
    headers = {REQUEST_ID_HEADER: found.request_id}
    not_now = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
    if found.status in not_now or found.reason in PASSING_REASONS:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers[hdrs.ALLOW] = _allowed(error)
    if (why := _challenge(error, found)) is not None:
        headers[hdrs.WWW_AUTHENTICATE] = f'Bearer realm="tierkv"{why}'
    return headers


def _allowed(error: web.HTTPMethodNotAllowed) -> str:
    return ", ".join(sorted(error.allowed_methods))


def _challenge(error: Exception, found: Problem) -> str | None:
    if found.status == HTTPStatus.UNAUTHORIZED:
        is_new = isinstance(error, UnauthenticatedError) and not error.was_given
        return "" if is_new else ', error="invalid_token"'
    return ', error="insufficient_scope"' if isinstance(error, ForbiddenError) else None


def fail(
    request: web.BaseRequest,
    error: Exception,
    make_problem: Callable[[web.BaseRequest, Exception], Problem] = problem_of,
) -> web.Response:
    """Return the error answer to `request`, and log the error if it is a bug of tierkv.

    Args:
        request: The request that failed.
        error: The error that its handler raised.
        make_problem: Function that returns the body of the answer.
    """
    log_if_unexpected(request, error)
    if isinstance(error, FRAMING):
        return framing_problem(error.status, request[REQUEST_ID])
    found = make_problem(request, error)
    return problem_response(found, problem_headers(error, found))


def problem_response(found: Problem, headers: Mapping[str, str]) -> web.Response:
    """Return the HTTP response with an error body.

    Args:
        found: The body, a `Problem` or a type derived from it.
        headers: Headers besides Content-Type and Server.
    """
    response = web.Response(
        body=msgspec.json.encode(found),
        status=found.status,
        headers={"Content-Type": PROBLEM_JSON, "Server": SERVER, **headers},
    )
    if found.status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        response.force_close()  # the rest of the body is not read
    return response


# status: code, title, detail. Details never quote the client's bytes.
PROBLEMS = {
    400: ("malformed_request", "This is not HTTP", "The request's head or body cannot be read."),
    414: ("uri_too_long", "The request line is too long", "Shorten the path and query."),
    415: (
        "unsupported_media_type",
        "The body's encoding is not supported",
        "Send the body as it is, or with Content-Encoding gzip or deflate.",
    ),
    417: (
        "unknown_expectation",
        "Unknown expectation",
        "The header Expect may only be 100-continue.",
    ),
    431: ("headers_too_large", "The headers are too large", "Send fewer or shorter headers."),
    500: ("internal_error", "tierkv has a bug", "The log of this node has the details."),
    505: ("http_version_not_supported", "Another version of HTTP", "Speak HTTP/1.1 or HTTP/1.0."),
}


def framing_problem(status: int, request_id: str) -> web.Response:
    """Return the response to malformed or unsupported HTTP. The connection is closed after it.

    Args:
        status: HTTP status, a key of `PROBLEMS`; any other status becomes 500.
        request_id: Id of the request in the answer and the log.
    """
    if status not in PROBLEMS:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    code, title, detail = PROBLEMS[status]
    body = Problem(title=title, status=status, detail=detail, code=code, request_id=request_id)
    response = problem_response(body, {REQUEST_ID_HEADER: request_id})
    response.force_close()
    return response
