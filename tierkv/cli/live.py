"""`tierkv status` and `tierkv top`: how nodes and gateways are, once or again and again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families

from tierkv.api.settings import masked_url
from tierkv.cli.output import json_option, print_json
from tierkv.cli.target import ask_node, default_url, tls_options
from tierkv.client import AsyncClient, CallError, Retries
from tierkv.client.http import node_url
from tierkv.errors import TierKVError
from tierkv.http.problems import NotReadyError
from tierkv.tasks import run_until_stopped

_TIMEOUT_S = 5.0  # for all questions to one node: after it the node counts as silent
_ONCE = Retries(attempts=1)
_BAR = 20
_GATEWAY = "gateway"
_READY = ("ok", "degraded")
_UNITS = ("", "k", "M", "G", "T")
_THOUSAND = 1000


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at a node or gateway.

    Attributes:
        health: ok, degraded, not ready, or no answer.
        detail: reason of the health.
        levels: used and available blocks, by tier.
        now: counts that rise and fall.
        totals: counts since the start.
        parts: dependencies of a node, or nodes of a gateway, each with its state.
        at: time of the look, in seconds of this machine's clock.
    """

    url: str
    at: float = 0.0
    name: str = ""
    role: str = ""
    version: str = ""
    health: str = "no answer"
    detail: str = ""
    levels: dict[str, tuple[int, int]] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return self.health in _READY

    def rates(self, before: Seen | None) -> dict[str, float] | None:
        """Return the totals per second since `before`; None if there is nothing to compare with."""
        if before is None or not (self.totals and before.totals) or self.at <= before.at:
            return None
        return {
            name: max(total - before.totals.get(name, 0.0), 0.0) / (self.at - before.at)
            for name, total in self.totals.items()
        }

    def plain(self, before: Seen | None = None) -> dict[str, Any]:
        shown = asdict(self)
        del shown["at"]
        shown["levels"] = {
            tier: {"used": used, "capacity": capacity}
            for tier, (used, capacity) in self.levels.items()
        }
        rates = self.rates(before)
        return shown if rates is None else shown | {"per_second": rates}


async def look(url: str, ca: Path | None, cert: Path | None) -> Seen:
    """Ask one. Never raises a TierKVError: that is an answer, too."""
    seen = Seen(masked_url(url), time.monotonic())

    async def ask(client: AsyncClient) -> Seen:
        version = await client.version()
        known = replace(seen, name=version.name, role=version.role, version=version.version)
        try:
            ready = await client.readyz()
        except NotReadyError as error:
            return replace(known, health="not ready", detail=str(error))
        parts = {
            name: f"{part.status}: {part.detail}" if part.detail else part.status
            for name, part in (ready.parts or {}).items()
        }
        known = replace(known, health=ready.status, parts=parts)
        return await (_of_gateway if version.role == _GATEWAY else _of_node)(client, known)

    try:
        return await ask_node(url, ask, ca=ca, cert=cert, timeout_s=_TIMEOUT_S, retries=_ONCE)
    except TierKVError as error:
        return replace(seen, detail=str(error))


async def _of_node(client: AsyncClient, known: Seen) -> Seen:
    stats = await client.stats()
    requests, storage, handoff = stats.requests, stats.storage, stats.handoff
    hits = {
        "device": requests.device_hit_tokens,
        "host": requests.host_hit_tokens,
        "storage": requests.storage_hit_tokens,
        "direct": requests.direct_hit_tokens,
    }
    totals: dict[str, float] = {
        "requests": requests.admitted_requests,
        "prompt tokens": requests.prompt_tokens,
        **{f"{tier} hit tokens": count for tier, count in hits.items()},
        "computed tokens": max(requests.prompt_tokens - sum(hits.values()), 0),
        "loaded bytes": stats.loaded_bytes,
        "offloaded bytes": stats.offloaded_bytes,
        "fetched bytes": storage.fetched_bytes if storage else 0,
        "flushed bytes": storage.flushed_bytes if storage else 0,
        "evicted device blocks": stats.tiers.evicted_device_blocks,
        "evicted host blocks": stats.tiers.evicted_host_blocks,
        "published prompts": handoff.published_prompts,
        "claimed prompts": handoff.claimed_prompts,
        "refused claims": handoff.refused_claims,
    }
    levels = {pool.tier: (pool.used, pool.capacity) for pool in (stats.device, stats.host)}
    now = {"running": stats.running_requests, "waiting": stats.waiting_requests}
    return replace(known, levels=levels, now=now, totals=totals)


