"""`tierkv storage`: what is in a store, and what to do about it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable
from pathlib import Path

import click

from tierkv.cli_storage_options import (
    FILE,
    PREFIX_MEANS,
    checked,
    json_option,
    kept_urls_in,
    prefix_option,
    readable,
    say_if_none,
    url_argument,
    with_store,
)
from tierkv.errors import TierKVError
from tierkv.storage import maintenance
from tierkv.storage.codec_keyed import parse_key
from tierkv.storage.protocol import Store, check_ttl
from tierkv.storage.redis_socket import TlsFiles


@click.group()
@click.option("--tls-ca", type=FILE, help="Who may sign the server's certificate (rediss://).")
@click.option("--tls-certificate", type=FILE, help="Ours, where the server wants to see one.")
@click.option("--tls-key", type=FILE, help="Of our certificate.")
@click.pass_context
def storage(
    context: click.Context, tls_ca: str | None, tls_certificate: str | None, tls_key: str | None
) -> None:
    """Look into a store, verify it, remove from it.

    URL is what `tierkv serve --storage` takes, such as file:///var/cache/tierkv or
    redis://user:password@host:6379/0. The files are PEM files. Nothing is made or changed but by
    rm, sweep and verify --remove-damaged.
    """
    context.obj = TlsFiles(ca=tls_ca, certificate=tls_certificate, key=tls_key)


@storage.command()
@url_argument
@prefix_option
@json_option
@click.option(
    "--limit", default=1000, show_default=True, type=click.IntRange(1), help="How many at most."
)
@click.option(
    "--expires-within",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Only values that will be gone by then.",
)
@click.option("--without-expiry", is_flag=True, help="Only values that live for ever.")
def ls(
    url: str,
    prefix: str,
    limit: int,
    expires_within: float | None,
    *,
    as_json: bool,
    without_expiry: bool,
) -> None:
    """List values: name, size, and seconds to live."""
    if expires_within is not None and math.isnan(expires_within):
        raise click.BadParameter("not a number", param_hint="--expires-within")
    now = time.time()

    is_all = True

    async def collect(store: Store) -> list[dict[str, str | int | float | None]]:
        nonlocal is_all
        rows: list[dict[str, str | int | float | None]] = []
        async for value in maintenance.values_under(store, checked(prefix)):
            left = None if value.expires_at is None else value.expires_at - now
            if without_expiry and left is not None:
                continue
            if expires_within is not None and (left is None or left > expires_within):
                continue
            if len(rows) == limit:
                is_all = False
                break
            rows.append({"name": value.name, "bytes": value.num_bytes, "expires_in_s": left})
        return rows

    rows = with_store(url, prefix, collect)
    if as_json:
        click.echo(json.dumps({"values": rows, "is_all": is_all}))
        return
    for row in rows:
        left = row["expires_in_s"]
        assert isinstance(row["bytes"], int), "as made above"
        shown = "never" if left is None else f"{left:.0f} s"
        click.echo(f"{readable(row['bytes']):>10}  {shown:>8}  {row['name']}")
    say_if_none(len(rows), prefix)
    if not is_all:
        click.echo(f"there are more than these {limit}: --limit", err=True)


@storage.command(short_help="Values and bytes by model and tenant.")
@url_argument
@prefix_option
@json_option
def du(url: str, prefix: str, *, as_json: bool) -> None:
    """Values and bytes for each model and tenant (fingerprint), and for tickets."""
    groups = with_store(
        url, prefix, lambda store: maintenance.usage_by_group(store, checked(prefix))
    )
    if as_json:
        rows = {name: {"values": u.num_values, "bytes": u.num_bytes} for name, u in groups.items()}
        click.echo(json.dumps({"groups": rows}))
        return
    for name, used in sorted(groups.items(), key=lambda entry: -entry[1].num_bytes):
        click.echo(f"{readable(used.num_bytes):>10}  {used.num_values:>8}  {name}")
    say_if_none(len(groups), prefix)


@storage.command(short_help="Does it answer, what can it do, what is in it.")
@url_argument
@prefix_option
@json_option
def stat(url: str, prefix: str, *, as_json: bool) -> None:
    """Whether the store answers, how fast, what it can do, and how much it holds."""

    async def ask(store: Store) -> dict[str, str | int | float | bool]:
        started = time.perf_counter()
        await store.ping()
        ping_ms = (time.perf_counter() - started) * 1000
        can = store.capabilities
        facts: dict[str, str | int | float | bool] = {
            "url": store.url,
            "ping_ms": round(ping_ms, 3),
            "is_shared": can.is_shared,
            "is_durable": can.is_durable,
            "has_ttl": can.has_ttl,
        }
        if can.has_listing:
            used = await store.usage(checked(prefix))
            facts |= {"values": used.num_values, "bytes": used.num_bytes}
        return facts

    facts = with_store(url, prefix, ask)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, fact in facts.items():
        click.echo(f"{name:12} {fact}")


@storage.command(short_help="Read every value and check it.")
@url_argument
@prefix_option
@json_option
@click.option("--remove-damaged", is_flag=True, help="Remove what fails; nobody can use it.")
@click.option(
    "--key-file",
    type=FILE,
    help="The nodes' storage.key_file, to verify signed and sealed values.",
)
def verify(
    url: str, prefix: str, *, as_json: bool, remove_damaged: bool, key_file: str | None
) -> None:
    """Read every value and check it against its name, its length and its checksum.

    Of several stores (layered:, mirrored:) each one's copies. Exits with 1 if a value is damaged
    and was not removed, or could not be read.
    """
    key = None if key_file is None else parse_key(Path(key_file).read_text("ascii", "replace"))

    def check(store: Store) -> Awaitable[maintenance.Verified]:
        return maintenance.verify(store, checked(prefix), key, removes_damaged=remove_damaged)

    parts = [with_store(part, prefix, check) for part in kept_urls_in(url)]
    counts = {
        "whole": sum(found.num_whole for found in parts),
        "damaged": sum(len(found.damaged) for found in parts),
        "keyed": sum(found.num_keyed for found in parts),
        "no blocks": sum(found.num_others for found in parts),
        "gone meanwhile": sum(found.num_gone for found in parts),
        "unread": sum(len(found.unread) for found in parts),
    }
    damaged = [one for found in parts for one in found.damaged]
    unread = [one for found in parts for one in found.unread]
    if as_json:
        click.echo(json.dumps(counts | {"names": dict(damaged), "unread_names": dict(unread)}))
    else:
        for name, why in damaged + unread:
            click.echo(f"{name}: {why}")
        click.echo(", ".join(f"{count} {what}" for what, count in counts.items()))
        if counts["keyed"] and key is None:
            click.echo("keyed values can only be verified with --key-file", err=True)
    if unread or (damaged and not remove_damaged):
        raise SystemExit(1)


@storage.command()
@url_argument
@click.option("--prefix", required=True, help=PREFIX_MEANS)
@click.option("--yes", is_flag=True, help="Do it; otherwise it is only said what would go.")
def rm(url: str, prefix: str, *, yes: bool) -> None:
    """Remove values: of one model and tenant, or of one prompt's block."""
    prefix = checked(prefix)
    if not yes:
        used = with_store(url, prefix, lambda store: store.usage(prefix))
        click.echo(f"would remove {used.num_values} values, {readable(used.num_bytes)}; add --yes")
        return
    removed = 0

    def so_far(count: int) -> None:
        nonlocal removed
        removed = count

    try:
        with_store(url, prefix, lambda store: maintenance.remove(store, prefix, so_far))
    except (KeyboardInterrupt, TierKVError):
        click.echo(
            f"stopped after {removed} values were removed, and perhaps some of the next", err=True
        )
        raise
    click.echo(f"removed {removed} values")


@storage.command()
@url_argument
@prefix_option
@click.option("--ttl", required=True, type=float, metavar="SECONDS", help="To live, from now on.")
def sweep(url: str, prefix: str, ttl: float) -> None:
    """Give values that live for ever a time to live, so that what nobody uses goes.

    Of several stores (layered:, mirrored:) each one's copies.
    """
    try:
        check_ttl(ttl)
    except TierKVError as error:
        raise click.BadParameter(str(error), param_hint="--ttl") from error
    given = sum(
        with_store(part, prefix, lambda store: maintenance.give_ttl(store, checked(prefix), ttl))
        for part in kept_urls_in(url)
    )
    click.echo(f"{given} values now expire within {ttl:g} s")
