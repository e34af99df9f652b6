"""vLLM with models that have recurrent states beside attention: the same tokens with tierkv.

`./scripts/test --engines` runs these. A state is one value of all tokens before it, and vLLM keeps
it only where a step ends at the end of a block. Right is what vLLM alone answers with its prefix
cache on and emptied before each request: only then are prompts computed in the same steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.processes import needs
from tests.redis_server import RedisServer

needs("vllm")

from tests.engines.test_vllm_connector import (
    TO_DECODE,
    Engine,
    Prompt,
    engine,
    named,
    pair_of,
    prompt,
    put,
    transfer,
    values,
)
from tests.engines.tiny_models import STATES, save_tiny
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
    return save_tiny("qwen3_next", tmp_path_factory.mktemp("qwen3_next"))


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[Engine]:
    with engine(model, None, **_STATES) as running:
        yield running


def served(model: str, config: dict[str, object], **more: object) -> AbstractContextManager[Engine]:
    return engine(model, config, **_STATES, **more)


def each(running: Engine, prompts: list[Prompt], **more: object) -> tuple[list[Prompt], list[int]]:
    """`answers` to prompts that come one after the other, with vLLM's own cache empty."""
    tokens, cached = list[Prompt](), list[int]()
    for one in prompts:
        assert running.ask("forget")
        of, found = running.answers([one], **more)
        tokens, cached = tokens + of, cached + found
    return tokens, cached