async def _of_gateway(client: AsyncClient, known: Seen) -> Seen:
    samples: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(await client.metrics()):
        for sample in family.samples:
            label = next(iter(sample.labels.values()), "")
            samples.setdefault(sample.name, {})[label] = sample.value
    prompts = samples.get("tierkv_gateway_prompts", {})
    ended = samples.get("tierkv_gateway_requests_total", {})
    totals = {
        "requests": sum(ended.values()),
        **{f"requests {how}".replace("_", " "): count for how, count in ended.items()},
        "generated tokens": sum(samples.get("tierkv_gateway_tokens_total", {}).values()),
        "failed attempts": sum(samples.get("tierkv_gateway_failed_attempts_total", {}).values()),
    }
    now = {state: int(prompts.get(state, 0)) for state in ("running", "waiting")}
    return replace(known, now=now, totals=totals)


def lines(seen: Seen, before: Seen | None = None) -> list[tuple[str, str]]:
    """Return (name, value) pairs for a person to read, with rates if there is a `before`."""
    rows = [(tier, _level(*level)) for tier, level in seen.levels.items()]
    news = {part: state for part, state in seen.parts.items() if _is_news(seen, part, state)}
    rows += [(_short(part), state) for part, state in news.items()]
    if seen.now:
        rows.append(("requests", _and(f"{count} {state}" for state, count in seen.now.items())))
    rates = seen.rates(before)
    counts = seen.totals if rates is None else rates
    per = "" if rates is None else "/s"
    for what, names in (_GATEWAY_ROWS if seen.role == _GATEWAY else _NODE_ROWS).items():
        shown = _and(
            f"{_count(counts[name], name)}{per} {word}"
            for name, word in names.items()
            if name in counts
        )
        rows.append((what, shown))
    return rows


_NODE_ROWS: Mapping[str, Mapping[str, str]] = {
    "prompts": {"requests": "admitted", "prompt tokens": "tokens"},
    "tokens from": {
        "device hit tokens": "device",
        "host hit tokens": "host",
        "storage hit tokens": "storage",
        "direct hit tokens": "other nodes",
        "computed tokens": "computed",
    },
    "moved": {
        "loaded bytes": "loaded",
        "offloaded bytes": "offloaded",
        "fetched bytes": "fetched",
        "flushed bytes": "flushed",
    },
    "evicted": {"evicted device blocks": "device blocks", "evicted host blocks": "host blocks"},
    "hand-offs": {
        "published prompts": "published",
        "claimed prompts": "claimed",
        "refused claims": "refused",
    },
}
_GATEWAY_ROWS: Mapping[str, Mapping[str, str]] = {
    "completions": {
        "requests ok": "ok",
        "requests client error": "client errors",
        "requests server error": "server errors",
        "requests client gone": "left",
    },
    "tokens": {"generated tokens": "generated"},
    "attempts": {"failed attempts": "failed at a node"},
}


def _is_news(seen: Seen, name: str, state: str) -> bool:
    """Return whether a part is shown: all nodes of a gateway.

    Of a node, storage and faulty parts.
    """
    return seen.role == _GATEWAY or name == "storage" or not state.startswith("ok")


def _and(shown: Iterable[str]) -> str:
    return ", ".join(shown)


def _short(name: str) -> str:
    return name if len(name) <= _BAR + 10 else f"{name[: _BAR + 7]}..."


