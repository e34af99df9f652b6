"""Who may do what: what a route asks for, and who has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tierkv.errors import TierKVError


class Access(IntEnum):
    """What a route needs and a caller has; each includes those before it."""

    PUBLIC = 0  # probes: no caller is asked who it is
    READ = 1  # look: lookup, stats, explain
    WRITE = 2  # do work in one's own tenant: requests, publish, claim, pins
    ADMIN = 3  # the node as a whole: tiers, quotas, blocks of all, life cycle


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. tenant: "" is the node's own; never taken from a request's body.

    Of an ADMIN, tenant is the one that its own requests work in; it may name others where a route
    says so.
    """

    name: str
    tenant: str
    access: Access


# Who calls a node that asks nobody, which only listens on loopback or was told to be insecure.
ANYONE = Principal("anyone", "", Access.ADMIN)
# Who calls a public route: nobody was asked, so nobody is known.
NOBODY = Principal("nobody", "", Access.PUBLIC)


class UnauthenticatedError(TierKVError):
    """The node does not know who calls: bring a token, or a certificate, that it knows.

    was_given: there was a credential, but not a good one.
    """

    def __init__(self, message: str, *, was_given: bool = False) -> None:
        super().__init__(message)
        self.was_given = was_given


class ForbiddenError(TierKVError):
    """The node knows who calls, and this caller may not do this."""
