"""`python -m tests.fuzz TARGET [libFuzzer options]` under atheris, which is no dependency of ours:

    pip install atheris
    python -m tests.fuzz ticket -max_total_time=600

Without it, `tests/fuzz/test_targets.py` tries fewer inputs, from the same seeds.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

atheris = importlib.import_module("atheris")


with atheris.instrument_imports(include=["tierkv"]):
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz TARGET [options]; targets: {', '.join(TARGETS)}")
    name = sys.argv.pop(1)
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds()[name]):
            (Path(folder) / str(number)).write_bytes(seed)
        atheris.Setup([*sys.argv, folder], TARGETS[name])
        atheris.Fuzz()


main()
