"""The options for the node that a command calls: --url, --ca, --cert, and TIERKV_TOKEN."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from tierkv.client import AsyncClient, Retries, client_tls
from tierkv.errors import ConfigError
from tierkv.http.callers import UnauthenticatedError
from tierkv.tasks import run_until_stopped

A = TypeVar("A")
_Command = Callable[..., None]

_TOKEN = "TIERKV_TOKEN"
_TIMEOUT_S = 30.0
LONG_S = 300.0  # for calls that may take long: the user can press Ctrl-C
_URL = "http://127.0.0.1:8100"


def default_url() -> str:
    """Return the URL of the node to call if a command is given none.

    The URL is the value of the environment variable TIERKV_URL, or http://127.0.0.1:8100.
    """
    return os.environ.get("TIERKV_URL") or _URL


async def ask_node(
    url: str,
    call: Callable[[AsyncClient], Coroutine[None, None, A]],
    *,
    ca: Path | None,
    cert: Path | None,
    timeout_s: float = _TIMEOUT_S,
    retries: Retries | None = None,
) -> A:
    """Connect to the node at `url`, run `call` with a client, and return its result.

    Args:
        url: http://, https:// or unix: address of the node.
        call: the function to run with the client.
        ca: PEM file of the authority that signed the node's certificate; None for the system's
            authorities.
        cert: PEM file of this client's certificate and key; None for none.
        timeout_s: seconds for each call of the client.
        retries: number and pauses of the retries of a failed call; None for AsyncClient's default.

    Raises:
        TierKVError: the call failed. If the node has answered with an error, the text is from the
            node.
    """
    tls = client_tls(ca=ca, cert=cert) if ca or cert else None
    token = os.environ.get(_TOKEN) or None  # not an option, because `ps` shows options to all users
    client = AsyncClient(url, token=token, tls=tls, timeout_s=timeout_s, retries=retries)
    async with client:
        try:
            return await call(client)
        except UnauthenticatedError as error:
            raise ConfigError(f"{error}: set the variable {_TOKEN} to the token") from error


@dataclass(frozen=True, slots=True)
class Target:
    """The node that a command calls, from the command's options.

    Attributes:
        url: http://, https:// or unix: address.
        ca: PEM file of the authority that signed the node's certificate; None for the system's
            authorities.
        cert: PEM file of this client's certificate and key; None for none.
    """

    url: str
    ca: Path | None
    cert: Path | None

    def ask(
        self,
        call: Callable[[AsyncClient], Coroutine[None, None, A]],
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> A:
        """Run `call` with a client of the node, block until it has ended, and return its result.

        Args:
            call: the function to run with the client.
            timeout_s: seconds for each call of the client.
        """
        asked = ask_node(self.url, call, ca=self.ca, cert=self.cert, timeout_s=timeout_s)
        return run_until_stopped(asked)


def tls_options(command: _Command) -> _Command:
    """Add the options --ca and --cert to a command."""
    ca = click.option(
        "--ca",
        type=click.Path(path_type=Path),
        envvar="TIERKV_CA",
        show_envvar=True,
        metavar="FILE",
        help=(
            "The authority that signed the certificate of an https node (PEM).  [default: "
            "the system's authorities]"
        ),
    )
    cert = click.option(
        "--cert",
        type=click.Path(path_type=Path),
        envvar="TIERKV_CERT",
        show_envvar=True,
        metavar="FILE",
        help="The certificate and key that a node with mutual TLS requires (PEM).",
    )
    return ca(cert(command))


def node_options(command: _Command) -> _Command:
    """Add the options --url, --ca and --cert to a command, and pass their values as a `Target`.

    The command receives the `Target` as the argument `node`.
    """

    @click.option(
        "--url",
        default=_URL,
        envvar="TIERKV_URL",
        show_default=True,
        show_envvar=True,
        help=(
            "The node: http://, https:// or unix:/PATH. If the node requires a token, set "
            "the variable TIERKV_TOKEN."
        ),
    )
    @tls_options
    @functools.wraps(command)
    def with_node(
        *args: object, url: str, ca: Path | None, cert: Path | None, **options: object
    ) -> None:
        command(*args, node=Target(url, ca, cert), **options)

    return with_node
