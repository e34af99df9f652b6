"""`generate` with a TierKVCache is `generate` alone: the same tokens and KV bytes."""

from __future__ import annotations

import copy
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the transformers extra")
pytest.importorskip("transformers", reason="needs the transformers extra")

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    LlamaForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

from tests.adapters.hf_world import config_of, prompt_of
from tests.latch import EVERY, CopyLatch
from tests.redis_proxy import proxy_on_a_thread
from tests.redis_server import RedisServer, empty_redis, module_redis, redis_server
from tierkv.adapters import transformers
from tierkv.adapters.transformers import PromptHit, TierKVCache
from tierkv.embed import ForkedError
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    ShuttingDownError,
    StoreUnavailableError,
)
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import BlockCopy, Direction, HostSlots, Lane, Planes
from tierkv.sched.worth import FetchPolicy

__all__ = ["empty_redis", "module_redis"]

ROOT = Path(__file__).parents[2]
BLOCK = 64
# Newer versions of transformers call it `cache`, and warn of the other name.
ARGUMENT = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)
Rows = list[np.ndarray]
LENGTH, NEW = 200, 12  # three full blocks and a tail of 8
MIB = 1 << 20


def tiny(kind: str, dtype: torch.dtype, attention: str) -> Any:
    """Return a random model of this kind; its weights are the same in every process."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(kind)).to(dtype).eval()
    model.set_attn_implementation(attention)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def plain() -> Any:
    return tiny("llama", torch.float32, "sdpa")


def over(store: str, model: Any, **more: Any) -> TierKVCache:
    """A cache that waits for its store: a tiny model computes faster than a store answers."""
    wait = FetchPolicy.WAIT_COMPLETE
    return TierKVCache.for_model(model, store, host_bytes=16 * MIB, fetch_policy=wait, **more)


def generate(model: Any, prompt: Sequence[int], new: int = NEW, **more: Any) -> list[int]:
    """All tokens, greedily unless `more` says otherwise."""
    ids = torch.tensor([list(prompt)])
    found = model.generate(ids, max_new_tokens=new, **({"do_sample": False} | more))
    tokens: list[int] = found[0].tolist()
    return tokens


def forward(model: Any, cache: DynamicCache, tokens: Sequence[int]) -> None:
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=True, **{ARGUMENT: cache})


def rows_of(cache: DynamicCache) -> Rows:
    """Return the KV bytes by plane, uint8 [heads, tokens, bytes]."""
    states = [one for layer in cache.layers for one in (layer.keys, layer.values)]
    return [one[0].contiguous().view(torch.uint8).numpy().copy() for one in states]


def rows_alone(model: Any, pieces: Sequence[Sequence[int]], known: int = 0) -> Rows:
    """KV bytes of a DynamicCache that was given these pieces one after the other, of which the
    first was cropped to `known` tokens, as one is that knows them and has to compute the last."""
    cache = DynamicCache(config=model.config)
    for number, piece in enumerate(pieces):
        forward(model, cache, piece)
        if known and not number:
            cache.crop(known - len(piece))
    return rows_of(cache)


def same(left: Rows, right: Rows) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


class HostDevice(CpuDevice):
    """A CPU that shows its host slots and the engine's planes to whoever meddles with a copy."""

    def __init__(self, meddle: Callable[[HostDevice, BlockCopy], None]) -> None:
        super().__init__(lambda copy: meddle(self, copy))
        self.host: HostSlots | None = None
        self.planes: Planes | None = None

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        self.host, self.planes = host, planes
        return super().open_lane(direction, planes, host)


def elsewhere(model: Any, cache: TierKVCache) -> None:
    """Another text takes the device's place."""
    generate(model, prompt_of(3 * BLOCK, seed=99), 1, past_key_values=cache)