def _level(used: int, capacity: int) -> str:
    share = used / capacity if capacity else 0.0
    full = round(share * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {share:4.0%}  {used} of {capacity} blocks"


def _count(count: float, name: str) -> str:
    is_bytes = name.endswith("bytes")
    for unit in _UNITS:
        if count < _THOUSAND:
            break
        if unit != _UNITS[-1]:
            count /= _THOUSAND
    number = f"{count:.0f}" if unit == "" and count == int(count) else f"{count:.3g}"
    return f"{number} {unit}B" if is_bytes else f"{number}{unit}"


def head(seen: Seen) -> str:
    who = " ".join(word for word in (seen.role, seen.name) if word and word != seen.role)
    known = f"{who or seen.role or '?'}  {seen.url}"
    return f"{known}  {seen.health}{f': {seen.detail}' if seen.detail else ''}"


def _text(seen: Seen, before: Seen | None) -> str:
    rows = lines(seen, before) if seen.is_ready else []
    width = max((len(what) for what, _ in rows), default=0)
    return "\n".join([head(seen), *(f"  {what:{width}}  {shown}" for what, shown in rows)])


_urls = click.argument("urls", nargs=-1, metavar="[URL]...")


@click.command()
@_urls
@tls_options
@json_option
def status(urls: tuple[str, ...], *, ca: Path | None, cert: Path | None, as_json: bool) -> None:
    """Print the health of nodes and gateways.

    URL is the address of a node or gateway, as for --url of `tierkv stats`. The default is
    TIERKV_URL, or http://127.0.0.1:8100. If a node requires a token, set the variable TIERKV_TOKEN.

    Exits with 1 if a node or gateway is not ready or does not answer. A degraded node is ready.
    """
    found = run_until_stopped(_look_at(urls or (default_url(),), ca, cert))
    if as_json:
        print_json([seen.plain() for seen in found])
    else:
        click.echo("\n\n".join(_text(seen, None) for seen in found))
    missing = [seen.url for seen in found if not seen.is_ready]
    if missing:
        raise CallError(f"not ready: {', '.join(missing)}")


async def _look_at(urls: Sequence[str], ca: Path | None, cert: Path | None) -> list[Seen]:
    return await asyncio.gather(*(look(url, ca, cert) for url in urls))


@click.command()
@_urls
@tls_options
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two updates.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    help="End after this number of updates.  [default: end on q or Ctrl-C only]",
)
@json_option
def top(
    urls: tuple[str, ...],
    *,
    ca: Path | None,
    cert: Path | None,
    interval: float,
    count: int | None,
    as_json: bool,
) -> None:
    """Watch nodes and gateways live, until q or Ctrl-C.

    URL is the address of a node or gateway, as for `tierkv status`. Rates are per second since the
    last update. Nodes for which the terminal has no room share one line. If stdout is not a
    terminal, each update is printed below the last one; with --json each update is one line with a
    JSON array.
    """
    asked = [node_url(url) for url in urls or (default_url(),)]  # one that is none never answers

    async def watch() -> None:
        looks = _looks(asked, ca, cert, interval)
        if as_json:
            await _print_each(looks, count, _as_json)
        elif sys.stdout.isatty():
            await _show(looks, count)
        else:
            await _print_each(looks, count, _as_text)

    with suppress(KeyboardInterrupt):  # which is how it is meant to end
        run_until_stopped(watch())


_Look = list[tuple[Seen, Seen | None]]  # of each, and as it was before


async def _looks(
    urls: Sequence[str], ca: Path | None, cert: Path | None, interval_s: float
) -> AsyncIterator[_Look]:
    """Yield the states of the nodes, the first after one interval, when there are rates."""
    before = await _look_at(urls, ca, cert)
    while True:
        await asyncio.sleep(interval_s)
        found = await _look_at(urls, ca, cert)
        yield list(zip(found, before, strict=True))
        before = found


async def _print_each(
    looks: AsyncIterator[_Look], count: int | None, shape: Callable[[_Look], str]
) -> None:
    done = 0
    async for one in looks:
        click.echo(shape(one))
        done += 1
        if done == count:
            return


def _as_json(one: _Look) -> str:
    return json.dumps([seen.plain(before) for seen, before in one])


def _as_text(one: _Look) -> str:
    return "\n\n".join(_text(seen, before) for seen, before in one) + "\n"


async def _show(looks: AsyncIterator[_Look], count: int | None) -> None:
    from rich.console import Console, Group  # noqa: PLC0415 - 60 ms that other commands do without
    from rich.live import Live  # noqa: PLC0415
    from rich.panel import Panel  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    colours = {"ok": "green", "degraded": "yellow"}

    def panel(seen: Seen, before: Seen | None) -> Panel:
        grid = Table.grid(padding=(0, 2))
        for what, shown in lines(seen, before) if seen.is_ready else [("", seen.detail)]:
            grid.add_row(Text(what, style="bold"), Text(shown))
        return Panel(grid, title=line(replace(seen, detail="")), title_align="left")

    def line(seen: Seen) -> Text:
        style = colours.get(seen.health, "red")
        return Text(head(seen), style=style, no_wrap=True, overflow="ellipsis")

    def fitting(one: _Look, console: Console) -> Group:
        shown: list[Panel | Text] = [panel(*pair) for pair in one]
        heights = [len(console.render_lines(each)) for each in shown]
        for at in reversed(range(len(shown))):
            if sum(heights) <= console.height:
                break
            shown[at], heights[at] = line(one[at][0]), 1
        return Group(*shown)

    done = 0
    with _ended_by_q(), Live(Text("looking ..."), screen=True, auto_refresh=False) as live:
        async for one in looks:
            live.update(fitting(one, live.console), refresh=True)
            done += 1
            if done == count:
                return


@contextmanager
def _ended_by_q() -> Iterator[None]:
    """Make the key q end the body as Ctrl-C does, and echo no key."""
    if not sys.stdin.isatty():
        yield
        return
    keys = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        pressed = os.read(keys, 64)
        if b"q" in pressed.lower():
            signal.raise_signal(signal.SIGINT)
        elif not pressed:  # the terminal has gone
            loop.remove_reader(keys)

    before = termios.tcgetattr(keys)
    tty.setcbreak(keys, termios.TCSADRAIN)  # what was typed by now counts
    loop.add_reader(keys, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keys)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
