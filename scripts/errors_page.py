"""docs/errors.md, made from the code: HTTP problems and reasons of hand-offs.

python scripts/errors_page.py        write the page

The site has the full list of sentences too, as reference/messages.html (scripts/site.py).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierkv.gateway import failures
from tierkv.http import problems
from tierkv.http.problems import AnswerError
from tierkv.pd.tickets import HandoffProblem

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
CODE = ROOT / "tierkv"

_LEVELS = ("warning", "error", "exception", "critical")
_NAME_WORDS = 2  # of a text that is a name, not a sentence

_INTRO = """# Error messages

`scripts/errors_page.py` makes this page from the code; `…` stands for a value.

Over HTTP an error is `application/problem+json`: a status, a stable `code`, a `title`, and a
`detail` that names the value and the remedy ([HTTP](http.md)). On the command line an error is one
sentence on stderr, with exit code 1. In Python every error is a `TierKVError`, and its class says
what the caller can do. The documentation site has every error sentence and log line in
`reference/messages.html`."""

_HTTP = """## HTTP problems

Answers with the status 429 or 503 have the header `Retry-After`, and answers with 502 if storage
or a producer failed."""

_OF_AIOHTTP = {
    404: "There is no such route: `GET /openapi.json` lists all.",
    405: "The path has no such method: use a method that the answer's header `Allow` names.",
    413: "The body exceeds `node.max_body_bytes`: make it smaller.",
}

_HANDOFF = """## Reasons of failed hand-offs

A prefill node hands a prompt to a decode node by a ticket in the store ([hand-off](handoff.md)).
The problem `handoff_failed` has one of these as its `reason`. Retry after 502 and 503."""

_LOG = """## Log lines

Lines at ERROR and CRITICAL need an operator. A fault of a store or an engine is a WARNING: requests
compute instead, and the answers stay right."""

_MESSAGES = """# Every error sentence

The sentences of all errors and log lines of the code, by folder and class; `…` stands for a value.
[Error messages](../errors.md) says what to do about the HTTP problems."""


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence of the code.

    Attributes:
        file: its file, relative to the checkout.
        what: name of the error class, or the level of the log line.
        text: the sentence, with `…` for each value.
    """

    file: Path
    what: str
    text: str


def sentences() -> list[Said]:
    """Return all sentences of errors and of log lines at WARNING and above, in the code's order."""
    found: list[Said] = []
    for path in sorted(CODE.rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        texts: list[tuple[int, str, str]] = []
        _collect(module, {}, texts)
        found += [Said(path.relative_to(ROOT), what, text) for _, what, text in sorted(texts)]
    return list(dict.fromkeys(found))


def _collect(
    scope: ast.AST, known: Mapping[str, Sequence[str]], texts: list[tuple[int, str, str]]
) -> None:
    """Append line, class or level, and text of each sentence in `scope` and in its functions.

    Args:
        scope: a module or function.
        known: texts by the names that outer scopes give them.
        texts: the list to append to.
    """
    inner: list[ast.AST] = []
    nodes = list(_nodes(scope, inner))
    names = dict(known)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = [*_texts(node.value, names)]
    for node in nodes:
        if isinstance(node, ast.Call) and (what := _what(node)):
            for one in (*node.args, *(key.value for key in node.keywords)):
                texts += [(node.lineno, what, text) for text in _texts(one, names)]
    for function in inner:
        _collect(function, names, texts)


def _nodes(scope: ast.AST, inner: list[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope; collect its functions in `inner`."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.append(node)
        else:
            yield node
            yield from _nodes(node, inner)


def _what(call: ast.Call) -> str:
    """Return the error class that a call makes, or the level that it logs at; "" for others."""
    function = call.func
    if isinstance(function, ast.Name) and function.id.endswith("Error"):
        return function.id
    if isinstance(function, ast.Name) and function.id == "LogThrottle":
        return "warning"
    if isinstance(function, ast.Attribute) and function.attr in _LEVELS:
        owner = function.value
        return function.attr if isinstance(owner, ast.Name) and "log" in owner.id else ""
    return ""


def _texts(node: ast.expr, names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the sentences that an argument may be; `names` has those of variables."""
    if isinstance(node, ast.IfExp):
        yield from _texts(node.body, names)
        yield from _texts(node.orelse, names)
        return
    if isinstance(node, ast.Name):
        yield from names.get(node.id, ())
        return
    text = re.sub(r"%[-+.\d]*[a-z]", "…", _text(node))
    if len(re.findall(r"\w+", text)) > _NAME_WORDS:
        yield text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "…"


def problem_rows() -> list[tuple[int, str, str, str]]:
    """Return status, code, error class (or "") and meaning of each HTTP problem, by status."""
    rows = [
        (status, code, kind.__name__, _first(kind)) for kind, status, code, _ in problems.ERRORS
    ]
    answers = [
        kind
        for kind in vars(failures).values()
        if isinstance(kind, type) and issubclass(kind, AnswerError) and hasattr(kind, "code")
    ]
    rows += [(one.status, one.code, one.__name__, _first(one)) for one in answers]
    rows += [
        (status, code, "", f"{title}: {detail[:1].lower()}{detail[1:]}")
        for status, (code, title, detail) in problems.PROBLEMS.items()
    ]
    rows += [
        (status, code, "", _OF_AIOHTTP[status]) for status, code in problems.HTTP_CODES.items()
    ]
    merged: dict[tuple[int, str], tuple[str, str]] = {}
    for status, code, name, meaning in rows:
        merged.setdefault((status, code), (name, meaning))
    return [(*key, *value) for key, value in sorted(merged.items())]


def _first(kind: type) -> str:
    """Return the first paragraph of a docstring: its meaning and its remedy."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())


def reason_rows() -> list[tuple[int, str, str]]:
    """Return status, reason and meaning of each HandoffProblem."""
    text = " ".join(inspect.getdoc(HandoffProblem).split())  # type: ignore[union-attr]
    meanings = dict(re.findall(r"\b([A-Z_]+): (.*?)(?= [A-Z_]+: |$)", text))
    return [
        (problems.HANDOFF_STATUS.get(one.value, 502), one.value, meanings[one.name])
        for one in HandoffProblem
    ]


def page() -> str:
    """Return the text of docs/errors.md."""
    problem_table = "\n".join(
        f"| {status} | `{code}` | {_cell(meaning)} |" for status, code, _, meaning in problem_rows()
    )
    reason_table = "\n".join(
        f"| {status} `{reason}` | {_cell(meaning)} |" for status, reason, meaning in reason_rows()
    )
    parts = [
        _INTRO,
        _HTTP,
        f"| status | code | meaning and remedy |\n| --- | --- | --- |\n{problem_table}",
        _HANDOFF,
        f"| status and reason | meaning and remedy |\n| --- | --- |\n{reason_table}",
        _LOG,
    ]
    return "\n\n".join(parts) + "\n"


def messages_page() -> str:
    """Return every sentence, by folder and class, for the site."""
    folders: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in sentences():
        folders[one.file.parts[1].removesuffix(".py")][one.what].append(_quoted(one.text))
    parts = [_MESSAGES]
    for folder, classes in folders.items():
        parts.append(f"## {folder}")
        for what, texts in sorted(classes.items()):
            parts.append(f"`{what}`:\n\n" + "\n".join(f"- {text}" for text in texts))
    return "\n\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
