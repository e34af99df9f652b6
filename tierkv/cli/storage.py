"""`tierkv storage`: list, measure, verify or remove the values of a store."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import click

from tierkv.api.settings import masked_url
from tierkv.cli.output import json_option, print_json, progress
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, TierKVError
from tierkv.storage import maintenance
from tierkv.storage.codec import read_key
from tierkv.storage.factory import StoreSettings, open_store, urls_in
from tierkv.storage.file import FileStore
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.maintenance import ValueFilter
from tierkv.storage.memory import MemoryStore
from tierkv.storage.protocol import Store, Usage, check_prefix
from tierkv.storage.redis.store import RedisSettings
from tierkv.storage.redis.url import TlsFiles
from tierkv.tasks import run_until_stopped

T = TypeVar("T")
# Longer limits than those of requests, since a user waits.
PATIENT = RedisSettings(timeout_s=10.0, connect_timeout_s=5.0)
PATIENT_RESILIENCE = ResilienceSettings(timeout_s=30.0, write_timeout_s=30.0)

url_argument = click.argument("url")
PREFIX_MEANS = (
    "Only values with names that start with this text: tierkv for all values of nodes "
    "with that handoff.prefix, tierkv:FINGERPRINT for one model and tenant (`tierkv "
    "storage du` lists them), tierkv:ticket for tickets."
)
prefix_option = click.option("--prefix", default="tierkv", show_default=True, help=PREFIX_MEANS)


def _expiring(_: click.Context, param: click.Parameter, seconds: float | None) -> ValueFilter:
    if seconds is None:
        return lambda _: True
    if math.isnan(seconds):
        raise click.BadParameter("not a number", param=param)
    until = time.time() + seconds
    return lambda value: value.expires_at is not None and value.expires_at <= until


within_option = click.option(
    "--expires-within",
    "is_selected",
    type=click.FloatRange(0, min_open=True),
    callback=_expiring,
    metavar="SECONDS",
    help="Only values that expire within this time, which were unused for the longest time.",
)


def with_store(url: str, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the store at `url`, run `work` with it, and return the result.

    Args:
        url: URL of the store.
        work: the function to run with the open store.

    Raises:
        ConfigError: the store is in the memory of a node, or its directory does not exist.
    """
    tls = click.get_current_context().find_object(TlsFiles) or TlsFiles()
    settings = StoreSettings(redis=replace(PATIENT, tls=tls), resilience=PATIENT_RESILIENCE)
    store = open_store(url, settings, SystemClock())
    if isinstance(store, MemoryStore):
        raise ConfigError(
            "a memory:// store is inside one node's process: use `tierkv stats --url URL` "
            "for that node"
        )
    for part in urls_in(url):
        _require_existing(open_store(part, settings, SystemClock()))

    async def run() -> T:
        async with store.running():
            return await work(store)

    with progress(f"reading {masked_url(url)}"):
        return run_until_stopped(run())


def with_each_store(url: str, work: Callable[[Store], Awaitable[T]]) -> tuple[Sequence[T], int]:
    """Run `work` with each of the stores that a layered store consists of.

    Stores in the memory of a node are left out.

    Args:
        url: URL of the store. If the store is not layered, `work` runs once.
        work: the function to run with each open store.

    Returns:
        The results, and the number of stores that failed. Their errors are printed to stderr.

    Raises:
        TierKVError: all stores failed; the error of the first one.
    """
    found: list[T] = []
    failures: list[TierKVError] = []
    for part in [part for part in urls_in(url) if part != "memory://"] or [url]:
        try:
            found.append(with_store(part, work))
        except TierKVError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    for failure in failures:
        click.echo(f"error: {failure}", err=True)
    return found, len(failures)


def _require_existing(store: Store) -> None:
    """Raise ConfigError if a file store's directory is missing, since only nodes create it."""
    if isinstance(store, FileStore) and not store.is_made():
        raise ConfigError(
            f"there is no store at {store.url}: give the directory of a node's storage.url"
        )


