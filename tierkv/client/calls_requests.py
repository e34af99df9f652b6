"""Calls for engines that compute by themselves: a request from its admission to its end."""

from __future__ import annotations

from tierkv.api.types import (
    AdmitBody,
    ClaimAnswer,
    ClaimBody,
    CommitBody,
    EndAnswer,
    ExtendBody,
    PublishAnswer,
    PublishBody,
    RequestAnswer,
    ResumeBody,
    StreamAnswer,
    StreamBody,
)
from tierkv.client import routes
from tierkv.client.calls import Calls, Question, named
from tierkv.sched.explain import Explanation

_ALL = CommitBody()
_AS_IT_IS = ResumeBody()
_PLAIN = PublishBody()
_PLAIN_STREAM = StreamBody()


class RequestCalls(Calls):
    """name: the request's id, as `admit` or `claim` answered it."""

    async def admit(self, body: AdmitBody) -> RequestAnswer:
        """Get blocks for a request. Without a request id it is given one here, so that a call
        which is made again after a lost answer takes blocks once."""
        return await self._call(routes.ADMIT, Question(body=named(body)))

    async def claim(self, body: ClaimBody) -> ClaimAnswer:
        """Get blocks for a published prompt, which is loaded to them. Named as in `admit`."""
        return await self._call(routes.CLAIM, Question(body=named(body)))

    async def request(self, name: str) -> RequestAnswer:
        """How it stands; this renews its lease."""
        return await self._call(routes.REQUEST, Question(name))

    async def explain_request(self, name: str) -> Explanation:
        """What of its prompt is cached now, where, and why no more."""
        return await self._call(routes.EXPLAIN_REQUEST, Question(name))

    async def commit(self, name: str, body: CommitBody = _ALL) -> RequestAnswer:
        """Tell which tokens' KV is computed; without a body, the whole prompt's."""
        return await self._call(routes.COMMIT, Question(name, body))

    async def extend(self, name: str, body: ExtendBody) -> RequestAnswer:
        return await self._call(routes.EXTEND, Question(name, body))

    async def preempt(self, name: str) -> RequestAnswer:
        """Give the blocks back for a while."""
        return await self._call(routes.PREEMPT, Question(name))

    async def resume(self, name: str, body: ResumeBody = _AS_IT_IS) -> RequestAnswer:
        return await self._call(routes.RESUME, Question(name, body))

    async def stream(self, name: str, body: StreamBody = _PLAIN_STREAM) -> StreamAnswer:
        """Store the prompt while it is computed: each `commit` lets more of it out, and `publish`
        under the same ticket completes it."""
        return await self._call(routes.STREAM, Question(name, body))

    async def publish(self, name: str, body: PublishBody = _PLAIN) -> PublishAnswer:
        """Leave a ticket for a decode node. The prompt must be committed."""
        return await self._call(routes.PUBLISH, Question(name, body))

    async def finish(self, name: str, body: CommitBody | None = None) -> EndAnswer:
        """End it, after a last commit if there is a body. What was committed stays cached."""
        return await self._call(routes.FINISH, Question(name, body))

    async def abort(self, name: str) -> EndAnswer:
        return await self._call(routes.ABORT, Question(name))
