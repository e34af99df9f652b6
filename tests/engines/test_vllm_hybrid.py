"""vLLM with models that have recurrent states beside attention: the same tokens with tierkv.

`./scripts/test --engines` runs these. A state is one value of all tokens before it, and vLLM keeps
it only where a step ends at the end of a block. Right is what vLLM alone answers with its prefix
cache on and emptied before each request: only then are prompts computed in the same steps.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import RedisServer, empty_redis, module_redis

__all__ = ["empty_redis", "module_redis"]

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (./scripts/test --engines)", allow_module_level=True)

from tests.engines.test_vllm import prompt
from tests.engines.test_vllm_connector import (
    Engine,
    Prompt,
    engine,
    put,
    transfer,
    values,
)
from tests.engines.tiny_hybrid import KINDS, save_tiny_hybrid
from tierkv.storage.codec import HEADER_BYTES, ValueIdentity

pytestmark = [pytest.mark.timeout(600)]

_BLOCK = 32
_STATES: dict[str, Any] = {"mamba_ssm_cache_dtype": "float32"}
# Ends of 10, 1 and 31 tokens behind a block, none, and less than a block.
_LENGTHS = [170, 5 * _BLOCK + 1, 6 * _BLOCK - 1, 5 * _BLOCK, 20]
_FOUND = [160, 160, 160, 128, 0]  # a token is left to compute, and no state lies inside a block
PROMPTS = [prompt(n, length) for n, length in enumerate(_LENGTHS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_hybrid("qwen3_next", tmp_path_factory.mktemp("qwen3_next"))


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[Engine]:
    with engine(model, None, **_STATES) as running:
        yield running


def served(model: str, config: dict[str, object], **more: object) -> AbstractContextManager[Engine]:
    return engine(model, config, **_STATES, **more)


def each(running: Engine, prompts: list[Prompt], name: str, **more: object) -> list[dict[str, Any]]:
    """Answers to prompts that come one after the other, with vLLM's own cache empty."""
    answers = []
    for at, one in enumerate(prompts):
        assert running.ask("forget")
        request = f"{name}{at}"
        answers.append(running.generate([{"id": request, "tokens": one} | more])[request])
    return answers


