"""The commands that send a request to a node: explain, generate, lookup, stats, verify."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import msgspec

from tierkv.api.types import GenerateBody, LookupBody
from tierkv.cli.output import json_option, print_json, progress
from tierkv.cli.target import LONG_S, Target, node_options
from tierkv.client import AsyncClient
from tierkv.config import flat
from tierkv.errors import ConfigError, InvariantError
from tierkv.sched.explain import Explanation

_MAX_PROMPT_BYTES = 16 << 20  # the default of node.max_body_bytes


_prompt = click.argument("prompt")


@click.command()
@_prompt
@node_options
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Number of tokens to generate.",
)
@click.option(
    "--temperature",
    type=float,
    default=0.0,
    show_default=True,
    help="Temperature of sampling; 0 always takes the most likely token.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of sampling."
)
@click.option("--no-cache", is_flag=True, help="Compute every token, and cache none of them.")
@json_option
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

    If PROMPT is "-", the prompt is read from standard input.
    """
    body = GenerateBody(
        prompt=_text(prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        use_cache=not no_cache,
    )
    answer = node.ask(lambda client: client.generate(body), timeout_s=LONG_S)
    _print(answer, answer.text, as_json=as_json)


@click.command()
@_prompt
@node_options
@json_option
def lookup(prompt: str, *, node: Target, as_json: bool) -> None:
    """Print in which tiers the tokens of PROMPT are.

    If PROMPT is "-", the prompt is read from standard input.
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
@click.argument("prompt_file", type=click.Path(path_type=Path, allow_dash=True))
@node_options
@json_option
def explain(prompt_file: Path, *, node: Target, as_json: bool) -> None:
    """Explain why the first missing block of a prompt is not cached.

    The command prints the tier of each cached block, the first missing block, and the reason. If
    PROMPT_FILE is "-", the prompt is read from standard input. Nothing is fetched or changed.
    """
    body = LookupBody(prompt=_decoded(_content(prompt_file)))
    answer = node.ask(lambda client: client.explain(body))
    _print(answer, "\n".join(_explained(answer)), as_json=as_json)


def _explained(found: Explanation) -> list[str]:
    lines = [f"prompt      {found.num_tokens} tokens"]
    for run in found.runs:
        last = run.stop - 1
        blocks = f"block {last}" if run.start == last else f"blocks {run.start}-{last}"
        lines.append(f"{run.where:11} {blocks}")
    if found.partial_tokens:
        lines.append(f"partial     the first {found.partial_tokens} tokens of the next block")
    if found.first_miss is None:
        return [*lines, "missing     nothing"]
    why = [found.reason]
    if found.tier:
        why.append(f"from {found.tier}")
    if found.ago_s is not None:
        why.append(f"{found.ago_s:.1f} s ago")
    lines.append(f"missing     from block {found.first_miss} on: {', '.join(why)}")
    return [*lines, f"            {found.detail}"] if found.detail else lines


@click.command()
@node_options
@json_option
def stats(*, node: Target, as_json: bool) -> None:
    """Print the counters of a node."""
    answer = node.ask(AsyncClient.stats)
    counts = flat(msgspec.to_builtins(answer))
    shown = "\n".join(f"{name} {value}" for name, value in counts.items())
    _print(answer, shown, as_json=as_json)


@click.command()
@node_options
@json_option
def verify(*, node: Target, as_json: bool) -> None:
    """Check a node's blocks and leases for consistency.

    The command exits with 1 if there is a fault.
    """
    answer = node.ask(AsyncClient.verify, timeout_s=LONG_S)
    _print(answer, "\n".join(answer.findings) or "no fault found", as_json=as_json)
    if answer.findings:
        raise InvariantError(
            (("the node's blocks and leases are inconsistent: report this with the lines above"),)
        )


def _text(prompt: str) -> str:
    return _decoded(_content(Path("-")) if prompt == "-" else os.fsencode(prompt))


def _content(path: Path) -> bytes:
    """Return a prompt file's bytes, at most one more than allowed; "-" reads standard input."""
    if str(path) == "-":
        return sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    try:
        with progress(f"reading {path}"), path.open("rb") as file:
            return file.read(_MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the prompt file {path} cannot be read: {error.strerror}") from error


def _decoded(raw: bytes) -> str:
    if len(raw) > _MAX_PROMPT_BYTES:
        raise ConfigError(
            f"the prompt has more than {_MAX_PROMPT_BYTES} bytes, the maximum: shorten it"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the prompt is not valid UTF-8 (byte {error.start}): give a text file"
        ) from error


def _print(answer: msgspec.Struct, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.to_builtins(answer))
    else:
        click.echo(text)
