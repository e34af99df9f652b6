"""What every benchmark here shares: rows, medians, and how they are printed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside what it is measured against in the same run.

    value: a median, in `unit`. spread: (max - min) / median of the repetitions.
    ratio: value / the value of `against`, None where nothing is compared.
    """

    what: str
    value: float
    unit: str
    spread: float
    against: str | None = None
    ratio: float | None = None


def row(what: str, samples: Sequence[float], unit: str, *, against: Row | None = None) -> Row:
    """The median of `samples`, compared with another row of the same run."""
    median = statistics.median(samples)
    spread = (max(samples) - min(samples)) / median if median else 0.0
    if against is None:
        return Row(what, median, unit, spread)
    return Row(what, median, unit, spread, against.what, median / against.value)


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print a table, or one JSON object with `rows`."""
    if as_json:
        print(json.dumps({"rows": [asdict(one) for one in rows]}))
        return
    width = max(len(one.what) for one in rows)
    print(f"{'':{width}}  {'median':>10} {'unit':8} {'spread':>7}  ratio")
    for one in rows:
        compared = f"{one.ratio:6.2f} x {one.against}" if one.ratio is not None else ""
        print(f"{one.what:{width}}  {one.value:10.3f} {one.unit:8} {one.spread:6.0%}  {compared}")