@pytest.mark.promise(
    "vLLM answers a hybrid model's own tokens with states from the host and from Redis."
)
@pytest.mark.parametrize("kind", STATES)
def test_states_come_from_the_host_and_through_redis_into_a_fresh_process(
    kind: str, tmp_path: Path, empty_redis: RedisServer
) -> None:
    path = save_tiny(kind, tmp_path)
    more: dict[str, Any] = {"splits_prefills": kind != "qwen3_next", "dtype": STATES[kind][1]}
    with engine(path, None, **_STATES, **more) as plain:
        right, _ = each(plain, PROMPTS)
    assert len({tuple(one) for one in right}) == len(PROMPTS)
    with served(path, transfer(empty_redis.url), **more) as first:
        assert set(first.ask("groups")) == {"full attention", "state"}
        assert each(first, PROMPTS) == (right, [0] * len(PROMPTS))
        assert each(first, PROMPTS) == (right, _FOUND), "from the host"
        first.rests()
        assert first.num("stale") == 0
    with served(path, transfer(empty_redis.url), **more) as second:
        assert each(second, PROMPTS) == (right, _FOUND)
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
    right, _ = each(alone, PROMPTS[:3])
    with served(model, transfer(empty_redis.url)) as running:
        for change in ("zeroed", "foreign"):
            running.ask("drop")
            empty_redis.execute("FLUSHALL")
            assert each(running, PROMPTS[:3])[0] == right
            running.rests()
            running.ask("drop")
            found = states(empty_redis)
            assert len(found) == 3 * 3, "a state of three groups for each prompt"
            for at, (name, value, identity) in enumerate(found):
                other = found[(at + 1) % 3 + at // 3 * 3][1] if change == "foreign" else None
                payload = other[HEADER_BYTES:] if other else bytes(len(value) - HEADER_BYTES)
                put(empty_redis, name, payload, identity)
            tokens, cached = each(running, PROMPTS[:3])
            assert cached == _FOUND[:3]
            assert all(got != ours for got, ours in zip(tokens, right, strict=True))


@pytest.mark.promise("A hybrid model's prompt is handed over up to its last state.")
def test_a_prefill_with_states_is_handed_over_up_to_its_last_state(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    """The decode instance computes the tokens behind the last block. A prompt that the prefill
    instance has in its own cache is handed over, too, and one without a state is computed."""
    right, _ = each(alone, PROMPTS)
    with pair_of(model, empty_redis.url, {"claim_deadline_s": 5.0}, **_STATES) as (prefill, decode):
        for _ in ("first", "in its own cache"):
            told = prefill.generate(named(PROMPTS, params=TO_DECODE, max_tokens=1))
            params = [told[f"r{at}"]["params"] for at in range(len(PROMPTS))]
            assert [one is not None for one in params] == [count > 0 for count in _FOUND]
            before = decode.ask("counts").get("loaded_tokens", 0)
            for one, ours, of in zip(PROMPTS, right, params, strict=True):
                assert each(decode, [one], params=of)[0] == [ours]
            counts = decode.ask("counts")
            assert counts["loaded_tokens"] - before == sum(_FOUND)
            assert "lost_tickets" not in counts


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in float32: its tokens do not depend on what is computed together."""
    return save_tiny("granite", tmp_path_factory.mktemp("granite"))


HEADS = [prompt(400 + n, 3 * _BLOCK) for n in range(3)]
MANY = [HEADS[n % 3] + prompt(410 + n, 10 + 5 * n) for n in range(20)]
_SPLIT: dict[str, Any] = {"splits_prefills": True, "dtype": "float32"}


@pytest.mark.promise("States are exact under eviction, preemption, failed loads and aborts.")
def test_states_are_exact_under_eviction_preemption_and_aborts(exact: str, tmp_path: Path) -> None:
    """Prompts in pieces, few blocks of vLLM's and few on the host, copies that last longer than
    steps, loads that fail, requests that are aborted at each step; and the control, that without
    the wait for copies of blocks that are given away wrong ones are saved."""
    with engine(exact, None, **_STATES, **_SPLIT) as plain:
        right, _ = each(plain, MANY, max_tokens=40)
    short = [one[:12] for one in right]
    settings = transfer(f"file://{tmp_path}/blocks", host_bytes=8 << 20)
    small = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 96, "max_num_seqs": 12}
    with served(exact, settings, **_SPLIT, **small) as tight:
        tight.ask("faults", slow_s=0.01)
        assert tight.tokens(MANY, max_tokens=40) == right
        assert tight.num("preemptions") > 0
        assert tight.tokens(MANY[::-1]) == short[::-1]
        tight.rests()
        assert tight.ask("counts")["loaded_tokens"] > 10 * _BLOCK
        assert tight.num("stale") == 0
        for step in range(0, 16, 2):
            tight.ask("forget")
            answers = tight.generate(named([MANY[17], MANY[3]]), aborts={"r0": step})
            assert answers["r1"]["tokens"] == short[3]
            tight.rests()
        tight.ask("faults", fail_loads=4)
        tight.ask("forget")
        assert tight.tokens(MANY[:4]) == short[:4]
        tight.rests()
        assert tight.num("stale") == 0
        tight.ask("faults", fail_loads=0, slow_s=0.1)
        tight.ask("ignore_fences")
        fresh = [prompt(700 + n, 7 * _BLOCK + 8) for n in range(12)]
        tight.tokens(fresh, max_tokens=60)
        assert tight.num("stale") > 0
    with served(exact, settings, **_SPLIT) as fresh_process:
        tokens, cached = each(fresh_process, MANY)
        assert tokens == short
        assert sum(cached) > 10 * _BLOCK
        fresh_process.rests()


def test_answers_are_found_where_vllm_keeps_states_while_it_decodes(exact: str) -> None:
    first = prompt(120, 100)
    interval = {"prefix_cache_retention_interval": _BLOCK}
    with served(exact, transfer(), **_SPLIT, **interval) as running:
        [answer], _ = each(running, [first], max_tokens=60)
        longer = [first + answer + prompt(121, 20)]
        tokens, cached = each(running, longer)
        assert cached == [(100 + 60 - 1) // _BLOCK * _BLOCK]
        assert running.ask("reset")
        assert each(running, longer) == (tokens, [0]), "computed"
        running.rests()
