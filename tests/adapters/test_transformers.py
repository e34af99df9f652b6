"""transformers over tierkv generates what it does alone, token for token, byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the transformers extra")
pytest.importorskip("transformers", reason="needs the transformers extra")

import torch
from transformers import DeepseekV3Config, DynamicCache, LlamaConfig, MistralConfig

from tests.adapters.tiny import ARGUMENT, BLOCK, Rows, TinyEngine, alone, llama, prompt_of, rows_of
from tests.latch import CopyLatch
from tests.redis_server import redis_server
from tierkv.adapters.transformers import PagedCache
from tierkv.cache.eviction import WritePolicy
from tierkv.embed import Admitted
from tierkv.errors import LayoutError
from tierkv.gpu.protocol import Direction

ROOT = Path(__file__).parents[2]
LENGTH, NEW = 200, 12  # three full blocks and a tail of 8


def same(left: Rows, right: Rows) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


@pytest.fixture(params=["file", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
    else:
        with redis_server() as server:
            yield server.url


def node(role: str, store: str, length: int, output: Path) -> tuple[dict[str, Any], Rows]:
    """Run a process to its end; its facts, and KV rows."""
    subprocess.run(
        [sys.executable, "-m", "tests.adapters.tiny_node", role, store, str(length), str(NEW),
         str(output)],
        cwd=ROOT, check=True, timeout=100,
    )  # fmt: skip
    with np.load(f"{output}.npz") as rows:
        return json.loads(output.read_text()), [rows[name] for name in rows.files]


@pytest.mark.promise("transformers generates the same tokens in two processes as in one.")
@pytest.mark.parametrize("length", [LENGTH, 2 * BLOCK, BLOCK - 1])
def test_prefill_and_decode_in_two_processes_are_one_run(
    store: str, tmp_path: Path, length: int
) -> None:
    expected, rows = alone(llama(), prompt_of(length), NEW)
    first, _ = node("prefill", store, length, tmp_path / "prefill")
    second, kept = node("decode", store, length, tmp_path / "decode")
    assert first["tokens"] == expected[:1]
    assert second["tokens"] == expected
    assert second["cached"] == length, "the tail included"
    assert same(kept, rows)
    assert second["again"] == length + NEW - 1, "all that was fed is found by the next turn"
    assert second["computed"] == 4, "the next turn's: its last generated token, and three new ones"
    assert first["findings"] == second["findings"] == []


def test_a_prompt_that_is_half_known_loads_the_half_and_computes_the_rest(store: str) -> None:
    prompt = prompt_of(LENGTH)
    other = prompt[: 2 * BLOCK] + prompt_of(100, seed=2)
    with TinyEngine(store) as prefill:
        prefill.prefill("one", prompt, "ticket")
    with TinyEngine(store) as engine:
        done = engine.generate("two", other, NEW)
        assert done.found.cached_tokens == 2 * BLOCK
        assert engine.num_computed == 100
        tokens, rows = alone(engine.model, other, NEW, cut=2 * BLOCK)
        assert same(done.rows, rows)
        assert done.tokens == tokens == alone(engine.model, other, NEW)[0]


def test_the_next_turn_finds_what_was_generated_on_any_node(store: str) -> None:
    prompt = prompt_of(LENGTH)
    with TinyEngine(store) as prefill:
        prefill.prefill("one", prompt, "ticket")
    with TinyEngine(store, storage_write=WritePolicy.WRITE_THROUGH) as decode:
        first = decode.decode("one", prompt, "ticket", 2 * BLOCK)
    with TinyEngine(store) as third:
        turn = [*prompt, *first.tokens, *prompt_of(10, seed=3)]
        done = third.generate("two", turn, NEW)
        known = LENGTH + 2 * BLOCK - 1  # all that was fed, the tail included
        assert done.found.matched.storage_tokens == known
        assert all(
            np.array_equal(mine[:, :known], theirs[:, :known])
            for mine, theirs in zip(done.rows, first.rows, strict=True)
        )
        assert done.tokens == alone(third.model, turn, NEW)[0]


def test_blocks_that_do_not_load_are_computed_and_the_others_are_not(tmp_path: Path) -> None:
    store, prompt = f"file://{tmp_path}/store", prompt_of(LENGTH)
    with TinyEngine(store) as prefill:
        prefill.prefill("one", prompt, "ticket")
    latch = CopyLatch()
    with TinyEngine(store, before_copy=latch) as engine:
        engine.generate("warm", prompt[: BLOCK + 1], 1)  # the first block is on the device
        computed = engine.num_computed
        latch.fail_next(Direction.LOAD, 1)  # one movement carries the partly matched block, too
        done = engine.generate("two", prompt, NEW)
        assert done.found.failed_blocks == (1, 2, 3)
        assert done.found.cached_tokens == BLOCK
        assert engine.num_computed - computed == LENGTH - BLOCK
        tokens, rows = alone(engine.model, prompt, NEW, cut=BLOCK)
        assert done.tokens == tokens
        assert same(done.rows, rows)
        again = engine.generate("three", prompt, NEW)
        assert again.found.cached_tokens == LENGTH - 1
        assert engine.cache.verify().wait(20) == []


def test_a_zeroed_tail_changes_the_tokens(tmp_path: Path) -> None:
    """A control: were the tail not used, the tests above would not notice that it is wrong."""

    def zero_tail(planes: Sequence[np.ndarray], found: Admitted) -> None:
        for plane in planes:
            plane[found.block_table[3]] = 0

    tokens, rows, expected, right = _meddled(tmp_path, zero_tail)
    assert tokens != expected
    assert not same(rows, right)


def test_swapped_blocks_are_seen_in_the_bytes(tmp_path: Path) -> None:
    """A control: attention does not mind the order of keys that carry their position, so tokens
    alone would not tell."""

    def swap(planes: Sequence[np.ndarray], found: Admitted) -> None:
        one, two = found.block_table[:2]
        for plane in planes:
            plane[[one, two]] = plane[[two, one]]

    _, rows, _, right = _meddled(tmp_path, swap)
    assert not same(rows, right)


def _meddled(tmp_path: Path, meddle: Any) -> tuple[list[int], Rows, list[int], Rows]:
    store, prompt = f"file://{tmp_path}/store", prompt_of(LENGTH)
    with TinyEngine(store) as prefill:
        prefill.prefill("one", prompt, "ticket")
    with TinyEngine(store) as engine:
        done = engine.decode("two", prompt, "ticket", NEW, meddle=meddle)
        expected, rows = alone(engine.model, prompt, NEW)
        return done.tokens, done.rows, expected, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bytes_of_every_dtype_come_back_as_they_were(dtype: torch.dtype) -> None:
    model = llama(dtype)
    paged = PagedCache(model.config, block_size=16, dtype=dtype)
    cache = DynamicCache(config=model.config)
    rng = np.random.default_rng(3)
    for layer in range(3):
        parts = []
        for _ in range(2):
            raw = rng.integers(0, 256, (1, 2, 37, 8 * dtype.itemsize), np.uint8)
            parts.append(torch.from_numpy(raw).view(dtype))
        cache.update(*parts, layer)
    planes = _empty(paged)
    table = np.array([7, 2, 5], np.int32)
    paged.store(cache, planes, table, 0, 20)
    paged.store(cache, planes, table, 20, 37)
    assert same(rows_of(paged.load(planes, table, 37)), rows_of(cache))
    assert [rows.shape[1] for rows in rows_of(paged.load(planes, table, 17))] == [17] * 6
    untouched = [block for block in range(9) if block not in table]
    assert not any(plane[untouched].any() for plane in planes)


def _empty(paged: PagedCache) -> list[np.ndarray]:
    return [np.zeros((9, plane.block_bytes), np.uint8) for plane in paged.layout.planes]


def test_keys_and_values_may_have_different_widths() -> None:
    from transformers import DeepseekV3ForCausalLM  # noqa: PLC0415 - heavy

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
        n_group=1, topk_group=1, num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=10, first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = DeepseekV3ForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.arange(21)[None], use_cache=True, **{ARGUMENT: cache})
    paged = PagedCache(config, block_size=8, dtype=torch.float32)
    assert {plane.token_bytes for plane in paged.layout.planes} == {16 * 4, 4 * 4}
    planes, table = _empty(paged), np.array([3, 1, 8], np.int32)
    paged.store(cache, planes, table, 0, 21)
    assert same(rows_of(paged.load(planes, table, 21)), rows_of(cache))


def test_a_cache_that_does_not_fit_is_refused_with_nothing_copied() -> None:
    model = llama()
    paged = PagedCache(model.config, block_size=16, dtype=torch.float32)
    planes, table = _empty(paged), np.array([0, 1], np.int32)
    cache = DynamicCache(config=model.config)
    with pytest.raises(LayoutError, match="no keys and values of layer 0"):
        paged.store(cache, planes, table, 0, 1)
    alone_cache = paged.load(planes, table, 20)
    with pytest.raises(LayoutError, match="a cache of 20 tokens"):
        paged.store(alone_cache, planes, table, 0, 21)
    half = PagedCache(model.config, block_size=16, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"needs .* of float16"):
        half.store(alone_cache, planes, table, 0, 20)
    assert not any(plane.any() for plane in planes)


def test_a_model_with_sliding_windows_is_refused() -> None:
    config = MistralConfig(num_hidden_layers=2, sliding_window=8)
    with pytest.raises(LayoutError, match="full attention"):
        PagedCache(config, block_size=16, dtype=torch.float32)


def test_two_models_do_not_share_bytes() -> None:
    short = set()
    for heads in (2, 4):
        config = LlamaConfig(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=heads)
        for dtype in (torch.float16, torch.bfloat16):
            paged = PagedCache(config, block_size=16, dtype=dtype)
            short |= {paged.fingerprint("m", revision=name).short for name in "ab"}
    assert len(short) == 8
