"""vLLM and tierkv's connector with real weights: the same greedy text as without.

Random weights answer with noise that changes at the first wrong block. Real weights have sharp
answers and large outliers in their keys, as models that people run. In float32, since the text then
does not depend on what is computed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.processes import needs
from tests.redis_server import RedisServer

needs("vllm")

from tests.engines import smollm2
from tests.engines.test_vllm_connector import (
    Engine,
    engine,
    handed_over,
    pair_of,
    transfer,
    zeroed,
)

if not smollm2.is_there():
    pytest.skip("no weights of SmolLM2 (./scripts/test --engines)", allow_module_level=True)

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
    from transformers import AutoTokenizer

    document = (_ROOT / "docs" / "cache.md").read_text()
    found = AutoTokenizer.from_pretrained(model)(document).input_ids
    assert len(found) > 2000
    return list(found)


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[Engine]:
    with engine(model, None, **_FLOAT32) as running:
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
    with engine(model, config, **_FLOAT32) as first:
        assert first.tokens(prompts) == right
        first.ask("forget")
        assert first.answers(prompts) == (right, [200, 192, 191, 193, 168, 168])
        first.rests()
    with engine(model, config, **_FLOAT32) as second:
        assert second.answers(prompts) == (right, [200, 192, 160, 193, 168, 168])
        second.rests()
        if kind == "redis":  # the control: other bytes are other text
            second.ask("drop")
            zeroed(empty_redis)
            assert all(
                wrong != ours for wrong, ours in zip(second.tokens(prompts), right, strict=True)
            )


@pytest.mark.promise("vLLM with SmolLM2's weights answers the same greedy text with tierkv.")
def test_text_is_the_same_after_a_hand_over_with_tails(
    model: str, text: list[int], alone: Engine, empty_redis: RedisServer
) -> None:
    lengths = [6 * _BLOCK + 1, 6 * _BLOCK - 1, 6 * _BLOCK, 20]
    prompts = [text[400 * at + 100 :][:length] for at, length in enumerate(lengths)]
    right = alone.tokens(prompts)
    settings: dict[str, object] = {"host_bytes": _HOST}
    with pair_of(model, empty_redis.url, settings, **_FLOAT32) as (prefill, decode):
        assert handed_over(prefill, decode, prompts)[2] == right
        assert decode.ask("counts")["loaded_tokens"] == sum(lengths)
