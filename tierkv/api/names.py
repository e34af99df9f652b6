"""What ids are called inside, where those of all tenants lie side by side, and back again."""

from __future__ import annotations

import hashlib
import re

from tierkv.errors import BadRequestError

_TICKET = re.compile("[0-9a-f]{32}:")
_REQUEST = re.compile("[0-9a-f]{16}/")
_IN_WORDS = re.compile(f"'(?:{_TICKET.pattern}|{_REQUEST.pattern})")


def request_name(space: str, request_id: str) -> str:
    """What the scheduler calls a request: tenants may use the same ids. space: the cache's name of
    the tenant. Raises BadRequestError."""
    if space:
        return f"{space}/{request_id}"
    if _REQUEST.match(request_id):
        raise BadRequestError("a request's id does not begin like those of tenants")
    return request_id


def ticket_name(ticket_id: str, tenant: str) -> str:
    """What a ticket is called on all nodes: tenants may use the same ids. Raises
    BadRequestError."""
    if tenant:
        return f"{hashlib.sha256(tenant.encode()).hexdigest()[:32]}:{ticket_id}"
    if _TICKET.match(ticket_id):
        raise BadRequestError("a ticket's id does not begin like those of tenants")
    return ticket_id


def as_given(sentence: str) -> str:
    """`sentence` with each quoted name as the id that its caller gave."""
    return _IN_WORDS.sub("'", sentence)
