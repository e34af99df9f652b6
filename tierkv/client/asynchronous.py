"""The client for programs with an event loop: a method for each route of a node."""

from __future__ import annotations

from tierkv.client.calls_cache import CacheCalls
from tierkv.client.calls_node import NodeCalls
from tierkv.client.calls_requests import RequestCalls
from tierkv.client.calls_status import StatusCalls
from tierkv.client.calls_work import WorkCalls


class AsyncClient(StatusCalls, WorkCalls, RequestCalls, CacheCalls, NodeCalls):
    """One node. It holds connections: use it with `async with`, and for many calls.

    Every method raises RemoteError, which is of the class that the node raised as well, if the
    node answers with an error, and CallError if there is no answer. Cancelling a call closes its
    connection, and the node ends what it can.
    """
