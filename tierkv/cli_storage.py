"""`tierkv storage`: what is in a store, and what to do about it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import click

from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, TierKVError
from tierkv.storage import maintenance
from tierkv.storage.codec_keyed import parse_key
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.file import FileStore
from tierkv.storage.memory import MemoryStore
from tierkv.storage.protocol import Store, check_prefix, check_ttl
from tierkv.storage.redis import RedisSettings
from tierkv.storage.redis_socket import TlsFiles

T = TypeVar("T")
# People wait longer than requests do.
_PATIENT = RedisSettings(timeout_s=10.0, connect_timeout_s=5.0)

_url = click.argument("url")
_prefix = click.option(
    "--prefix",
    default="tierkv",
    show_default=True,
    help="Only values whose name starts with this: tierkv:FINGERPRINT for one model and tenant "
    "(`tierkv storage du` lists them), tierkv:ticket for tickets.",
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


def _with_store(url: str, work: Callable[[Store], Awaitable[T]]) -> T:
    tls = click.get_current_context().find_object(TlsFiles) or TlsFiles()
    settings = StoreSettings(redis=replace(_PATIENT, tls=tls))

    async def run() -> T:
        store = open_store(url, settings, SystemClock())
        _refuse_what_is_not_there(store)
        async with store.running():
            return await work(store)

    return asyncio.run(run())


def _refuse_what_is_not_there(store: Store) -> None:
    """Looking makes nothing: a node that opens a store makes its directory. Raises ConfigError."""
    if isinstance(store, MemoryStore):
        raise ConfigError("memory:// is inside one node; ask that: `tierkv stats`")
    if isinstance(store, FileStore):
        path = Path(unquote(urlsplit(store.url).path))
        if not path.is_dir():
            raise ConfigError(f"there is no store at {store.url}: {path} is no directory")


def _checked(prefix: str) -> str:
    try:
        return check_prefix(prefix)
    except TierKVError as error:
        raise click.BadParameter(str(error), param_hint="--prefix") from error


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:  # noqa: PLR2004
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


_pem = click.Path(exists=True, dir_okay=False)


@click.group()
@click.option("--tls-ca", type=_pem, help="Who may sign the server's certificate (rediss://).")
@click.option("--tls-certificate", type=_pem, help="Ours, where the server wants to see one.")
@click.option("--tls-key", type=_pem, help="Of our certificate.")
@click.pass_context
def storage(
    context: click.Context, tls_ca: str | None, tls_certificate: str | None, tls_key: str | None
) -> None:
    """Look into a store, verify it, remove from it.

    URL is what `tierkv serve --storage` takes. The files are PEM files.
    """
    context.obj = TlsFiles(ca=tls_ca, certificate=tls_certificate, key=tls_key)


@storage.command()
@_url
@_prefix
@_json
@click.option("--limit", default=1000, show_default=True, type=click.IntRange(1))
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
    now = time.time()

    async def collect(store: Store) -> list[dict[str, str | int | float | None]]:
        rows: list[dict[str, str | int | float | None]] = []
        async for value in maintenance.values_under(store, _checked(prefix)):
            left = None if value.expires_at is None else value.expires_at - now
            if without_expiry and left is not None:
                continue
            if expires_within is not None and (left is None or left > expires_within):
                continue
            rows.append({"name": value.name, "bytes": value.num_bytes, "expires_in_s": left})
            if len(rows) >= limit:
                break
        return rows

    rows = _with_store(url, collect)
    if as_json:
        click.echo(json.dumps({"values": rows}))
        return
    for row in rows:
        left = row["expires_in_s"]
        assert isinstance(row["bytes"], int), "as made above"
        shown = "never" if left is None else f"{left:.0f} s"
        click.echo(f"{_bytes(row['bytes']):>10}  {shown:>8}  {row['name']}")


@storage.command()
@_url
@_prefix
@_json
def du(url: str, prefix: str, *, as_json: bool) -> None:
    """Values and bytes for each model and tenant (fingerprint), and for tickets."""
    groups = _with_store(url, lambda store: maintenance.usage_by_group(store, _checked(prefix)))
    if as_json:
        rows = {name: {"values": u.num_values, "bytes": u.num_bytes} for name, u in groups.items()}
        click.echo(json.dumps({"groups": rows}))
        return
    for name, used in sorted(groups.items(), key=lambda entry: -entry[1].num_bytes):
        click.echo(f"{_bytes(used.num_bytes):>10}  {used.num_values:>8}  {name}")


@storage.command()
@_url
@_prefix
@_json
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
            used = await store.usage(_checked(prefix))
            facts |= {"values": used.num_values, "bytes": used.num_bytes}
        return facts

    facts = _with_store(url, ask)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, fact in facts.items():
        click.echo(f"{name:12} {fact}")


@storage.command()
@_url
@_prefix
@_json
@click.option("--remove-damaged", is_flag=True, help="Remove what fails; nobody can use it.")
@click.option(
    "--key-file", type=_pem, help="The nodes' storage.key_file, to verify signed and sealed values."
)
def verify(
    url: str, prefix: str, *, as_json: bool, remove_damaged: bool, key_file: str | None
) -> None:
    """Read every value and check it against its name, its length and its checksum.

    Exits with 1 if a value is damaged and was not removed.
    """
    key = None if key_file is None else parse_key(Path(key_file).read_text(encoding="ascii"))

    async def check(store: Store) -> maintenance.Verified:
        found = await maintenance.verify(store, _checked(prefix), key)
        if remove_damaged:
            await store.delete([name for name, _ in found.damaged])
        return found

    found = _with_store(url, check)
    counts = {
        "whole": found.num_whole,
        "damaged": len(found.damaged),
        "keyed": found.num_keyed,
        "no blocks": found.num_others,
        "gone meanwhile": found.num_gone,
    }
    if as_json:
        click.echo(json.dumps(counts | {"names": dict(found.damaged)}))
    else:
        for name, why in found.damaged:
            click.echo(f"{name}: {why}")
        click.echo(", ".join(f"{count} {what}" for what, count in counts.items()))
    if found.damaged and not remove_damaged:
        raise SystemExit(1)


@storage.command()
@_url
@click.option("--prefix", required=True, help="Only values whose name starts with this.")
@click.option("--yes", is_flag=True, help="Do it; otherwise it is only said what would go.")
def rm(url: str, prefix: str, *, yes: bool) -> None:
    """Remove values: of one model and tenant, or of one prompt's block."""
    if not yes:
        used = _with_store(url, lambda store: store.usage(_checked(prefix)))
        click.echo(f"would remove {used.num_values} values, {_bytes(used.num_bytes)}; add --yes")
        return
    removed = _with_store(url, lambda store: maintenance.remove(store, _checked(prefix)))
    click.echo(f"removed {removed} values")


@storage.command()
@_url
@_prefix
@click.option("--ttl", required=True, type=float, metavar="SECONDS", help="To live, from now on.")
def sweep(url: str, prefix: str, ttl: float) -> None:
    """Give values that live for ever a time to live, so that what nobody uses goes."""
    try:
        check_ttl(ttl)
    except TierKVError as error:
        raise click.BadParameter(str(error), param_hint="--ttl") from error
    given = _with_store(url, lambda store: maintenance.give_ttl(store, _checked(prefix), ttl))
    click.echo(f"{given} values now expire within {ttl:g} s")
