"""What the routes refuse for reasons of their own, each with a row among the problems."""

from __future__ import annotations

from tierkv.errors import BadRequestError, TierKVError


class UnknownIdError(BadRequestError):
    """There is nothing of this id, or it is another tenant's, which is told in the same words."""


class WrongStateError(BadRequestError):
    """What the id names is there, but this cannot be done with it now."""


class TooManyError(BadRequestError):
    """There are as many of these as there may be: wait until one is gone."""


class NotReadyError(TierKVError):
    """The node cannot answer this now: ask again, or another one."""


class AnswerError(TierKVError):
    """One that brings what the others have a row for. status: of HTTP. code: for programs."""

    status: int
    code: str
    title: str