def tokens(answers: list[dict[str, Any]]) -> list[Prompt]:
    return [answer["tokens"] for answer in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached"] for answer in answers]


@pytest.mark.promise(
    "vLLM answers a hybrid model's own tokens with states from the host and from Redis."
)
@pytest.mark.parametrize("kind", KINDS)
def test_states_come_from_the_host_and_through_redis_into_a_fresh_process(
    kind: str, tmp_path: Path, empty_redis: RedisServer
) -> None:
    path = save_tiny_hybrid(kind, tmp_path)
    more: dict[str, Any] = {"splits_prefills": kind != "qwen3_next", "dtype": KINDS[kind][1]}
    with engine(path, None, **_STATES, **more) as plain:
        right = tokens(each(plain, PROMPTS, "p"))
    assert len({tuple(one) for one in right}) == len(PROMPTS)
    with served(path, transfer(empty_redis.url), **more) as first:
        assert set(first.ask("groups")) == {"full attention", "state"}
        computed = each(first, PROMPTS, "first")
        assert (tokens(computed), cached(computed)) == (right, [0] * len(PROMPTS))
        again = each(first, PROMPTS, "host")
        assert (tokens(again), cached(again)) == (right, _FOUND)
        first.rests()
        assert first.ask("stale_saves") == 0
    with served(path, transfer(empty_redis.url), **more) as second:
        fetched = each(second, PROMPTS, "second")
        assert (tokens(fetched), cached(fetched)) == (right, _FOUND)
        second.rests()


def states(server: RedisServer) -> list[tuple[bytes, bytes, ValueIdentity]]:
    """The stored states: groups with one value, not one for each block."""
    groups = defaultdict(list)
    for value in values(server):
        groups[value[0].rsplit(b":", 2)[0]].append(value)
    fewest = min(map(len, groups.values()))
    return [value for group in groups.values() if len(group) == fewest for value in group]


def test_a_state_that_is_zeroed_or_another_prompts_is_noticed(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    """The negative control of all tests here: the values are changed under right checksums."""
    right = tokens(each(alone, PROMPTS[:3], "control"))
    with served(model, transfer(empty_redis.url)) as running:
        for change in ("zeroed", "foreign"):
            running.ask("drop")
            empty_redis.execute("FLUSHALL")
            assert tokens(each(running, PROMPTS[:3], f"{change} before")) == right
            running.rests()
            running.ask("drop")
            found = states(empty_redis)
            assert len(found) == 3 * 3, "a state of three groups for each prompt"
            for at, (name, value, identity) in enumerate(found):
                other = found[(at + 1) % 3 + at // 3 * 3][1]
                payload = (
                    other[HEADER_BYTES:]
                    if change == "foreign"
                    else bytes(len(value) - HEADER_BYTES)
                )
                put(empty_redis, name, payload, identity)
            answers = each(running, PROMPTS[:3], f"{change} after")
            assert cached(answers) == _FOUND[:3]
            assert all(got != ours for got, ours in zip(tokens(answers), right, strict=True))


_TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.promise("A hybrid model's prompt is handed over up to its last state.")
def test_a_prefill_with_states_is_handed_over_up_to_its_last_state(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    """The decode instance computes the tokens behind the last block. A prompt that the prefill
    instance has in its own cache is handed over, too, and one without a state is computed."""
    right = tokens(each(alone, PROMPTS, "handed over"))
    url = empty_redis.url
    with (
        served(model, transfer(url, "kv_producer")) as prefill,
        served(model, transfer(url, "kv_consumer", claim_deadline_s=5.0)) as decode,
    ):
        for name in ("first", "in its own cache"):
            told = prefill.generate(
                [
                    {"id": f"{name}{at}", "tokens": one, "params": _TO_DECODE, "max_tokens": 1}
                    for at, one in enumerate(PROMPTS)
                ]
            )
            params = [told[f"{name}{at}"]["params"] for at in range(len(PROMPTS))]
            assert [one is not None for one in params] == [count > 0 for count in _FOUND]
            before = decode.ask("counts").get("loaded_tokens", 0)
            decode.ask("forget")
            for at, one in enumerate(PROMPTS):
                request = {"id": f"{name}{at}", "tokens": one, "params": params[at]}
                assert decode.generate([request])[request["id"]]["tokens"] == right[at]
                decode.ask("forget")
            counts = decode.ask("counts")
            assert counts["loaded_tokens"] - before == sum(_FOUND)
            assert "lost_tickets" not in counts
        prefill.rests()
        decode.rests()


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in float32: its tokens do not depend on what is computed together."""
    return save_tiny_hybrid("granite", tmp_path_factory.mktemp("granite"))


HEADS = [prompt(400 + n, 3 * _BLOCK) for n in range(3)]
MANY = [HEADS[n % 3] + prompt(410 + n, 10 + 5 * n) for n in range(20)]
_SPLIT: dict[str, Any] = {"splits_prefills": True, "dtype": "float32"}


@pytest.mark.promise("States are exact under eviction, preemption, failed loads and aborts.")
def test_states_are_exact_under_eviction_preemption_and_aborts(exact: str, tmp_path: Path) -> None:
    """Prompts in pieces, few blocks of vLLM's and few on the host, copies that last longer than
    steps, loads that fail, requests that are aborted at each step; and the control, that without
    the wait for copies of blocks that are given away wrong ones are saved."""
    with engine(exact, None, **_STATES, **_SPLIT) as plain:
        right = tokens(each(plain, MANY, "plain", max_tokens=40))
    short = [one[:12] for one in right]
    settings = transfer(f"file://{tmp_path}/blocks", host_bytes=8 << 20)
    small = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 96, "max_num_seqs": 12}
    with served(exact, settings, **_SPLIT, **small) as tight:
        tight.ask("faults", slow_s=0.01)
        assert tight.tokens(MANY, max_tokens=40) == right
        assert tight.ask("preemptions") > 0
        assert tight.tokens(MANY[::-1], "again") == short[::-1]
        tight.rests()
        assert tight.ask("counts")["loaded_tokens"] > 10 * _BLOCK
        assert tight.ask("stale_saves") == 0
        for step in range(0, 16, 2):
            tight.ask("forget")
            asked = [
                {"id": f"{name}{step}", "tokens": MANY[at]} for name, at in (("a", 17), ("b", 3))
            ]
            answers = tight.generate(asked, aborts={f"a{step}": step})["b" + str(step)]
            assert answers["tokens"] == short[3]
            tight.rests()
        tight.ask("faults", fail_loads=4)
        tight.ask("forget")
        assert tight.tokens(MANY[:4], "failed") == short[:4]
        tight.rests()
        assert tight.ask("stale_saves") == 0
        tight.ask("faults", fail_loads=0, slow_s=0.1)
        tight.ask("ignore_fences")
        fresh = [prompt(700 + n, 7 * _BLOCK + 8) for n in range(12)]
        tight.tokens(fresh, "unfenced", max_tokens=60)
        assert tight.ask("stale_saves") > 0
    with served(exact, settings, **_SPLIT) as fresh_process:
        answers = each(fresh_process, MANY, "fresh")
        assert tokens(answers) == short
        assert sum(cached(answers)) > 10 * _BLOCK
        fresh_process.rests()


def test_answers_are_found_where_vllm_keeps_states_while_it_decodes(exact: str) -> None:
    first = prompt(120, 100)
    interval = {"prefix_cache_retention_interval": _BLOCK}
    with served(exact, transfer(), **_SPLIT, **interval) as running:
        [answer] = each(running, [first], "first", max_tokens=60)
        longer = [*first, *answer["tokens"], *prompt(121, 20)]
        [found] = each(running, [longer], "longer")
        assert found["cached"] == (100 + 60 - 1) // _BLOCK * _BLOCK
        assert running.ask("reset")
        [computed] = each(running, [longer], "computed")
        assert (computed["cached"], computed["tokens"]) == (0, found["tokens"])
        running.rests()
