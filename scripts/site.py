"""What of the documentation's site is made when it is built, see mkdocs.yml: the front page from
README.md, settings and routes from their types, plots from the JSON that benchmarks printed."""

from __future__ import annotations

import fnmatch
import html
import inspect
import json
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tierkv.api.node import Node
from tierkv.api.server import routes
from tierkv.api.settings import NodeSettings
from tierkv.config import load, settings_in
from tierkv.gateway.settings import GatewaySettings
from tierkv.http.route import document

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
_WORDS = re.compile(r"(?<![\w.])((?:[a-z*][a-z_0-9*]*, )*[a-z*][a-z_0-9*]*): ")

_SETTINGS = """`tierkv serve` and `tierkv gateway` read TOML (`--config FILE`), then environment
variables (`TIERKV_TABLE__KEY`), then options; the later wins. `tierkv config` prints what is in
force and where it comes from ([command line](../cli.md))."""
_ROUTES = """From the node's own `/openapi.json`. [HTTP, in words](../http.md) says how they are
used, [Gateway](../gateway.md) what a gateway serves. Every body may be JSON or MessagePack; every
error is `application/problem+json`."""
_PLOTS = """Ratios of one run each: a bar is a figure to what it is compared with in the same run,
and the line is that. For times shorter is better, for rates longer. What they mean is in
[benchmarks](../benchmarks.md)."""

