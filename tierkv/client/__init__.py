"""A typed client of a node: `AsyncClient`, and `Client` for programs without an event loop.

    async with AsyncClient("http://127.0.0.1:8100", token="tkv_...") as node:
        found = await node.lookup(LookupBody(prompt="Once upon a time"))

Bodies and answers are the server's own types, from `tierkv.api.types`.
"""

from tierkv.client.asynchronous import AsyncClient
from tierkv.client.calls import Retries
from tierkv.client.errors import (
    BrokenOffError,
    CallError,
    DeadlineError,
    NotANodeError,
    RemoteError,
    UnreachableError,
)
from tierkv.client.http import client_tls
from tierkv.client.streams import TokenStream
from tierkv.client.synchronous import Client

__all__ = [
    "AsyncClient",
    "BrokenOffError",
    "CallError",
    "Client",
    "DeadlineError",
    "NotANodeError",
    "RemoteError",
    "Retries",
    "TokenStream",
    "UnreachableError",
    "client_tls",
]
