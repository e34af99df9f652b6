"""The commands that ask a node: generate, lookup, stats, verify."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from tierkv.api.types import GenerateBody, LookupBody
from tierkv.client import AsyncClient, client_tls
from tierkv.errors import ConfigError, InvariantError
from tierkv.http.callers import UnauthenticatedError
from tierkv.tasks import run_until_stopped

A = TypeVar("A")
_Command = Callable[..., None]

_TOKEN = "TIERKV_TOKEN"
_MOST_PROMPT_BYTES = 16 << 20  # what nodes take of a body (node.max_body_bytes)
_TIMEOUT_S = 300.0  # a person watches, and may end it


@dataclass(frozen=True, slots=True)
class Target:
    """Which node to ask. ca, cert: PEM files, for https."""

    url: str
    ca: Path | None
    cert: Path | None

    def ask(self, call: Callable[[AsyncClient], Coroutine[None, None, A]]) -> A:
        """Make one call. Raises a TierKVError, with the node's own words if it gave any."""
        return run_until_stopped(self._ask(call))

    async def _ask(self, call: Callable[[AsyncClient], Coroutine[None, None, A]]) -> A:
        tls = client_tls(ca=self.ca, cert=self.cert) if self.ca or self.cert else None
        token = os.environ.get(_TOKEN) or None  # no option: `ps` shows those to everybody
        async with AsyncClient(self.url, token=token, tls=tls, timeout_s=_TIMEOUT_S) as client:
            try:
                return await call(client)
            except UnauthenticatedError as error:
                raise ConfigError(f"{error}: the variable {_TOKEN} holds the token") from error


def _node(command: _Command) -> _Command:
    """Options that say which node to ask, and as whom; the command gets them as `node`."""

    @click.option(
        "--url",
        default="http://127.0.0.1:8100",
        envvar="TIERKV_URL",
        show_default=True,
        show_envvar=True,
        help="The node to ask: http://, https:// or unix:/PATH. The variable TIERKV_TOKEN holds "
        "the token, if the node wants one.",
    )
    @click.option(
        "--ca",
        type=click.Path(path_type=Path),
        envvar="TIERKV_CA",
        show_envvar=True,
        metavar="FILE",
        help="For https: who signed the node's certificate (PEM).  [default: the system's]",
    )
    @click.option(
        "--cert",
        type=click.Path(path_type=Path),
        envvar="TIERKV_CERT",
        show_envvar=True,
        metavar="FILE",
        help="For a node that asks for one: your certificate and its key (PEM).",
    )
    @functools.wraps(command)
    def with_node(
        *args: object, url: str, ca: Path | None, cert: Path | None, **options: object
    ) -> None:
        command(*args, node=Target(url, ca, cert), **options)

    return with_node


_as_json = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
_prompt = click.argument("prompt")


@click.command()
@_prompt
@_node
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="How many tokens to generate.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of sampling.")
@click.option("--no-cache", is_flag=True, help="Compute every token, and leave nothing cached.")
@_as_json
def generate(  # noqa: PLR0913 - its options
    prompt: str,
    *,
    node: Target,
    max_tokens: int,
    temperature: float,
    seed: int,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Generate text that follows PROMPT.

    If PROMPT is "-", it is read from standard input.
    """
    body = GenerateBody(
        prompt=_text(prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        use_cache=not no_cache,
    )
    answer = node.ask(lambda client: client.generate(body))
    _print(answer, answer.text, as_json=as_json)


@click.command()
@_prompt
@_node
@_as_json
def lookup(prompt: str, *, node: Target, as_json: bool) -> None:
    """Tell in which tiers the tokens of PROMPT are.

    If PROMPT is "-", it is read from standard input.
    """
    body = LookupBody(prompt=_text(prompt))
    answer = node.ask(lambda client: client.lookup(body))
    stored = "no answer" if answer.storage_tokens is None else f"{answer.storage_tokens} tokens"
    lines = (
        f"prompt     {answer.num_tokens} tokens",
        f"device     {answer.device_tokens} tokens",
        f"host       {answer.host_tokens} tokens",
        f"storage    {stored}",
    )
    _print(answer, "\n".join(lines), as_json=as_json)


@click.command()
@_node
@_as_json
def stats(*, node: Target, as_json: bool) -> None:
    """Print what a node has counted."""
    answer = node.ask(AsyncClient.stats)
    _print(answer, "\n".join(_flat(msgspec.to_builtins(answer))), as_json=as_json)


@click.command()
@_node
@_as_json
def verify(*, node: Target, as_json: bool) -> None:
    """Let a node recount its blocks and leases.

    Exits with 1 if anything is wrong.
    """
    answer = node.ask(AsyncClient.verify)
    _print(answer, "\n".join(answer.findings) or "nothing is wrong", as_json=as_json)
    if answer.findings:
        raise InvariantError(("the node's books are not in order",))


def _text(prompt: str) -> str:
    raw = sys.stdin.buffer.read(_MOST_PROMPT_BYTES + 1) if prompt == "-" else os.fsencode(prompt)
    if len(raw) > _MOST_PROMPT_BYTES:
        raise ConfigError(f"the prompt has more than {_MOST_PROMPT_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8 (byte {error.start})") from error


def _print(answer: msgspec.Struct, text: str, *, as_json: bool) -> None:
    click.echo(json.dumps(msgspec.to_builtins(answer), indent=2) if as_json else text)


def _flat(answer: Mapping[str, object], prefix: str = "") -> list[str]:
    lines = []
    for key, value in answer.items():
        if isinstance(value, Mapping):
            lines += _flat(value, f"{prefix}{key}.")
        else:
            lines.append(f"{prefix}{key} {value}")
    return lines