Json = dict[str, Any]


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by MkDocs: the page of changes lies elsewhere in the checkout."""
    return markdown.replace("](../CHANGELOG.md)", "](changelog.md)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs: add the pages that are made."""
    pages = {
        "index.md": _page("README.md"),
        "changelog.md": _page("CHANGELOG.md"),
        "reference/settings.md": settings_page(),
        "reference/routes.md": routes_page(),
        "reference/plots.md": plots_page(),
        "reference/messages.md": errors_page()["messages_page"](),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def errors_page() -> Json:
    """Return the names of scripts/errors_page.py, which is no module of a package."""
    return runpy.run_path(str(ROOT / "scripts" / "errors_page.py"))


def _page(name: str) -> str:
    """A file of the checkout's top, with its links as they are from docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", text)
    return text.replace("](CHANGELOG.md)", "](changelog.md)")


# Settings


def settings_page() -> str:
    """Every setting of nodes and gateways, out of the types that hold them."""
    parts = [
        "# Settings",
        _SETTINGS,
    ]
    for title, kind in (("Nodes", NodeSettings), ("Gateways", GatewaySettings)):
        parts.append(f"## {title}")
        for table, section in settings_in(kind).items():
            if kind is GatewaySettings and table in settings_in(NodeSettings):
                parts.append(f"### {table} {{ #gateway-{table} }}\n\nAs of nodes.")
                continue
            default = getattr(kind(), table)
            parts += [f"### {table} {{ #{table} }}", _first_sentence(section), _head()]
            parts[-1] += "".join(_rows(section, default, f"{table}."))
    return "\n\n".join(parts) + "\n"


def _head() -> str:
    return "| setting | default | meaning |\n| --- | --- | --- |\n"


def _rows(section: type, default: object, at: str) -> Iterator[str]:
    meanings = meanings_of(section)
    for key, kind in settings_in(section).items():
        value = getattr(default, key)
        if isinstance(kind, type) and settings_in_or_none(kind):
            yield from _rows(kind, value, f"{at}{key}.")
            continue
        shown = msgspec.to_builtins(value)
        text = json.dumps(shown) if not isinstance(shown, dict) or shown else "none"
        yield f"| `{at}{key}` | `{text}` | {_cell(meanings.get(key, ''))} |\n"


def settings_in_or_none(kind: type) -> Json | None:
    """The fields of a type that is a table of its own."""
    is_table = isinstance(kind, type(msgspec.Struct)) or hasattr(kind, "__dataclass_fields__")
    return settings_in(kind) if is_table else None


def meanings_of(section: type) -> dict[str, str]:
    """What docstrings say of each setting, as `name: text`, or `name_*: text` for several."""
    names = [*get_type_hints(section)]  # those that are fixed end a meaning, too
    found: dict[str, str] = {}
    for kind in section.__mro__:
        text = " ".join(inspect.cleandoc(kind.__dict__.get("__doc__") or "").split())
        of_settings = [one for one in _WORDS.finditer(text) if _named(one[1], names)]
        ends = [one.start() for one in of_settings[1:]] + [len(text)]
        for one, end in zip(of_settings, ends, strict=False):
            for name in _named(one[1], names):
                found.setdefault(name, text[one.end() : end].strip())
    return found


def _named(words: str, names: list[str]) -> list[str]:
    """The settings that "a, b_*" means."""
    return [name for word in words.split(", ") for name in fnmatch.filter(names, word)]


def _first_sentence(section: type) -> str:
    text = inspect.cleandoc(section.__doc__ or "")
    first = " ".join(text.split("\n\n")[0].split())
    return "" if _WORDS.match(first) else first


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|")


# Routes


def routes_page() -> str:
    """Every route of a node, out of its OpenAPI document."""
    small = [("storage", "url", "none"), ("cache", "device_blocks", 8), ("cache", "host_blocks", 8)]
    settings = load(NodeSettings, None, {}, small)
    node = Node(settings, environ={})
    try:
        table = routes(node, None)
    finally:
        node.device.close()
    told = document([row for row in table if row.path != "/openapi.json"])
    parts = [
        "# HTTP routes of a node",
        _ROUTES,
        "| route | who | does |\n| --- | --- | --- |\n"
        + "".join(
            f"| `{method.upper()} {path}` | {row['x-access']} | {_cell(row['summary'])} |\n"
            for path, rows in told["paths"].items()
            for method, row in rows.items()
        ),
    ]
    for name, schema in told["components"]["schemas"].items():
        parts.append(_schema(name, schema))
    return "\n\n".join(parts) + "\n"


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    if "properties" not in schema:
        return f"## {name}\n\n{_type(schema)}"
    rows = "".join(
        f"| `{field}` | {_type(told)} | {'yes' if field in schema.get('required', ()) else ''} |\n"
        for field, told in schema["properties"].items()
    )
    about = _cell(" ".join(schema.get("description", "").split()))
    return f"## {name}\n\n{about}\n\n| field | type | required |\n| --- | --- | --- |\n{rows}"


def _type(told: Mapping[str, Any]) -> str:
    if "$ref" in told:
        name = told["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in told:
        return " or ".join(map(_type, told["anyOf"]))
    if told.get("type") == "array" and isinstance(told.get("items"), dict):
        return f"list of {_type(told['items'])}"
    if "enum" in told:
        return ", ".join(f"`{value}`" for value in told["enum"])
    return str(told.get("type", "any"))


# Plots

_BAR_PX, _ROW_PX, _TEXT_PX, _AFTER_PX = 240, 24, 420, 330


def plots_page() -> str:
    """Bars of each file under docs/results, which holds what a benchmark printed with --json, and
    under `about` when, where and by which command."""
    parts = [
        "# Benchmarks, plotted",
        _PLOTS,
    ]
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in told["rows"] if row.get("ratio")]
        about = told["about"]
        parts += [
            f"## {about['title']}",
            f"`{about['command']}`, {about['hardware']}, {about['date']}.",
            bars(rows),
        ]
    return "\n\n".join(parts) + "\n"


def bars(rows: list[Json]) -> str:
    """An SVG of the rows' ratios, with a line at 1."""
    most = max([1.25, *(min(row["ratio"], 6.0) for row in rows)])
    one, height = _TEXT_PX + _BAR_PX / most, _ROW_PX * len(rows) + 8
    lines = []
    for at, row in enumerate(rows):
        y, width = at * _ROW_PX + 4, _BAR_PX * min(row["ratio"], most) / most
        unit, after = html.escape(f"{row['value']:.4g} {row['unit']}"), _TEXT_PX + width + 6
        what, against = html.escape(row["what"]), html.escape(row["against"] or "")
        lines.append(
            f'<text x="{_TEXT_PX - 8}" y="{y + 15}" text-anchor="end">{what}</text>'
            f'<rect x="{_TEXT_PX}" y="{y + 3}" width="{width:.1f}" height="16" rx="2">'
            f"<title>{unit}, {row['ratio']:.3f} of {against}</title></rect>"
            f'<text x="{after:.1f}" y="{y + 15}">{row["ratio"]:.2f} x {against}</text>'
        )
    return (
        f'<svg class="bars" viewBox="0 0 {_TEXT_PX + _BAR_PX + _AFTER_PX} {height}" role="img" '
        'style="font: 12px sans-serif; fill: currentColor; width: 100%">'
        "<style>.bars rect { fill: #26a69a }</style>"
        f'{"".join(lines)}<line x1="{one:.1f}" x2="{one:.1f}" y1="0" y2="{height}" '
        'stroke="currentColor" stroke-dasharray="4 3"/></svg>'
    )
