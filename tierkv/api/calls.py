"""One question to a node over HTTP, for the command line."""

from __future__ import annotations

from typing import TypeAlias

import aiohttp
import msgspec

from tierkv.errors import TierKVError

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Answer: TypeAlias = dict[str, Json]


class CallError(TierKVError):
    """A node did not answer, or answered that it cannot."""


async def ask(
    url: str, path: str, body: Answer | None = None, *, timeout_s: float = 300.0
) -> Answer:
    """The JSON answer of the node at `url`: a POST if there is a body, else a GET.

    Raises CallError, with the node's own words if it gave any.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    method = "GET" if body is None else "POST"
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url.rstrip("/") + path, json=body) as response,
        ):
            raw = await response.read()
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise CallError(f"{url!r} is not the URL of a node, such as http://127.0.0.1:8100") from (
            error
        )
    except TimeoutError as error:
        raise CallError(f"{url} did not answer within {timeout_s:g} s") from error
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
