"""docs/promises.md, made from the markers on the tests: `@pytest.mark.promise("sentence")`.

python scripts/promises.py        write the page
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"

_INTRO = """# Promises

Each sentence is a marker, `@pytest.mark.promise("...")`, on the test that fails when the promise is
broken. `scripts/promises.py` makes this page."""

_TITLES = {
    "pd": "Hand-off",
    "e2e": "Real processes",
    "sched": "Requests",
    "cache": "Keys and index",
    "storage": "Storage",
    "contract": "Every store and device",
    "service": "Service",
    "api": "A node over HTTP",
    "gateway": "Gateway",
    "client": "Client",
    "cli": "Commands",
    "page": "Live page",
    "embed": "Engines",
    "engines": "vLLM and SGLang",
    "adapters": "transformers",
    "ranks": "Ranks",
    "gpu": "GPU",
    "refmodel": "Reference model",
    "transfer": "Copies",
    "fuzz": "Untrusted input",
    "": "Project",
}


def promises(path: Path) -> list[str]:
    """Return the sentences of the promise markers in a file, each once, in the file's order."""
    marks = [
        mark
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise"
    ]
    sentences = [ast.literal_eval(m.args[0]) for m in sorted(marks, key=lambda m: m.lineno)]
    return list(dict.fromkeys(sentences))


def page() -> str:
    """Return the text of docs/promises.md."""
    parts = [_INTRO]
    for folder, title in _TITLES.items():
        files = sorted((ROOT / "tests" / folder).glob("test_*.py"))
        rows = [f"- `{file.name}`: {' '.join(told)}" for file in files if (told := promises(file))]
        parts += [f"## {title}: `{Path('tests', folder)}`", "\n".join(rows)] if rows else []
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