@pytest.mark.promise("`generate` with a `TierKVCache` yields the model's own tokens and bytes.")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3"])
def test_tokens_and_bytes_are_those_of_the_model_alone(
    kind: str, dtype: torch.dtype, attention: str
) -> None:
    model, prompt = tiny(kind, dtype, attention), prompt_of(LENGTH)
    expected = generate(model, prompt)
    fed, steps = expected[:-1], [[token] for token in expected[LENGTH:-1]]
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        assert generate(model, prompt, past_key_values=cache) == expected
        assert cache.last_hit == PromptHit(0, 0, 0, LENGTH)
        assert same(rows_of(cache), rows_alone(model, [prompt, *steps])), "computed"
        known = rows_alone(model, [prompt, prompt[-1:], *steps], LENGTH - 1)
        assert generate(model, prompt, past_key_values=cache) == expected
        assert cache.last_hit == PromptHit(LENGTH - 1, 0, 0, 1)
        assert same(rows_of(cache), known), "on the device"
        elsewhere(model, cache)
        assert generate(model, prompt, past_key_values=cache) == expected
        assert cache.last_hit == PromptHit(0, LENGTH - 1, 0, 1)
        assert same(rows_of(cache), known), "from the host"
        assert cache.get_seq_length() == len(fed)
        assert cache.verify() == []


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, 2 * BLOCK + 1, LENGTH])
def test_the_next_turn_finds_all_of_the_one_before(length: int) -> None:
    model = plain()
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        first = generate(model, prompt_of(length), past_key_values=cache)
        elsewhere(model, cache)
        turn = first + prompt_of(30, seed=2)
        assert generate(model, turn, past_key_values=cache) == generate(model, turn)
        assert cache.last_hit == PromptHit(0, len(first) - 1, 0, 31)


def test_texts_that_share_a_beginning_share_its_cache() -> None:
    model, shared = plain(), prompt_of(2 * BLOCK + 10)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        for seed in range(4):
            text = shared + prompt_of(50, seed=10 + seed)
            assert generate(model, text, past_key_values=cache) == generate(model, text)
            if seed:
                assert cache.last_hit == PromptHit(device=len(shared), computed=50)


