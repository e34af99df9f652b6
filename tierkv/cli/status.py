"""`tierkv status`: the health and the counts of nodes and gateways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families

from tierkv.api.settings import masked_url
from tierkv.cli.output import json_option, print_json
from tierkv.cli.target import ask_node, default_url, tls_options
from tierkv.client import AsyncClient, CallError, Retries
from tierkv.errors import TierKVError
from tierkv.http.problems import NotReadyError
from tierkv.tasks import run_until_stopped, task_group

_TIMEOUT_S = 5.0  # for each call of a node; a later answer counts as none
_ONCE = Retries(attempts=1)
_BAR = 20
_GATEWAY = "gateway"
_READY = ("ok", "degraded")
_UNITS = ("", "k", "M", "G", "T")
_THOUSAND = 1000


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a node or gateway at one time.

    Attributes:
        url: its address, with secrets masked.
        name: the name that it reports.
        role: prefill, decode, both or gateway.
        version: its version of tierkv.
        health: ok, degraded, not ready, or no answer.
        detail: the reason of the health; "" for none.
        levels: number of used blocks and number of all blocks, by tier.
        now: numbers of running and of waiting requests.
        totals: counts since its start, by name, such as prompt tokens.
        parts: the state of each dependency of a node, or of each node of a gateway, by name.
    """

    url: str
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

    def plain(self) -> dict[str, Any]:
        shown = asdict(self)
        shown["levels"] = {
            tier: {"used": used, "capacity": capacity}
            for tier, (used, capacity) in self.levels.items()
        }
        return shown


async def read_state(url: str, ca: Path | None, cert: Path | None) -> Seen:
    """Ask a node or gateway for its state.

    If the call fails, the returned state contains the error's text, and nothing is raised.

    Args:
        url: address of the node or gateway.
        ca: PEM file of the authority that signed its certificate; None for the system's
            authorities.
        cert: PEM file of this client's certificate and key; None for none.
    """
    seen = Seen(masked_url(url))

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


def lines(seen: Seen) -> list[tuple[str, str]]:
    """Return the lines that `tierkv status` prints for a node or a gateway: (label, text)."""
    rows = [(tier, _level(*level)) for tier, level in seen.levels.items()]
    parts = {part: state for part, state in seen.parts.items() if _is_shown(seen, part, state)}
    rows += [(_short(part), state) for part, state in parts.items()]
    if seen.now:
        counts = (f"{count} {state}" for state, count in seen.now.items())
        rows.append(("requests", ", ".join(counts)))
    for what, names in (_GATEWAY_ROWS if seen.role == _GATEWAY else _NODE_ROWS).items():
        shown = ", ".join(
            f"{_count(seen.totals[name], name)} {word}"
            for name, word in names.items()
            if name in seen.totals
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


def _is_shown(seen: Seen, name: str, state: str) -> bool:
    return seen.role == _GATEWAY or name == "storage" or not state.startswith("ok")


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


def _head(seen: Seen) -> str:
    who = " ".join(word for word in (seen.role, seen.name) if word and word != seen.role)
    known = f"{who or seen.role or '?'}  {seen.url}"
    return f"{known}  {seen.health}{f': {seen.detail}' if seen.detail else ''}"


def _text(seen: Seen) -> str:
    rows = lines(seen) if seen.is_ready else []
    width = max((len(what) for what, _ in rows), default=0)
    return "\n".join([_head(seen), *(f"  {what:{width}}  {shown}" for what, shown in rows)])


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@tls_options
@json_option
def status(urls: tuple[str, ...], *, ca: Path | None, cert: Path | None, as_json: bool) -> None:
    """Print the health of nodes and gateways.

    URL is the address of a node or gateway, as for --url of `tierkv stats`. The default is
    TIERKV_URL, or http://127.0.0.1:8100. If a node requires a token, set the variable TIERKV_TOKEN.

    The command exits with 1 if a node or gateway is not ready or does not answer. A degraded node
    is ready.
    """
    found = run_until_stopped(_states(urls or (default_url(),), ca, cert))
    if as_json:
        print_json([seen.plain() for seen in found])
    else:
        click.echo("\n\n".join(_text(seen) for seen in found))
    missing = [seen.url for seen in found if not seen.is_ready]
    if missing:
        raise CallError(f"not ready: {', '.join(missing)}")


async def _states(urls: Sequence[str], ca: Path | None, cert: Path | None) -> list[Seen]:
    async with task_group() as group:
        tasks = [group.create_task(read_state(url, ca, cert)) for url in urls]
    return [task.result() for task in tasks]
