"""The connection pool to one node, and single HTTP requests over it."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from yarl import URL

from tierkv import tracing
from tierkv.client.errors import (
    BrokenOffError,
    CallError,
    NotANodeError,
    UnreachableError,
)
from tierkv.errors import ConfigError

Body = Sequence[bytes]
"""The parts of a body, in order. Several bodies may share a part."""

_PIECE_BYTES = 64 << 10
_UNIX = "unix:"
_KEEP_S = 5.0  # below a node's own 75 s, or a node may close a connection just as it is reused
_CONNECT_S = 10.0  # everything after connecting is limited by the call's deadline
_MAX_ANSWER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP answer.

    Attributes:
        status: HTTP status.
        content_type: Media type of the body.
        headers: The answer's headers.
        raw: The body.
    """

    status: int
    content_type: str
    headers: Mapping[str, str]
    raw: bytes


def client_tls(
    *, ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Return the TLS context of a client for https.

    Args:
        ca: PEM file of the authority that signed the node's certificate; None trusts the system's
            authorities.
        cert: PEM file of the client's own certificate, for a node that requires one; None for none.
        key: PEM file of the certificate's key; None if the key is in `cert`.

    Raises:
        ConfigError: A file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the authority's certificate {ca} cannot be used: {error}") from error
    if cert is not None:
        try:
            # An encrypted key is refused; without a password, OpenSSL would ask on the terminal.
            context.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the certificate {cert} or its key cannot be used: {error}"
            ) from error
    return context


def node_url(given: str) -> str:
    """Check the URL of a node, and return it without a slash at its end.

    Args:
        given: A URL: http://, https:// or unix:/path.

    Raises:
        ConfigError: `given` is not the URL of a node, or contains a user or password. The message
            does not repeat a password.
    """
    if given.startswith(f"{_UNIX}/"):
        return given
    if "@" in given:
        raise ConfigError(
            "the URL of a node must not contain a user or password: pass a token instead"
        )
    try:
        is_one = given.startswith(("http://", "https://")) and bool(URL(given).host)
    except ValueError:  # such as a port above 65,535
        is_one = False
    if not is_one:
        raise ConfigError(
            f"{given!r} is not the URL of a node, such as http://127.0.0.1:8100 or unix:/PATH"
        )
    return given.rstrip("/")


class Http:
    """The connections to one node. Use it inside `running()`.

    Attributes:
        where: The node's address, for error messages.

    Args:
        url: URL of the node: http://, https:// or unix:/path, without user and password.
        token: A bearer token; None without authentication.
        tls: TLS context for https; None trusts the system's authorities.
        max_connections: Largest number of connections; 0 for no limit. If all are in use, a further
            request waits until one is free.
        connect_s: Seconds within which a connection must be made.

    Raises:
        ConfigError: The URL or the token is not valid.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        tls: ssl.SSLContext | None,
        max_connections: int,
        connect_s: float = _CONNECT_S,
    ) -> None:
        self.where = node_url(url)
        if token is not None and not (token.isascii() and token.isprintable() and token):
            raise ConfigError(
                "the token contains characters other than visible ASCII: check that it "
                "was copied whole"
            )
        self._uds = url.removeprefix(_UNIX) if url.startswith(_UNIX) else None
        self._base = self.where if self._uds is None else "http://localhost"
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._tls = tls
        self._max_connections = max_connections
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=self._connector(),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
        ) as session:
            self._session = session
            try:
                yield
            finally:
                self._session = None

    def _connector(self) -> aiohttp.BaseConnector:
        if self._uds is not None:
            return aiohttp.UnixConnector(
                self._uds, limit=self._max_connections, keepalive_timeout=_KEEP_S
            )
        return aiohttp.TCPConnector(
            limit=self._max_connections,
            keepalive_timeout=_KEEP_S,
            ssl=self._tls if self._tls is not None else True,
        )

    async def ask(
        self, method: str, path: str, body: Body | None, headers: Mapping[str, str]
    ) -> Reply:
        """Send a request, and return the whole answer.

        Args:
            method: HTTP method.
            path: Path and query.
            body: The parts of the body, which are sent one after another; None for no body.
            headers: Headers in addition to those of the client.

        Raises:
            CallError: The answer did not arrive whole.
        """
        async with self.opened(method, path, body, headers) as response:
            return await self.whole(response)

    @asynccontextmanager
    async def opened(
        self, method: str, path: str, body: Body | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and provide the answer as soon as its headers have arrived.

        If the `async with` ends before the answer is read whole, the connection is closed. Reading
        from the answer raises errors of aiohttp, which `translated` converts.

        Args:
            method: HTTP method.
            path: Path and query.
            body: The parts of the body, which are sent one after another; None for no body.
            headers: Headers in addition to those of the client.

        Raises:
            CallError: There is no answer.
        """
        if self._session is None:
            raise CallError("this client is closed, or was not entered with `async with`")
        headers = {**headers, **tracing.headers()}
        if body is not None:
            headers["Content-Length"] = str(sum(map(len, body)))
        with translated(self.where):
            response = await self._session.request(
                method,
                self._base + path,
                data=None if body is None else _in_pieces(body),
                headers=headers,
                allow_redirects=False,  # the token must not go to another node
            )
        try:
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def whole(self, response: aiohttp.ClientResponse) -> Reply:
        """Read the rest of an HTTP answer, and return the whole answer.

        Args:
            response: The answer, of which the status and headers have been read.

        Raises:
            CallError: The connection broke.
            NotANodeError: The answer has more than 256 MiB, which no node sends.
        """
        raw = bytearray()
        with translated(self.where):
            async for chunk in response.content.iter_any():
                raw += chunk
                if len(raw) > _MAX_ANSWER_BYTES:
                    raise NotANodeError(
                        f"{self.where} sent an answer of more than "
                        f"{_MAX_ANSWER_BYTES >> 20} MiB, the limit",
                        status=response.status,
                    )
        return Reply(response.status, response.content_type, response.headers, bytes(raw))


async def _in_pieces(body: Body) -> AsyncIterator[memoryview]:
    """Yield the body in pieces of 64 KiB, since aiohttp copies bytes that wait to be sent."""
    for part in body:
        view = memoryview(part)
        for at in range(0, len(view), _PIECE_BYTES):
            yield view[at : at + _PIECE_BYTES]


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Convert errors of aiohttp that are raised inside the `with` to errors of tierkv's client.

    Args:
        where: The node's address, for error messages.

    Raises:
        ConfigError: `where` is not the URL of a node.
        UnreachableError: No connection could be made.
        BrokenOffError: The connection ended before the answer was complete.
    """
    try:
        yield
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise ConfigError(
            f"{where!r} is not the URL of a node, such as http://127.0.0.1:8100"
        ) from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise UnreachableError(f"the certificate of {where} is not accepted: {error}") from error
    except aiohttp.ClientConnectorError as error:
        raise UnreachableError(f"no node answers at {where}: {_why(error.os_error)}") from error
    except aiohttp.ConnectionTimeoutError as error:
        raise UnreachableError(f"no node answers at {where}: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        what = str(error) or type(error).__name__
        raise BrokenOffError(
            f"{where} ended the connection before its answer was complete: {what}"
        ) from error


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not use TLS: use http:// instead of https:// in its URL"
    if error.errno is None or isinstance(error, (ssl.SSLError, socket.gaierror)):
        return error.strerror or str(error)
    return os.strerror(error.errno)
