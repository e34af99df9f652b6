"""What the commands of `tierkv storage` share: which store, which values, and how to say it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import click

from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, StoreUnavailableError, TierKVError
from tierkv.storage.factory import StoreSettings, open_store, urls_in
from tierkv.storage.file import FileStore
from tierkv.storage.memory import MemoryStore
from tierkv.storage.protocol import Store, StoredValue, check_prefix
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import TlsFiles
from tierkv.storage.resilient import ResilienceSettings

T = TypeVar("T")
# People wait longer than requests do, also for each of several stores.
PATIENT = RedisSettings(timeout_s=10.0, connect_timeout_s=5.0)
PATIENT_PARTS = ResilienceSettings(timeout_s=30.0, write_timeout_s=30.0)

url_argument = click.argument("url")
PREFIX_MEANS = (
    "Only values whose name starts with this: tierkv for all that nodes call so (handoff.prefix), "
    "tierkv:FINGERPRINT for one model and tenant (`tierkv storage du` lists them), tierkv:ticket "
    "for tickets."
)
prefix_option = click.option("--prefix", default="tierkv", show_default=True, help=PREFIX_MEANS)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
within_option = click.option(
    "--expires-within",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Only values that will be gone by then: those that nobody has used for longest.",
)
forever_option = click.option(
    "--without-expiry", is_flag=True, help="Only values that live for ever."
)


def with_store(url: str, prefix: str, work: Callable[[Store], Awaitable[T]]) -> T:
    """What `work` returns; on stderr, where that was less than the whole."""
    tls = click.get_current_context().find_object(TlsFiles) or TlsFiles()
    settings = StoreSettings(redis=replace(PATIENT, tls=tls), resilience=PATIENT_PARTS)
    store = open_store(url, settings, SystemClock())
    if isinstance(store, MemoryStore):
        raise ConfigError("memory:// is inside one node; ask that: `tierkv stats`")
    parts = [open_store(one, settings, SystemClock()) for one in urls_in(url)]
    for part in parts:
        _refuse_what_is_not_there(part)

    async def run() -> T:
        async with store.running():
            found = await work(store)
        for part in parts:
            await _say_if_it_is_a_share(part, prefix)
        return found

    return asyncio.run(run())


def with_each_store(
    url: str, prefix: str, work: Callable[[Store], Awaitable[T]]
) -> tuple[Sequence[T], int]:
    """What `work` returns of each store that `url` is made of and that outlives a process, and of
    how many others it was told on stderr why not. Raises if that is all of them."""
    found: list[T] = []
    failures: list[TierKVError] = []
    for part in [part for part in urls_in(url) if part != "memory://"] or [url]:
        try:
            found.append(with_store(part, prefix, work))
        except TierKVError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    for failure in failures:
        click.echo(f"error: {failure}", err=True)
    return found, len(failures)


def _refuse_what_is_not_there(store: Store) -> None:
    """Looking makes nothing: a node that opens a store makes its directory. Raises ConfigError."""
    if isinstance(store, FileStore) and not store.is_made():
        raise ConfigError(
            f"there is no store at {store.url}: name the directory that a node was given, or "
            "start one with it"
        )


async def _say_if_it_is_a_share(store: Store, prefix: str) -> None:
    if not isinstance(store, RedisStore):
        return
    with suppress(StoreUnavailableError):  # told by `work`, or a copy that it could do without
        async with store.running():
            if await store.is_of_a_cluster(checked(prefix)):
                click.echo(
                    f"{store.url} is one server of a cluster, and this only what that server has: "
                    "redis+cluster:// asks all of them",
                    err=True,
                )


def checked(prefix: str) -> str:
    """The first field is meant whole: `tierkv` is not what another deployment calls `tierkv2`."""
    try:
        return check_prefix(prefix if ":" in prefix else f"{prefix}:")
    except TierKVError as error:
        raise click.BadParameter(str(error), param_hint="--prefix") from error


def living(expires_within: float | None, *, without_expiry: bool) -> Callable[[StoredValue], bool]:
    """Whether a value is one of those that --expires-within and --without-expiry ask for."""
    if expires_within is not None and math.isnan(expires_within):
        raise click.BadParameter("not a number", param_hint="--expires-within")
    until = math.inf if expires_within is None else time.time() + expires_within

    def is_meant(value: StoredValue) -> bool:
        if value.expires_at is None:
            return expires_within is None
        return not without_expiry and value.expires_at <= until

    return is_meant


def say_if_none(count: int, prefix: str) -> None:
    if not count:
        click.echo(
            f"no such values under {checked(prefix)} (--prefix, or handoff.prefix of the nodes)",
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
