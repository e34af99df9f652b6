"""Problems for what never becomes a request: bad HTTP, or a connection too many."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from aiohttp import web

from tierkv.api.bodies import REQUEST_ID, REQUEST_ID_HEADER
from tierkv.api.problems import PROBLEM_JSON, Problem, problem_response

SERVER = "tierkv"  # in every answer: aiohttp would tell its version, and Python's

# status: code, title, detail. Details name no bytes of the client: they may be anything.
PROBLEMS = {
    400: ("malformed_request", "This is not HTTP", "The request's head or body cannot be read."),
    414: ("uri_too_long", "The request line is too long", "Shorten the path and query."),
    415: (
        "unsupported_media_type",
        "The body's encoding is not supported",
        "Send the body as it is, or with Content-Encoding gzip or deflate.",
    ),
    417: ("unknown_expectation", "Unknown expectation", "Of Expect, only 100-continue is known."),
    431: ("headers_too_large", "The headers are too large", "Send fewer or shorter headers."),
    500: ("internal_error", "tierkv has a bug", "The log of this node has the details."),
    505: ("http_version_not_supported", "Another version of HTTP", "Speak HTTP/1.1 or HTTP/1.0."),
    503: ("too_many_connections", "No more connections", "Close some, or ask another node."),
}


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every answer has. For an application's `on_response_prepare`."""
    response.headers["Server"] = SERVER
    if REQUEST_ID_HEADER not in response.headers:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]


def framing_problem(status: int, request_id: str) -> web.Response:
    """One of the statuses above, else 500."""
    body = _body(status, request_id)
    headers = {REQUEST_ID_HEADER: request_id, "Server": SERVER}
    return problem_response(body, headers)


def overload_answer(request_id: str) -> bytes:
    """A whole answer, for a connection that is not served."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    body = msgspec.json.encode(_body(status, request_id))
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {PROBLEM_JSON}\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"{REQUEST_ID_HEADER}: {request_id}\r\n"
        "Retry-After: 1\r\n"
        f"Server: {SERVER}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def _body(status: int, request_id: str) -> Problem:
    if status not in PROBLEMS:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    code, title, detail = PROBLEMS[status]
    return Problem(title=title, status=status, detail=detail, code=code, request_id=request_id)
