"""The engine of docs/embedding.md runs as it stands there."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.latch import PATIENCE_S

PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"


def _example(holding: str) -> str:
    examples: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(code for code in examples if holding in code)


def test_the_page_s_pages_of_an_engine_with_host_memory_come_back() -> None:
    exec(compile(_example("PageStorage"), str(PAGE), "exec"), {"np": np})


def test_the_page_s_engine_computes_each_token_once_and_hands_its_prompts_on(
    tmp_path: Path,
) -> None:
    computed: dict[int, int] = {}

    def model(kv: list[np.ndarray], table: np.ndarray, tokens: Sequence[int], cached: int) -> int:
        """Its KV of a token is the token; it checks what it is given."""
        for at, token in enumerate(tokens):
            block, place = table[at // 16], at % 16
            for plane in kv:
                row = plane[block].reshape(16, -1)[place]
                if at < cached:
                    assert (row == token % 251).all()
                row[:] = token % 251
        computed[len(computed)] = len(tokens) - cached
        return 1

    names: dict[str, Any] = {"STORAGE_URL": f"file://{tmp_path}/store"}
    exec(compile(_example("class StepEngine"), str(PAGE), "exec"), names)
    start = list(range(100, 140))
    engine = names["StepEngine"](model, {"one": start})
    _steps(engine)
    engine.prompts = {"two": [*start, 7, 8, 9], "huge": list(range(5000))}
    engine.new, engine.results = list(engine.prompts.items()), {}
    _steps(engine)
    assert computed == {0: 40, 1: 3}
    assert engine.results["two"] == "done"
    assert "5001" in str(engine.results["huge"]) or "blocks" in str(engine.results["huge"])
    claim = engine.cache.claim("three", "ticket-two", [*start, 7, 8, 9], max_new_tokens=1)
    assert claim.wait(PATIENCE_S).ticket.first_tokens == (1,)
    engine.cache.end("three").wait(PATIENCE_S)
    engine.cache.close()


def _steps(engine: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while engine.step():
        assert time.monotonic() < deadline
        time.sleep(0.001)
