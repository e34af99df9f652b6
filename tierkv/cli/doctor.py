"""`tierkv doctor`: limits and speeds of GPUs, memory and store on this machine, and remedies."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import click

from tierkv.api.settings import NO_STORAGE, NodeSettings, default_storage_url
from tierkv.cli.output import json_option, print_json, progress
from tierkv.clock import SystemClock, is_skew, skew_in_words
from tierkv.config import load
from tierkv.errors import StoreUnavailableError, TierKVError
from tierkv.gateway.settings import GatewaySettings
from tierkv.gpu.doctor import (
    Finding,
    Verdict,
    copy_finding,
    gpu_findings,
    machine_findings,
)
from tierkv.storage.factory import open_store
from tierkv.storage.protocol import GetItem, GetStatus, PutItem, PutStatus, Store
from tierkv.tasks import run_until_stopped

_VALUE_BYTES = 1 << 20  # about a block of a model of 8B parameters
_NUM_VALUES = 32  # a node moves as many blocks at once
_ROUNDS = 3
_DEADLINE_S = 20.0
_TTL_S = 60.0  # removes the values if this process is killed


@click.command()
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="The config file of the node."
)
@click.option(
    "--storage",
    "url",
    metavar="URL",
    help=(
        "The store to measure, or none.  [default: the store that `tierkv serve` would use here]"
    ),
)
@json_option
def doctor(*, config: Path | None, url: str | None, as_json: bool) -> None:
    """Measure this machine's GPUs, memory and store, and print remedies for faults.

    The command writes 32 MiB to the store three times, reads them back and removes them. It exits
    with 1 if a GPU, its driver or CuPy is missing or unusable, or the store cannot be reached.
    """
    given = {} if url is None else {"TIERKV_STORAGE__URL": url}
    settings = load(NodeSettings, config, os.environ | given, other_kind=GatewaySettings)
    with progress("measuring"):
        findings = [*machine_findings(), copy_finding(), *gpu_findings()]
        findings += _store_findings(settings, os.environ)
    if as_json:
        shown = [
            {"what": one.what, "value": one.value, "verdict": one.verdict.value}
            | ({"remedy": one.remedy} if one.remedy else {})
            for one in findings
        ]
        print_json({"findings": shown})
    width = max(len(finding.what) for finding in findings)
    for finding in () if as_json else findings:
        mark = "" if finding.verdict is Verdict.OK else f"  [{finding.verdict.value}]"
        click.echo(f"{finding.what:{width}}  {finding.value}{mark}")
        if finding.remedy:
            click.echo(f"{'':{width}}  -> {finding.remedy}")
    if any(finding.verdict is Verdict.BAD for finding in findings):
        raise click.exceptions.Exit(1)


def _store_findings(settings: NodeSettings, environ: Mapping[str, str]) -> list[Finding]:
    url = settings.storage.url or default_storage_url(environ)
    if url == NO_STORAGE:
        return []
    store = open_store(url, settings.storage, SystemClock())
    try:
        written, read, clock = run_until_stopped(_measured(store))
    except TierKVError as error:
        remedy = "repair the store or its address: a node does not start without its store"
        return [Finding("store", str(error), Verdict.BAD, remedy)]
    except TimeoutError:
        slow = f"{store.url} did not write and read {_NUM_VALUES} MiB within {_DEADLINE_S:g} s"
        return [
            Finding(
                "store",
                slow,
                Verdict.WARNING,
                "use a faster store, since computing is probably faster than this one",
            )
        ]
    shown = f"{written:.2f} GB/s written, {read:.2f} GB/s read, {store.url}"
    return [Finding("store", shown), clock]


def _clock_finding(skew_s: float | None) -> Finding:
    if skew_s is None:
        value = "the store has no clock: tickets expire by the clocks of the nodes"
        return Finding("clock", value, remedy="keep the clocks of all nodes together by NTP")
    if is_skew(skew_s):
        value = f"the store has a clock, and {skew_in_words(skew_s)}"
        return Finding("clock", value, Verdict.WARNING, "set this machine's clock by NTP")
    return Finding("clock", f"{abs(skew_s):.2f} s from the store's")


async def _measured(store: Store) -> tuple[float, float, Finding]:
    """Write, read and remove values to measure a store.

    Return GB/s written, GB/s read, and a finding about the difference between this machine's clock
    and the store's.
    """
    name = f"tierkv:doctor:{secrets.token_hex(8)}"
    value = memoryview(bytearray(os.urandom(_VALUE_BYTES)))
    slots = [memoryview(bytearray(_VALUE_BYTES)) for _ in range(_NUM_VALUES)]
    took: dict[str, list[float]] = {"write": [], "read": []}
    async with store.running(), asyncio.timeout(_DEADLINE_S):
        for number in range(_ROUNDS):
            names = [f"{name}:{number}:{at}" for at in range(_NUM_VALUES)]
            try:
                began = time.perf_counter()
                put = await store.put([PutItem(one, (value,), ttl_s=_TTL_S) for one in names])
                took["write"].append(time.perf_counter() - began)
                began = time.perf_counter()
                got = await store.get_into(
                    [GetItem(one, (slot,)) for one, slot in zip(names, slots, strict=True)]
                )
                took["read"].append(time.perf_counter() - began)
            finally:
                await store.delete(names)
            for outcome in put:
                if outcome.status not in {PutStatus.STORED, PutStatus.EXISTED}:
                    raise StoreUnavailableError(f"{store.url} refuses writes: {outcome.reason}")
            for read in got:
                if read.status is not GetStatus.HIT or read.num_bytes != _VALUE_BYTES:
                    why = read.reason or "a value that was just written is missing"
                    raise StoreUnavailableError(
                        f"{store.url} does not return written values: {why}"
                    )
        clock = _clock_finding(store.health.clock_skew_s)
    num_bytes = _VALUE_BYTES * _NUM_VALUES
    return num_bytes / min(took["write"]) / 1e9, num_bytes / min(took["read"]) / 1e9, clock
