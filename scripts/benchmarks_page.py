"""docs/benchmarks.md, made from the results in docs/results/.

    python scripts/benchmarks_page.py                     write the page
    python scripts/benchmarks_page.py NAME FILE HARDWARE  keep FILE, which `--json` printed, first

A result is what a benchmark printed with `--json` and, under `about`, the machine and the day. The
page shows the rows of a result that its claim selects.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

_THOUSAND = 1000

_INTRO = """# Benchmarks

Each script in `benchmarks/` tests one statement: one run measures tierkv and alternatives in turn.
`--quick` takes about a minute; `--json` prints one object with `rows`.

- A figure is a median; *spread* is (largest - smallest) / median of the repetitions.
- *ratio* is the row's figure divided by that of the measurement *compared with*, from the same run.
  Some of these measurements have no row here; names are shortened to what differs.
- *target* is the largest ratio that the statement allows; without a ratio, the largest figure.

`scripts/benchmarks_page.py` makes this page from `docs/results/`."""


@dataclass(frozen=True)
class Claim:
    """A section of the page, out of claims.toml.

    Attributes:
        title: Heading; other pages link to it.
        says: The claim, and the terms of its rows.
        command: Command that measures it again.
        rows: Regular expression; rows whose name it finds are shown.
    """

    title: str
    says: str
    command: str
    rows: str = ""


def claims() -> dict[str, Claim]:
    """Return the sections of the page, by the name of their result."""
    tables = tomllib.loads((RESULTS / "claims.toml").read_text(encoding="utf-8"))
    return {name: Claim(**table) for name, table in tables.items()}


def page() -> str:
    """Return the text of docs/benchmarks.md."""
    parts = [_INTRO]
    for name, claim in claims().items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(_section(claim, json.loads(path.read_text(encoding="utf-8"))))
    return "\n\n".join(parts) + "\n"


def _section(claim: Claim, result: dict[str, Any]) -> str:
    about = result["about"]
    lines = [
        f"## {claim.title}",
        "",
        claim.says,
        "",
        f"`{claim.command}`; {about['hardware']}.",
        "",
        "| | median | spread | compared with | ratio | target |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for row in result["rows"]:
        if re.search(claim.rows, row["what"]):
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.3g}"
            target = "" if row["most"] is None else f"{row['most']:g}"
            lines.append(
                f"| {row['what'].strip()} | {_number(row['value'])} {row['unit']} | "
                f"{row['spread']:.0%} | {_differing(row)} | {ratio} | {target} |"
            )
    return "\n".join(lines)


def _differing(row: dict[str, Any]) -> str:
    """Return the name of the row compared with, without the words before ": " that both share."""
    against = row["against"] or ""
    shared, colon, rest = against.rpartition(": ")
    return rest if colon and row["what"].startswith(shared + colon) else against


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _THOUSAND else f"{value:.3g}"


def keep(name: str, printed: Path, hardware: str) -> None:
    """Store what a benchmark printed as the result of a claim.

    Args:
        name: A table of claims.toml.
        printed: File with the JSON object that the benchmark printed.
        hardware: The machine, for the reader of the page.
    """
    result = json.loads(printed.read_text(encoding="utf-8"))
    claim = claims()[name]
    about = {
        "title": claim.title,
        "command": claim.command,
        "hardware": hardware,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
    }
    text = json.dumps({"about": about, "rows": result["rows"]}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    PAGE.write_text(page(), encoding="utf-8")