@pytest.mark.parametrize(
    "way", [{"prefill_chunk_size": BLOCK}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_other_ways_to_generate_are_the_same(way: dict[str, Any]) -> None:
    model, prompt = plain(), prompt_of(2 * BLOCK) + prompt_of(2 * BLOCK)
    expected = generate(model, prompt, 40, **way)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        for _ in range(2):
            assert generate(model, prompt, 40, past_key_values=cache, **way) == expected
            elsewhere(model, cache)
        turn = expected + prompt_of(3, seed=5)
        assert generate(model, turn, past_key_values=cache) == generate(model, turn)
        assert cache.last_hit.computed <= 4, "what was drafted and rejected is not in it"


def test_a_text_longer_than_the_devices_room_moves_to_a_larger_one() -> None:
    model, prompt = plain(), prompt_of(960)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        assert generate(model, prompt[:900], 200, past_key_values=cache) == generate(
            model, prompt[:900], 200
        )
        elsewhere(model, cache)
        assert generate(model, prompt, past_key_values=cache) == generate(model, prompt)
        assert cache.last_hit == PromptHit(host=900, computed=60)


@pytest.mark.parametrize(("there", "hit"), [(500, 0), (520, 520)])
def test_of_a_long_text_less_than_an_eighth_is_no_hit(there: int, hit: int) -> None:
    """What follows a hit is computed with a mask, and takes up to twice as long as without."""
    model, text = plain(), prompt_of(4096)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        generate(model, text[:there], 1, past_key_values=cache)
        elsewhere(model, cache)
        assert generate(model, text, 2, past_key_values=cache) == generate(model, text, 2)
        assert cache.last_hit == PromptHit(host=hit, computed=4096 - hit)
        assert cache.verify() == []


def test_a_host_tier_smaller_than_the_text_keeps_its_beginning() -> None:
    model, prompt = plain(), prompt_of(900)
    block = 3 * 2 * 2 * 8 * 4 * BLOCK
    with TierKVCache.for_model(model, host_bytes=8 * block) as cache:
        for _ in range(2):
            assert generate(model, prompt, past_key_values=cache) == generate(model, prompt)
            elsewhere(model, cache)
        assert cache.verify() == []


def test_a_loop_of_ones_own_is_one_text() -> None:
    model, prompt = plain(), prompt_of(LENGTH)
    expected = generate(model, prompt, 5)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache, torch.inference_mode():
        for known in (0, LENGTH - 1):
            with cache.sequence():
                tokens, ids = [], torch.tensor([prompt])
                for _ in range(5):
                    logits = model(ids, **{ARGUMENT: cache}).logits
                    tokens.append(int(logits[0, -1].argmax()))
                    ids = torch.tensor([tokens[-1:]])
                assert [*prompt, *tokens] == expected
                assert cache.last_hit.device == known


@pytest.mark.parametrize("other", ["a text that goes on", "another text", "none", "rows"])
def test_a_text_that_is_named_before_loads_at_once_and_no_other_takes_its_blocks(
    other: str,
) -> None:
    model, prompt = plain(), prompt_of(LENGTH)
    given = {"a text that goes on": [*prompt, 5, 6], "another text": prompt_of(90, seed=4)}.get(
        other, prompt
    )
    expected, loads = generate(model, given, 2), threading.Event()

    def before(copy: BlockCopy) -> None:
        if copy.direction is Direction.LOAD:
            loads.set()

    with TierKVCache.for_model(model, host_bytes=16 * MIB, device=CpuDevice(before)) as cache:
        generate(model, prompt, 1, past_key_values=cache)
        elsewhere(model, cache)
        with cache.sequence(torch.tensor([prompt])), torch.inference_mode():
            assert loads.wait(30)
            assert cache.get_seq_length() == 0, "generate would cut the text itself"
            if other == "rows":
                with pytest.raises(BadRequestError, match="one sequence"):
                    model(torch.tensor([prompt, prompt]), **{ARGUMENT: cache})
            elif other != "none":
                logits = model(torch.tensor([given]), **{ARGUMENT: cache}).logits
                assert int(logits[0, -1].argmax()) == expected[len(given)]
                hit = PromptHit(0, LENGTH - 1, 0, 3) if other == "a text that goes on" else None
                assert hit is None or cache.last_hit == hit
        assert generate(model, given, 2, past_key_values=cache) == expected
        assert generate(model, prompt, past_key_values=cache) == generate(model, prompt)
        assert cache.verify() == []


# Through a store


def other_process(store: str, output: Path) -> dict[str, Any]:
    """The facts of a fresh process that generates from the same prompt."""
    subprocess.run(
        [sys.executable, "-m", "tests.adapters.cache_process", store, str(output)],
        cwd=ROOT, check=True, timeout=100,
    )  # fmt: skip
    facts: dict[str, Any] = json.loads(output.read_text())
    with np.load(f"{output}.npz") as rows:
        return facts | {"rows": [rows[name] for name in rows.files]}


@pytest.mark.promise("`generate` with a `TierKVCache` yields the model's own tokens and bytes.")
def test_a_fresh_process_finds_it_in_the_store(empty_redis: RedisServer, tmp_path: Path) -> None:
    model, prompt = plain(), prompt_of(LENGTH)
    expected = generate(model, prompt)
    with over(empty_redis.url, model) as cache:
        assert generate(model, prompt, past_key_values=cache) == expected
        rows = rows_of(cache)
    found = other_process(empty_redis.url, tmp_path / "facts")
    assert found["tokens"] == expected
    assert found["hit"] == {"device": 0, "host": 0, "storage": LENGTH - 1, "computed": 1}
    last = rows_alone(model, [prompt, prompt[-1:]], LENGTH - 1)
    for mine, theirs, computed in zip(rows, found["rows"], last, strict=True):
        assert np.array_equal(mine[:, : LENGTH - 1], theirs[:, : LENGTH - 1])
        assert np.array_equal(computed[:, -1], theirs[:, LENGTH - 1])
    assert min(map(empty_redis.ttl, empty_redis.names())) > 0, "nothing stays for ever"


@pytest.mark.promise("Models of other weights, hooks or adapters share no KV.")
def test_models_of_other_weights_share_nothing(tmp_path: Path) -> None:
    store, prompt = f"file://{tmp_path}/store", prompt_of(LENGTH)
    model, other = plain(), plain()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1.0
    with over(store, model) as cache:
        generate(model, prompt, past_key_values=cache)
    for one, tenant, hits in ((other, "", False), (plain(), "", True), (plain(), "other", False)):
        with over(store, one, tenant=tenant) as cache:
            assert generate(one, prompt, past_key_values=cache) == generate(one, prompt)
            assert bool(cache.last_hit.storage) is hits


@pytest.mark.promise("Models of other weights, hooks or adapters share no KV.")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # raised by PEFT
def test_what_an_adapter_of_peft_computes_is_found_only_while_it_does_the_same(
    tmp_path: Path,
) -> None:
    """Its weights are there, whether it is active or not, and how much of them is added is none."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = peft.get_peft_model(plain(), config).eval()
    model.add_adapter("other", config)
    prompt = prompt_of(LENGTH)
    layers = [one for one in model.modules() if isinstance(getattr(one, "scaling", None), dict)]

    def scale(factor: float) -> None:
        for layer in layers:
            layer.scaling["other"] *= factor

    def found(revision: str | None) -> list[int]:
        """Tokens from the store, for a cache of the model as it is now, and for another one."""
        right, hits = generate(model, prompt), []
        store = f"file://{tmp_path}/store"
        for _ in range(2):
            with over(store, model, revision=revision) as cache:
                assert generate(model, prompt, past_key_values=cache) == right
                hits.append(cache.last_hit.storage)
        return hits

    for revision in (None, "named"):
        assert found(revision) == [0, LENGTH - 1]
        with model.disable_adapter():
            assert found(revision) == [0, LENGTH - 1]
        model.set_adapter("other")
        assert found(revision) == [0, LENGTH - 1]
        scale(2.0)
        assert found(revision) == [0, LENGTH - 1]
        scale(0.5)
        model.set_adapter("default")
        assert found(revision) == [LENGTH - 1] * 2
    model.set_adapter("other")
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        generate(model, prompt, past_key_values=cache)
        with pytest.raises(ConfigError, match="PEFT's adapter_names"):
            generate(model, prompt, past_key_values=cache, adapter_names=["default"])
        scale(2.0)
        with pytest.raises(ConfigError, match="changed after"):
            generate(model, prompt, past_key_values=cache)


def test_hooks_that_may_change_what_is_computed_are_part_of_it(tmp_path: Path) -> None:
    """Such as those that steer a model. What transformers sets to look at states is none."""
    model, prompt = plain(), prompt_of(LENGTH)
    store = f"file://{tmp_path}/store"
    with over(store, model) as cache:
        right = generate(model, prompt, past_key_values=cache)
        model(torch.tensor([prompt]), output_hidden_states=True)
        assert generate(model, prompt, past_key_values=cache) == right
        handle = model.model.layers[0].mlp.register_forward_hook(lambda *given: given[-1] + 1.0)
        with pytest.raises(ConfigError, match="hooks or device changed"):
            generate(model, prompt, past_key_values=cache)
    with pytest.raises(ConfigError, match="pass revision="):
        TierKVCache.for_model(model, store)
    steered = generate(model, prompt)
    assert steered != right
    for hits in (0, LENGTH - 1):
        with over(store, model, revision="steered") as cache:
            assert generate(model, prompt, past_key_values=cache) == steered
            assert cache.last_hit.storage == hits
    handle.remove()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # raised by PEFT
def test_virtual_tokens_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ConfigError, match="virtual tokens"):
        TierKVCache.for_model(peft.get_peft_model(plain(), config))


# Faults


@pytest.mark.promise("A failing store costs `generate` time and no token.")
def test_a_redis_that_dies_hangs_or_forgets_costs_time_and_no_token() -> None:
    model, texts = plain(), [prompt_of(LENGTH, seed=seed) for seed in range(6)]
    expected = [generate(model, text) for text in texts]
    with redis_server() as server:
        with over(server.url, model) as cache:
            for text, tokens in zip(texts, expected, strict=True):
                assert generate(model, text, past_key_values=cache) == tokens
        # Nothing on the host; what is in the store goes away in between.
        with over(server.url, model) as cache:
            began = time.monotonic()
            for number, fault in enumerate(
                [None, lambda: server.execute("FLUSHALL"), server.pause, None, server.kill, None]
            ):
                if fault is not None:
                    fault()
                assert generate(model, texts[number], past_key_values=cache) == expected[number]
                assert bool(cache.last_hit.storage) is (number == 0)
            assert time.monotonic() - began < 60
            assert generate(model, texts[0], past_key_values=cache) == expected[0]
            assert cache.last_hit.host == LENGTH - 1, "the host tier goes on"
            assert cache.verify() == []


@pytest.mark.parametrize("late", ["from the start", "later"])
def test_a_redis_that_is_half_a_second_late_costs_time_and_no_token(late: str) -> None:
    model, prompt = plain(), prompt_of(LENGTH)
    expected = generate(model, prompt)
    with redis_server() as server, proxy_on_a_thread(server.port) as proxy:
        with TierKVCache.for_model(model, proxy.url, host_bytes=16 * MIB) as cache:
            assert generate(model, prompt, past_key_values=cache) == expected
        proxy.delay_s = 0.5 if late == "from the start" else 0.0
        with TierKVCache.for_model(model, proxy.url, host_bytes=16 * MIB) as cache:
            proxy.delay_s = 0.5
            for text in (prompt, prompt_of(LENGTH, seed=8)):
                began = time.monotonic()
                assert generate(model, text, past_key_values=cache) == generate(model, text)
                assert time.monotonic() - began < 30
            assert cache.verify() == []
            proxy.delay_s = 0.0


def test_what_does_not_load_is_computed() -> None:
    model, prompt, latch = plain(), prompt_of(LENGTH), CopyLatch()
    expected = generate(model, prompt)
    with TierKVCache.for_model(model, host_bytes=16 * MIB, device=CpuDevice(latch)) as cache:
        generate(model, prompt, past_key_values=cache)
        generate(model, prompt[:BLOCK] + [1] * 20, 1, past_key_values=cache)
        latch.fail_next(Direction.LOAD, 1)
        assert generate(model, prompt, past_key_values=cache) == expected
        assert cache.last_hit == PromptHit(BLOCK, 0, 0, LENGTH - BLOCK, "a load failed")
        steps = [[token] for token in expected[LENGTH:-1]]
        rows = rows_alone(model, [prompt, prompt[BLOCK:], *steps], BLOCK)
        assert same(rows_of(cache), rows)
        elsewhere(model, cache)
        assert generate(model, prompt, past_key_values=cache) == expected
        assert cache.last_hit == PromptHit(0, LENGTH - 1, 0, 1)
        latch.fail_next(Direction.LOAD, EVERY)
        for _ in range(5):
            elsewhere(model, cache)
            assert generate(model, prompt, past_key_values=cache) == expected
        latch.fail_next(Direction.LOAD, 0)
        assert cache.verify() == []


def test_what_is_not_saved_is_not_found() -> None:
    model, prompt, latch = plain(), prompt_of(LENGTH), CopyLatch()
    with TierKVCache.for_model(model, host_bytes=16 * MIB, device=CpuDevice(latch)) as cache:
        latch.fail_next(Direction.OFFLOAD, EVERY)
        generate(model, prompt, past_key_values=cache)
        elsewhere(model, cache)
        latch.fail_next(Direction.OFFLOAD, 0)
        assert generate(model, prompt, past_key_values=cache) == generate(model, prompt)
        assert cache.last_hit.computed == LENGTH
        assert cache.verify() == []


@pytest.mark.promise("`generate` waits for no copy to the host.")
def test_generate_does_not_wait_for_what_it_keeps() -> None:
    model, prompt, latch = plain(), prompt_of(LENGTH), CopyLatch()
    expected = generate(model, prompt)
    with TierKVCache.for_model(model, host_bytes=16 * MIB, device=CpuDevice(latch)) as cache:
        latch.hold()
        assert generate(model, prompt, past_key_values=cache) == expected
        latch.release()
        elsewhere(model, cache)
        assert generate(model, prompt, past_key_values=cache) == expected
        assert cache.last_hit == PromptHit(0, LENGTH - 1, 0, 1)
        assert cache.verify() == []


@pytest.mark.parametrize("what", ["got no host slot", "was evicted before it could be found"])
def test_a_text_does_not_wait_for_what_of_the_last_one(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = plain(), prompt_of(LENGTH)
    expected = generate(model, prompt)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        engine = vars(cache)["_moves"].engine
        poll = engine.poll

        def emptied(*given: Any) -> Any:
            polled = poll(*given)
            polled.stored = [(key, 0) for key, _ in polled.stored]
            return polled

        with monkeypatch.context() as patched:
            if what == "got no host slot":
                patched.setitem(vars(transformers), "_KEEP_S", 1e6)
                patched.setattr(engine, "save", lambda *_, **__: None)
            else:
                patched.setitem(vars(transformers), "_ANSWER_S", 1e6)
                patched.setattr(engine, "poll", emptied)
            for _ in range(2):
                assert generate(model, prompt, past_key_values=cache) == expected
                elsewhere(model, cache)
            if what != "got no host slot":
                cache.verify()  # it has waited for what is kept
        assert cache.verify() == []


def test_a_generate_that_is_broken_off_keeps_what_it_had() -> None:
    class Stop(BaseStreamer):  # type: ignore[misc]
        count = 0

        def put(self, value: torch.Tensor) -> None:
            self.count += 1
            if self.count == 6:
                raise KeyboardInterrupt

        def end(self) -> None:
            """Not reached."""

    model, prompt = plain(), prompt_of(LENGTH)
    expected = generate(model, prompt)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompt, past_key_values=cache, streamer=Stop())
        elsewhere(model, cache)
        turn = expected[: LENGTH + 6]
        assert generate(model, turn, past_key_values=cache) == generate(model, turn)
        assert cache.last_hit.host >= LENGTH + 3
        assert cache.verify() == []


def interrupted_at(line: int) -> Callable[..., Any]:
    """For `sys.settrace`: Ctrl-C at so many lines of the adapter's, on this thread."""
    left = line

    def at_line(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != transformers.__file__:
            return None
        left -= event == "line"
        if left < 0:
            raise KeyboardInterrupt
        return at_line

    return at_line


@pytest.mark.promise("Ctrl-C at any line of `generate` leaves a `TierKVCache` consistent.")
@pytest.mark.parametrize("offset", range(3))
def test_ctrl_c_at_any_line_leaves_nothing_wrong_held_or_taken(offset: int) -> None:
    model, texts = plain(), [prompt_of(n * BLOCK + 9, seed=n) for n in range(1, 4)]
    expected = [generate(model, text, 2) for text in texts]
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        for text in texts:
            generate(model, text, 2, past_key_values=cache)
        num_broken = 0
        for line in range(offset, 1000, 9):
            number = line % 3
            try:
                sys.settrace(interrupted_at(line))
                generate(model, texts[number], 2, past_key_values=cache)
                break
            except KeyboardInterrupt:
                num_broken += 1
            finally:
                sys.settrace(None)
            number = (number + line % 2) % 3
            assert generate(model, texts[number], 2, past_key_values=cache) == expected[number]
            assert cache.last_hit.computed < len(texts[number]), "the host has it still"
        assert num_broken > 20
        assert cache.verify() == []


# Controls: were the cached bytes not used, or used at the wrong place, the tests above would not
# notice that they are wrong.


def zeroes_the_tail(device: HostDevice, copy: BlockCopy) -> None:
    if copy.direction is Direction.LOAD and device.host is not None:
        device.host.array[copy.slot_ids[-1]] = 0


def swaps_blocks(device: HostDevice, copy: BlockCopy) -> None:
    if copy.direction is Direction.LOAD and device.host is not None:
        one, two = copy.slot_ids[:2]
        device.host.array[[one, two]] = device.host.array[[two, one]]


def saves_too_early(device: HostDevice, copy: BlockCopy) -> None:
    if copy.direction is Direction.OFFLOAD and device.planes is not None:
        for plane in device.planes.arrays:  # as they were before the last block was computed
            plane[copy.block_ids[-1]] = 0


@pytest.mark.parametrize("meddle", [zeroes_the_tail, swaps_blocks, saves_too_early])
def test_bytes_that_are_not_the_texts_are_noticed(
    meddle: Callable[[HostDevice, BlockCopy], None],
) -> None:
    model, prompt = plain(), prompt_of(LENGTH)
    expected = generate(model, prompt)
    steps = [[token] for token in expected[LENGTH:-1]]
    rows = rows_alone(model, [prompt, prompt[-1:], *steps], LENGTH - 1)
    with TierKVCache.for_model(model, host_bytes=16 * MIB, device=HostDevice(meddle)) as cache:
        generate(model, prompt, past_key_values=cache)
        elsewhere(model, cache)
        tokens = generate(model, prompt, past_key_values=cache)
        assert cache.last_hit.host == LENGTH - 1
        assert not same(rows_of(cache), rows)
        assert (tokens == expected) == (meddle is swaps_blocks), "keys carry their position"


# What is refused


@pytest.mark.parametrize(
    "arguments",
    [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}],
    ids=str,
)
def test_rows_are_refused_in_a_sentence(arguments: dict[str, Any]) -> None:
    model, prompt = plain(), prompt_of(20)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        with pytest.raises(BadRequestError, match="one sequence"):
            generate(model, prompt, past_key_values=cache, **arguments)
        with pytest.raises(BadRequestError, match="one sequence"):
            model.generate(
                torch.zeros((3, 9), dtype=torch.long), max_new_tokens=2, past_key_values=cache
            )
        assert generate(model, prompt, past_key_values=cache) == generate(model, prompt)


@pytest.mark.promise("A `TierKVCache` refuses inputs that tokens do not identify.")
def test_what_tokens_do_not_say_is_refused() -> None:
    model = plain()
    ids = torch.tensor([prompt_of(20)])
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        with pytest.raises(BadRequestError, match="padding"):
            model.generate(ids, attention_mask=mask, max_new_tokens=2, past_key_values=cache)
        with pytest.raises(BadRequestError, match="input_ids"):
            model(inputs_embeds=torch.zeros(1, 3, 64), **{ARGUMENT: cache})
        with pytest.raises(BadRequestError, match="labels changes"):
            model(input_ids=ids, labels=ids, **{ARGUMENT: cache})
        with pytest.raises(BadRequestError, match="position_ids must be 0 to 19"):
            model(input_ids=ids, position_ids=torch.arange(5, 25)[None], **{ARGUMENT: cache})
        with pytest.raises(BadRequestError, match="use_cache"):
            model(input_ids=ids, use_cache=False, **{ARGUMENT: cache})


@pytest.mark.parametrize(
    "wrong",
    [
        {"position_ids": torch.arange(500, 503)[None]},
        {"attention_mask": torch.arange(23)[None] > 4},
    ],
    ids=["position_ids", "attention_mask"],
)
def test_a_short_piece_at_other_places_or_masked_is_refused_and_not_kept(
    wrong: dict[str, Any],
) -> None:
    model, text = plain(), prompt_of(23)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        with cache.sequence(), torch.no_grad():
            model(torch.tensor([text[:20]]), **{ARGUMENT: cache})
            with pytest.raises(BadRequestError, match=r"must be 20 to 22|remove the padding"):
                model(torch.tensor([text[20:]]), **wrong, **{ARGUMENT: cache})
        assert generate(model, [*text, 1], past_key_values=cache) == generate(model, [*text, 1])
        assert cache.last_hit == PromptHit(device=20, computed=4)


def test_a_model_that_does_not_ask_the_cache_is_refused() -> None:
    """It would write over the text that the cache holds, which the next generate relies on."""
    model, other, prompt = plain(), plain(), prompt_of(LENGTH)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        for _ in range(2):
            for wrong in (other, model.model):
                with pytest.raises(BadRequestError, match="ran before its prompt was looked up"):
                    wrong(torch.tensor([prompt_of(30, seed=2)]), **{ARGUMENT: cache})
            assert generate(model, prompt, past_key_values=cache) == generate(model, prompt)


def test_a_cache_that_is_closed_or_of_another_process_says_so() -> None:
    model, prompt = plain(), prompt_of(20)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        generate(model, prompt, past_key_values=cache)
        child = os.fork()
        if not child:
            code = 1
            with suppress(BaseException):
                with pytest.raises(ForkedError, match="make another cache here"):
                    generate(model, prompt, past_key_values=cache)
                cache.close()
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert generate(model, prompt, past_key_values=cache) == generate(model, prompt)
    for asked in (lambda: generate(model, prompt, past_key_values=cache), cache.verify):
        with pytest.raises(ShuttingDownError, match="this cache is closed"):
            asked()


@pytest.mark.promise("Models of other weights, hooks or adapters share no KV.")
def test_weights_that_change_are_noticed() -> None:
    model, prompt = plain(), prompt_of(20)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        generate(model, prompt, past_key_values=cache)
        with torch.no_grad():
            model.lm_head.weight *= 2
        with pytest.raises(ConfigError, match="changed after"):
            generate(model, prompt, past_key_values=cache)


def test_a_model_whose_dropout_is_on_is_refused() -> None:
    model, prompt = plain(), prompt_of(20)
    with TierKVCache.for_model(model.train(), host_bytes=16 * MIB) as cache:
        generate(model, prompt, past_key_values=cache)  # nothing is dropped
    model.config.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="training mode"):
        TierKVCache.for_model(model)
    with TierKVCache.for_model(model.eval(), host_bytes=16 * MIB) as cache:
        assert generate(model, prompt, past_key_values=cache) == generate(model, prompt)
        model.train()
        with pytest.raises(ConfigError, match=r"call model\.eval"):
            generate(model, prompt, past_key_values=cache)


def test_one_generate_at_a_time() -> None:
    model = plain()
    with (
        TierKVCache.for_model(model, host_bytes=16 * MIB) as cache,
        cache.sequence(),
        ThreadPoolExecutor(1) as thread,
        pytest.raises(BadRequestError, match="another generate"),
    ):
        thread.submit(generate, model, prompt_of(20), past_key_values=cache).result(60)


def test_a_copy_of_the_model_is_its_own() -> None:
    model, prompt = plain(), prompt_of(20)
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.neg_()
        assert generate(twin, prompt) != generate(model, prompt)
        with pytest.raises(BadRequestError, match="another model"):
            generate(twin, prompt, past_key_values=cache)


def test_a_model_of_an_encoder_is_served_as_a_decoder() -> None:
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=8, initializer_range=0.3, is_decoder=True,
    )  # fmt: skip
    model, prompt = BertLMHeadModel(config).eval(), prompt_of(LENGTH)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    with TierKVCache.for_model(model, host_bytes=16 * MIB) as cache:
        for text in (prompt, prompt + prompt_of(20, seed=3)):
            assert generate(model, text, past_key_values=cache) == generate(model, text)


def test_a_store_that_cannot_be_used_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="storage URL"):
        TierKVCache.for_model(plain(), "nonsense")
    with pytest.raises(StoreUnavailableError):
        TierKVCache.for_model(plain(), "redis://127.0.0.1:1/0")


def test_a_chat_ends_with_its_input_and_is_found_by_the_next(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    words = [sys.executable, str(ROOT / "examples/chat.py"), "tiny", "--store", store]
    hits = []
    for _ in range(2):
        done = subprocess.run(
            [*words, "--max-new-tokens", "4"],
            input="what is said " * 20 + "\n",
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        hits.append(done.stdout.partition("[")[2].partition("]")[0])
    assert "0 from storage, 260 computed" in hits[0]
    assert "259 from storage, 1 computed" in hits[1]