def checked(prefix: str) -> str:
    """Return `prefix`, with a colon added if it has none: `tierkv` must not match `tierkv2:...`.

    Raises:
        click.BadParameter: no name of a value can begin with the prefix.
    """
    try:
        return check_prefix(prefix if ":" in prefix else f"{prefix}:")
    except TierKVError as error:
        raise click.BadParameter(str(error), param_hint="--prefix") from error


def hint_if_none(count: int, prefix: str) -> None:
    """Print a hint if a command found no values.

    Args:
        count: number of values that the command found.
        prefix: prefix of the names that the command searched.
    """
    if not count:
        click.echo(
            f"no such values with the prefix {checked(prefix)}: check --prefix and the "
            "nodes' handoff.prefix",
            err=True,
        )


def readable(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:  # noqa: PLR2004
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


FILE = click.Path(exists=True, dir_okay=False)


@click.group()
@click.option(
    "--tls-ca",
    type=FILE,
    help="The authority that signed the server's certificate (rediss://, PEM).",
)
@click.option(
    "--tls-certificate",
    type=FILE,
    help="The certificate to present to a server that requires one (PEM).",
)
@click.option("--tls-key", type=FILE, help="The key of that certificate (PEM).")
@click.pass_context
def storage(
    context: click.Context, tls_ca: str | None, tls_certificate: str | None, tls_key: str | None
) -> None:
    """List, measure, verify or remove the values of a store.

    URL is the store as for `tierkv serve --storage`, such as file:///var/cache/tierkv or
    redis://user:password@host:6379/0. Only rm and verify --remove-damaged change the store.
    """
    context.obj = TlsFiles(ca=tls_ca, certificate=tls_certificate, key=tls_key)


@storage.command()
@url_argument
@prefix_option
@json_option
@click.option(
    "--limit",
    default=1000,
    show_default=True,
    type=click.IntRange(1),
    help="Largest number of values to list.",
)
@within_option
def ls(url: str, prefix: str, limit: int, *, is_selected: ValueFilter, as_json: bool) -> None:
    """List values: name, size in bytes, and seconds until they expire."""
    now = time.time()
    is_all = True

    async def collect(store: Store) -> list[dict[str, str | int | float | None]]:
        nonlocal is_all
        rows: list[dict[str, str | int | float | None]] = []
        async for value in maintenance.values_under(store, checked(prefix), is_selected):
            if len(rows) == limit:
                is_all = False
                break
            left = None if value.expires_at is None else value.expires_at - now
            rows.append({"name": value.name, "bytes": value.num_bytes, "expires_in_s": left})
        return rows

    rows = with_store(url, collect)
    if as_json:
        print_json({"values": rows, "is_all": is_all})
        return
    for row in rows:
        left = row["expires_in_s"]
        assert isinstance(row["bytes"], int), "as made above"
        shown = "never" if left is None else f"{left:.0f} s"
        click.echo(f"{readable(row['bytes']):>10}  {shown:>8}  {row['name']}")
    hint_if_none(len(rows), prefix)
    if not is_all:
        click.echo(f"there are more than these {limit} values: raise --limit", err=True)


@storage.command(short_help="Print the number of values and bytes by model and tenant.")
@url_argument
@prefix_option
@json_option
@within_option
def du(url: str, prefix: str, *, is_selected: ValueFilter, as_json: bool) -> None:
    """Print the number of values and bytes for each model and tenant, and for tickets."""
    groups = _usage(url, prefix, is_selected)
    if as_json:
        rows = {name: {"values": u.num_values, "bytes": u.num_bytes} for name, u in groups.items()}
        print_json({"groups": rows})
        return
    for name, used in sorted(groups.items(), key=lambda entry: -entry[1].num_bytes):
        click.echo(f"{readable(used.num_bytes):>10}  {used.num_values:>8}  {name}")
    hint_if_none(len(groups), prefix)


def _usage(url: str, prefix: str, is_selected: ValueFilter) -> dict[str, Usage]:
    return with_store(
        url, lambda store: maintenance.usage_by_group(store, checked(prefix), is_selected)
    )


@storage.command(short_help="Read every value and check it.")
@url_argument
@prefix_option
@json_option
@click.option(
    "--remove-damaged", is_flag=True, help="Remove damaged values, which no node can use."
)
@click.option(
    "--key-file",
    type=FILE,
    help=("The key file of the nodes (storage.key_file), which verifies signed and sealed values."),
)
def verify(
    url: str, prefix: str, *, as_json: bool, remove_damaged: bool, key_file: str | None
) -> None:
    """Read every value and check its name, length and checksum.

    In a layered store, the copies in each part are checked, and each finding names its part. The
    command exits with 1 if a damaged value remains, a value could not be read, or one of several
    stores did not answer.
    """
    key = None if key_file is None else read_key(key_file)

    async def check(store: Store) -> tuple[str, maintenance.Verified]:
        found = await maintenance.verify(
            store, checked(prefix), key, removes_damaged=remove_damaged
        )
        return f" ({store.url})" if len(urls_in(url)) > 1 else "", found

    parts, num_failed = with_each_store(url, check)
    counts = {
        "whole": sum(found.num_whole for _, found in parts),
        "damaged": sum(len(found.damaged) for _, found in parts),
        "keyed": sum(found.num_keyed for _, found in parts),
        "no blocks": sum(found.num_others for _, found in parts),
        "removed since": sum(found.num_removed for _, found in parts),
        "unread": sum(len(found.unread) for _, found in parts),
    }
    damaged = [(name, why + whose) for whose, found in parts for name, why in found.damaged]
    unread = [(name, why + whose) for whose, found in parts for name, why in found.unread]
    if as_json:
        names = {"names": _by_name(damaged), "unread_names": _by_name(unread)}
        print_json(counts | names)
    else:
        for name, why in damaged + unread:
            click.echo(f"{name}: {why}")
        click.echo(", ".join(f"{count} {what}" for what, count in counts.items()))
        if counts["keyed"] and key is None:
            click.echo("signed and sealed values can only be verified with --key-file", err=True)
    kept = [found.kept for _, found in parts if found.kept]
    for why in kept:
        click.echo(f"error: some damaged values could not be removed: {why}", err=True)
    if num_failed or unread or kept or (damaged and not remove_damaged):
        raise SystemExit(1)


def _by_name(findings: Sequence[tuple[str, str]]) -> dict[str, str]:
    of_each: dict[str, str] = {}
    for name, why in findings:
        of_each[name] = f"{of_each[name]}; {why}" if name in of_each else why
    return of_each


@storage.command()
@url_argument
@click.option("--prefix", required=True, help=PREFIX_MEANS)
@within_option
@click.option(
    "--yes",
    is_flag=True,
    help="Remove the values. Without it the command only prints what it would remove.",
)
@json_option
def rm(
    url: str,
    prefix: str,
    *,
    is_selected: ValueFilter,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove the values that --prefix and --expires-within select.

    For example, the command removes the values of one model and tenant, the values of one block, or
    the values that expire soon. Without --yes, it only prints their number and size.
    """
    prefix = checked(prefix)
    if not yes:
        groups = _usage(url, prefix, is_selected).values()
        count, num_bytes = sum(u.num_values for u in groups), sum(u.num_bytes for u in groups)
        if as_json:
            print_json({"removed": 0, "would_remove": count, "would_remove_bytes": num_bytes})
        else:
            click.echo(f"would remove {count} values, {readable(num_bytes)}; add --yes")
        return
    removed = 0

    def on_progress(count: int) -> None:
        nonlocal removed
        removed = count

    try:
        with_store(url, lambda store: maintenance.remove(store, prefix, on_progress, is_selected))
    except (KeyboardInterrupt, TierKVError):
        click.echo(f"stopped after {removed} values were removed, and perhaps some more", err=True)
        raise
    if as_json:
        print_json({"removed": removed})
    else:
        click.echo(f"removed {removed} values")
