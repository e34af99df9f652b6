"""Rules of the code as a whole: unique names, words that stay out, imports, docstrings."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_TALLEST = 2


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted((ROOT / "tierkv").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield name, node


def test_a_public_class_name_means_one_thing() -> None:
    of = defaultdict(list)
    for name, node in classes():
        if not node.name.startswith("_"):
            of[node.name].append(name)
    assert {name: where for name, where in of.items() if len(where) > 1} == {}


def test_words_that_were_given_up_do_not_come_back() -> None:
    given_up = "admitting arriving around attach books desk growing late masked pace parking"
    words = {*given_up.split(), "patience", "purse", "seldom", "starting"}
    rooms = {part for name in modules() for part in name.split(".")}
    said = {
        word.lower()
        for _, node in classes()
        for word in re.findall(r"[A-Z][a-z]+", node.name.strip("_"))
    }
    assert words & rooms == set()
    assert words & said == set()


def test_inheritance_is_at_most_two_high() -> None:
    bases = {
        node.name: [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
        for _, node in classes()
    }

    def height(name: str, below: tuple[str, ...] = ()) -> int:
        above = [b for b in bases.get(name, []) if b in bases and b not in below]
        return 1 + max(
            (height(b, (*below, name)) for b in above if not b.endswith("Error")), default=0
        )

    fields_alone = ("Error", "Body")  # these inherit no behaviour
    too_tall = [n for n in bases if not n.endswith(fields_alone) and height(n) > _TALLEST]
    assert too_tall == []


_HEAVY = r"tierkv\.(adapters|gpu\.|hf\.(?!settings))"


@pytest.mark.promise("Importing tierkv loads no CUDA, torch or engine.")
def test_importing_tierkv_brings_no_cuda_torch_or_engine() -> None:
    """Of all modules but those that adapt an engine or drive a GPU."""
    names = [name for name in modules() if not re.match(_HEAVY, name)]
    script = (
        f"import importlib, sys\nfor name in {sorted(names)}: importlib.import_module(name)\n"
        "heavy = {'cupy', 'torch', 'transformers', 'vllm', 'sglang', 'cuda', 'triton'}\n"
        "print(*heavy & {name.partition('.')[0] for name in sys.modules}, 'end')"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].strip() == "end", done.stdout + done.stderr


def test_the_page_of_errors_is_made_from_the_code() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "errors_page.py"))
    stale = "stale: run python scripts/errors_page.py"
    assert (DOCS / "errors.md").read_text() == script["page"](), stale


def test_every_code_of_a_problem_is_expected_by_a_test() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "errors_page.py"))
    expected: set[object] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__):
            tree = ast.walk(ast.parse(path.read_text()))
            expected |= {one.value for one in tree if isinstance(one, ast.Constant)}
    codes = {code for _, code, _, _ in script["problem_rows"]()}
    assert len(codes) > 35
    assert codes - expected == set()


def test_the_page_of_promises_is_made_from_the_markers_on_tests() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "promises.py"))
    stale = "stale: run python scripts/promises.py"
    assert (DOCS / "promises.md").read_text() == script["page"](), stale
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders <= set(script["_TITLES"])
