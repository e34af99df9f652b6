"""The node that a command asks, and its credentials: --url, --ca, --cert and TIERKV_TOKEN."""

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
LONG_S = 300.0  # for what may take long: a person watches, and may end it
_URL = "http://127.0.0.1:8100"


def default_url() -> str:
    """Return the URL of the node to ask if none is given."""
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
    """Connect to the node at `url`, and return the result of `call`.

    Args:
        url: http://, https:// or unix: address of the node.
        call: asks the node through the client that it is given.
        ca: PEM file of the authority that signed the node's certificate.
        cert: PEM file of this client's certificate and key.
        timeout_s: seconds that the node may take.
        retries: when to ask again; None as AsyncClient does by default.

    Raises:
        TierKVError: the call failed, with the node's own words if it gave any.
    """
    tls = client_tls(ca=ca, cert=cert) if ca or cert else None
    token = os.environ.get(_TOKEN) or None  # no option: `ps` shows those to everybody
    client = AsyncClient(url, token=token, tls=tls, timeout_s=timeout_s, retries=retries)
    async with client:
        try:
            return await call(client)
        except UnauthenticatedError as error:
            raise ConfigError(f"{error}: set the variable {_TOKEN} to the token") from error


@dataclass(frozen=True, slots=True)
class Target:
    """The node that a command asks, as given by its options.

    Attributes:
        url: http://, https:// or unix: address.
        ca: PEM file of the authority that signed the node's certificate; None for the system's
            list.
        cert: PEM file of this client's certificate and key; None without.
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
        """Ask the node, block until it has answered, and return the answer.

        Args:
            call: asks the node through the client that it is given.
            timeout_s: seconds that the node may take.
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
    """Add the options for the node and its caller to a command, which receives them as `node`."""

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
