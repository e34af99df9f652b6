"""What can go wrong between the gateway and its nodes, named for what the gateway does about it."""

from __future__ import annotations

from tierkv.errors import TierKVError
from tierkv.http.problems import AnswerError


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
            f"there is no model {asked!r} here; there is {ours!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


class OverloadedError(GatewayError):
    """There is no room, here or at the nodes: try again later."""

    status = 503
    code = "overloaded"
    title = "There is no room now"


class QueueFullError(OverloadedError):
    """So many wait already that waiting makes no sense."""

    status = 429
    code = "too_many_requests"
    title = "Too many requests"


class NoNodesError(GatewayError):
    """No node is left that could do this."""

    status = 503
    code = "no_nodes"
    title = "No node is left"


class GatewayShuttingDownError(GatewayError):
    status = 503
    code = "shutting_down"
    title = "This gateway takes no more work"


class OutOfTimeError(GatewayError):
    status = 504
    code = "deadline_exceeded"
    title = "It took too long"


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
