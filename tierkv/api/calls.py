"""One question to a node over HTTP, for the command line."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TypeAlias

import aiohttp
import msgspec

from tierkv.errors import TierKVError

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Answer: TypeAlias = dict[str, Json]


_UNIX = "unix:"


class CallError(TierKVError):
    """A node did not answer, or answered that it cannot."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which node to ask, and as whom.

    url: http://..., https://... or unix:/path. ca, cert: PEM files, for https: who signed the
    node's certificate, where the system's authorities did not; one's own with its key.
    """

    url: str
    token: str | None = None
    ca: str | None = None
    cert: str | None = None

    @property
    def base(self) -> str:
        return "http://localhost" if self.url.startswith(_UNIX) else self.url.rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def connector(self) -> aiohttp.BaseConnector:
        """Reads the files. Raises CallError if one cannot be used."""
        if self.url.startswith(_UNIX):
            return aiohttp.UnixConnector(self.url.removeprefix(_UNIX))
        if self.ca is None and self.cert is None:
            return aiohttp.TCPConnector()
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, password="")
        except OSError as error:
            raise CallError(f"the certificates cannot be used: {error}") from error
        return aiohttp.TCPConnector(ssl=context)


async def ask(
    target: Target, path: str, body: Answer | None = None, *, timeout_s: float = 300.0
) -> Answer:
    """The JSON answer of a node: a POST if there is a body, else a GET.

    Raises CallError, with the node's own words if it gave any.
    """
    url = target.url
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    method = "GET" if body is None else "POST"
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=target.connector()) as session,
            session.request(
                method,
                target.base + path,
                json=body,
                headers=target.headers,
                allow_redirects=False,  # a token is for this node only
            ) as response,
        ):
            raw = await response.read()
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise CallError(f"{url!r} is not the URL of a node, such as http://127.0.0.1:8100") from (
            error
        )
    except TimeoutError as error:
        raise CallError(f"{url} did not answer within {timeout_s:g} s") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise CallError(f"the certificate of {url} is wrong: {error.certificate_error}") from error
    except aiohttp.ClientConnectorError as error:
        raise CallError(f"no node listens at {url}") from error
    except aiohttp.ClientError as error:
        raise CallError(f"{url} broke off: {error}") from error
    return _read(url, response.status, raw)


def _read(url: str, status: int, raw: bytes) -> Answer:
    try:
        answer = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        plain: Answer = {key: msgspec.json.decode(value) for key, value in answer.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(f"what answers at {url} (status {status}) is no tierkv node") from error
    if status != 200:  # noqa: PLR2004 - the one good status
        detail, code = plain.get("detail", ""), plain.get("code", status)
        raise CallError(f"{detail} ({code})")
    return plain
