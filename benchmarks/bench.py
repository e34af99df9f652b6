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
    least, least_ratio: the same of the fastest repetition each, which other work on the machine
        disturbed least.
    most: the target: what ratio, or value where there is no ratio, is to be at most.
    """

    what: str
    value: float
    unit: str
    spread: float
    against: str | None = None
    ratio: float | None = None
    most: float | None = None
    least: float = 0.0
    least_ratio: float | None = None

    @property
    def is_met(self) -> bool | None:
        if self.most is None:
            return None
        return (self.value if self.ratio is None else self.ratio) <= self.most


def row(
    what: str,
    samples: Sequence[float],
    unit: str,
    *,
    against: Row | None = None,
    most: float | None = None,
) -> Row:
    """The median of `samples`, compared with another row of the same run and with a target."""
    median, least = statistics.median(samples), min(samples)
    spread = (max(samples) - least) / median if median else 0.0
    if against is None:
        return Row(what, median, unit, spread, most=most, least=least)
    ratio, least_ratio = median / against.value, least / against.least
    return Row(what, median, unit, spread, against.what, ratio, most, least, least_ratio)


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print a table, or one JSON object with `rows`."""
    if as_json:
        print(json.dumps({"rows": [asdict(one) for one in rows]}))
        return
    if not rows:
        return
    width = max(len(one.what) for one in rows)
    print(f"{'':{width}}  {'median':>10} {'least':>10} {'unit':8} {'spread':>7}  target  ratio")
    for one in rows:
        compared = ""
        if one.ratio is not None:
            compared = f"{one.ratio:6.3f} (least {one.least_ratio:.3f}) x {one.against}"
        target = "" if one.most is None else f"{one.most:g}{'' if one.is_met else ' missed'}"
        print(
            f"{one.what:{width}}  {one.value:10.3f} {one.least:10.3f} {one.unit:8} "
            f"{one.spread:6.0%}  "
            f"{target:>6}  {compared}"
        )
