"""One node as a process: `tiny_node.py prefill|decode STORE LENGTH NEW OUTPUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests.adapters.tiny import TinyEngine, prompt_of


def main(role: str, store: str, length: str, new: str, output: str) -> None:
    prompt = prompt_of(int(length))
    with TinyEngine(store) as engine:
        if role == "prefill":
            tokens = [engine.prefill("one", prompt, "ticket")]
            cached, again, rows = 0, 0, []
        else:
            done = engine.decode("one", prompt, "ticket", int(new))
            tokens, cached, rows = done.tokens, done.found.cached_tokens, done.rows
            turn = [*prompt, *tokens, 1, 2, 3]  # the second turn of the conversation
            again = engine.generate("two", turn, 2).found.cached_tokens
        findings = engine.cache.verify().wait(30)
    np.savez(f"{output}.npz", *rows)
    facts = {"tokens": tokens, "cached": cached, "again": again, "findings": findings,
             "computed": engine.num_computed}  # fmt: skip
    Path(output).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
