"""Errors of a call: those that the node answers with, and those of the connection."""

from __future__ import annotations

import msgspec

from tierkv.errors import BadRequestError, TierKVError
from tierkv.http.problems import ERRORS, PROBLEM_JSON, NotReadyError, Problem

_FIRST_SERVER_ERROR = 500
_UNAVAILABLE = 503


class CallError(TierKVError):
    """No node answered the call. The node may or may not have done the work."""


class UnreachableError(CallError):
    """No connection to the node could be made, so no work was done: retry, or call another node."""


class BrokenOffError(CallError):
    """The connection ended before the answer was complete."""


class DeadlineError(CallError):
    """The node did not answer within `timeout_s`."""


class NotANodeError(CallError):
    """A server answered, but not as a tierkv node of this version does.

    Attributes:
        status: HTTP status of the answer.

    Args:
        message: What is wrong.
        status: HTTP status of the answer.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class RemoteError(TierKVError):
    """The node has answered with an error.

    The raised error is also of the class that the node raised:

        except OutOfBlocksError as error:    # error.tier, error.needed ...
        except RemoteError as error:         # every error that a node answers with

    Attributes:
        problem: The body of the node's answer.
        retry_after_s: Seconds after which the node asks to retry; None if it does not.
    """

    def __init__(self, problem: Problem, *, retry_after_s: float | None = None) -> None:
        Exception.__init__(self, problem.detail or problem.title)
        self.problem = problem
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        """The stable code of the error, which programs can compare."""
        return self.problem.code

    @property
    def status(self) -> int:
        return self.problem.status

    @property
    def request_id(self) -> str:
        """The id of the request in the node's log."""
        return self.problem.request_id

    def __str__(self) -> str:
        return f"{self.args[0]} ({self.code}, request {self.request_id})"


def remote_error(problem: Problem, *, retry_after_s: float | None = None) -> RemoteError:
    """Return the exception for a node's error answer, of the class that belongs to its code.

    Args:
        problem: The body of the node's answer.
        retry_after_s: Seconds after which the node asks to retry; None if it does not.
    """
    error = _remote_class(_class_of(problem))(problem, retry_after_s=retry_after_s)
    # Attributes of some classes, such as HandoffError.reason and OutOfBlocksError.tier.
    for name in ("reason", "tier", "needed", "available"):
        if (value := getattr(problem, name)) is not None:
            setattr(error, name, value)
    return error


def read_problem(content_type: str, raw: bytes) -> Problem | None:
    """Decode the error answer of a node; None if the answer has another form.

    Args:
        content_type: Media type of the answer.
        raw: Body of the answer.
    """
    if content_type != PROBLEM_JSON:
        return None
    try:
        return msgspec.json.decode(raw, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_CLASSES = {code: kind for kind, _, code, _ in ERRORS}


def _class_of(problem: Problem) -> type[TierKVError]:
    if problem.code in _CLASSES:
        return _CLASSES[problem.code]
    if problem.status == _UNAVAILABLE:
        return NotReadyError
    return TierKVError if problem.status >= _FIRST_SERVER_ERROR else BadRequestError


def _remote_class(kind: type[TierKVError]) -> type[RemoteError]:
    if kind is TierKVError:
        return RemoteError
    if kind not in _REMOTE:
        names = {"__module__": __name__, "__doc__": kind.__doc__}
        _REMOTE[kind] = type(kind.__name__, (RemoteError, kind), names)
    return _REMOTE[kind]


_REMOTE: dict[type, type[RemoteError]] = {}
