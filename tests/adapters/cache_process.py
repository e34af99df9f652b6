"""A process that generates through a store: `cache_process.py STORE OUTPUT`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tests.adapters.hf_world import prompt_of
from tests.adapters.test_transformers_cache import LENGTH, generate, over, plain, rows_of


def main(store: str, output: str) -> None:
    model = plain()
    with over(store, model) as cache:
        tokens = generate(model, prompt_of(LENGTH), past_key_values=cache)
        np.savez(f"{output}.npz", *rows_of(cache))
        hit = asdict(cache.last_hit)
        del hit["problem"]
    Path(output).write_text(json.dumps({"tokens": tokens, "hit": hit}))


if __name__ == "__main__":
    main(*sys.argv[1:])
