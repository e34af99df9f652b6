"""vLLM itself with tierkv's connector: the same tokens and bytes as without, whatever happens.

`./scripts/test --engines` runs these. Each engine is a process of its own that is driven step by
step, with a small model of random weights whose greedy tokens tell one prompt from another. Swapped
blocks cannot be seen in tokens (keys carry their positions), so blocks are compared as bytes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.processes import EngineProcess, needs, orphans, vllm_environment
from tests.redis_proxy import proxy_on_a_thread
from tests.redis_server import RedisServer, redis_server

needs("vllm")

from vllm.lora.request import LoRARequest

from tests.embed.engine import until
from tests.embed.test_external import node
from tests.engines.tiny_models import save_tiny
from tierkv.adapters.vllm_connector import AdapterDigests, ConnectorSettings
from tierkv.config import from_mapping
from tierkv.errors import ConfigError
from tierkv.storage.codec import HEADER_BYTES, PlainCodec, ValueIdentity

pytestmark = [pytest.mark.timeout(600)]

_BLOCK = 32
Prompt = list[int]
Requests = list[dict[str, Any]]


def prompt(seed: int, num_tokens: int) -> Prompt:
    draws = random.Random(seed)
    return [draws.randrange(500) for _ in range(num_tokens)]


def transfer(store: str = "", role: str = "kv_both", **more: object) -> dict[str, object]:
    """vLLM's configuration, as in docs/vllm.md."""
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.adapters.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "host_bytes": 64 << 20}
        | {"fetch_policy": "wait_complete"}  # so that what is found does not depend on speeds
        | more,
    }


class Engine(EngineProcess):
    """See connector_process.py."""

    def ask(self, do: str, **fields: object) -> Any:
        return self.answer({"do": do} | fields)

    def generate(self, requests: Requests, **more: object) -> dict[str, Any]:
        """By request, its greedy tokens, how many of its own came from a cache, and more."""
        answers = self.ask("generate", requests=requests, **more)["answers"]
        assert isinstance(answers, dict)
        return answers

    def answers(self, prompts: Sequence[Prompt], **more: object) -> tuple[list[Prompt], list[int]]:
        """Of each prompt its greedy tokens, and how many of its own came from a cache."""
        told = self.generate(named(prompts, **more))
        answers = [told[f"r{at}"] for at in range(len(prompts))]
        return [one["tokens"] for one in answers], [one["cached"] for one in answers]

    def tokens(self, prompts: Sequence[Prompt], **more: object) -> list[Prompt]:
        return self.answers(prompts, **more)[0]

    def cached(self, prompts: Sequence[Prompt], **more: object) -> list[int]:
        return self.answers(prompts, **more)[1]

    def num(self, of: str) -> int:
        return int(self.ask("num", of=of))

    def rests(self) -> None:
        """Nothing runs: every block is vLLM's again, and tierkv's books are right."""
        assert self.ask("at_rest") == {"taken": 0, "requests": 0, "findings": []}


def named(prompts: Sequence[Prompt], **more: object) -> Requests:
    return [{"id": f"r{at}", "tokens": one} | more for at, one in enumerate(prompts)]


@contextmanager
def starting(
    path: str,
    config: dict[str, object] | None = None,
    *,
    sockets: Path | None = None,
    ends: int = 0,
    **arguments: object,
) -> Iterator[Engine]:
    """An engine that need not be ready yet, so that several can start at once. sockets: the
    directory for the ranks' socket. ends: with this status, and leaves nothing if it is 0."""
    environment = vllm_environment() | {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "30",  # a killed one leaves its shared memory
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = [sys.executable, str(Path(__file__).with_name("connector_process.py")), path]
    before = set(os.listdir("/dev/shm"))
    own = environment["TMPDIR"] = str(sockets or tempfile.mkdtemp(prefix="tierkv-test-"))
    running = Engine([*script, json.dumps(config), json.dumps(arguments)], environment)
    try:
        yield running
        assert running.end() == ends
    finally:
        running.kill()
    until(lambda: not orphans(before), "shared memory is left behind")
    assert len(list(Path(own).glob("*.sock"))) == (1 if ends else 0)
    if sockets is None:
        shutil.rmtree(own)


@contextmanager
def engine(
    path: str, config: dict[str, object] | None = None, **arguments: Any
) -> Iterator[Engine]:
    with starting(path, config, **arguments) as running:
        assert running.line() == "ready\n"
        yield running


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[Engine]:
    """vLLM without tierkv, for what is right."""
    with engine(model, None) as running:
        yield running


# Tails of 8, none, block - 1 and 1; three that share 128 tokens.
_LENGTHS = [200, 6 * _BLOCK, 6 * _BLOCK - 1, 6 * _BLOCK + 1]
PROMPTS = [prompt(n, length) for n, length in enumerate(_LENGTHS)] + [
    prompt(50, 4 * _BLOCK) + prompt(60 + n, 40) for n in range(3)
]
# Of these, another engine finds all, the last, partial block included; but for the one whose last
# block the answer has filled, which is stored as that.
FOUND = [200, 192, 160, 193, 168, 168, 168]


@pytest.mark.promise("A fresh vLLM process loads a prefix from a store.")
def test_a_prefix_comes_through_redis_into_a_fresh_process(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    right = alone.tokens(PROMPTS)
    with engine(model, transfer(empty_redis.url)) as first:
        assert first.tokens(PROMPTS) == right
        bytes_of = [first.ask("blocks", tokens=one) for one in PROMPTS]
        first.rests()
    assert min(map(empty_redis.ttl, empty_redis.names())) > 0
    assert len(empty_redis.names("*:tails")) == len(PROMPTS)
    with engine(model, transfer(empty_redis.url)) as second:
        assert second.answers(PROMPTS) == (right, FOUND)
        assert [second.ask("blocks", tokens=one) for one in PROMPTS] == bytes_of
        second.rests()


def test_a_model_that_is_told_to_compute_otherwise_shares_nothing(
    model: str, empty_redis: RedisServer
) -> None:
    """Its weights and their name are the same."""
    other = {"hf_overrides": {"rms_norm_eps": 0.5}}
    with engine(model, transfer(empty_redis.url)) as first:
        tokens = first.tokens(PROMPTS[:2])
    with engine(model, transfer(empty_redis.url), **other) as second:
        assert second.cached(PROMPTS[:2]) == [0, 0]
        second.ask("forget")
        assert second.tokens(PROMPTS[:2]) != tokens


def test_engines_whose_core_is_a_process_of_its_own_find_each_others_prefixes(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    """As `vllm serve` has it: nobody steps the engine but itself, and it ends by a signal."""
    right = alone.tokens(PROMPTS)
    for found in ([0] * 4, FOUND[:4]):
        with engine(model, transfer(empty_redis.url), is_core_alone=True) as running:
            tokens, cached = running.answers(PROMPTS)
            assert (tokens, cached[:4]) == (right, found)


TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def handed_over(
    prefill: Engine, decode: Engine, prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[dict[str, Any]], list[Prompt]]:
    """The prefill instance's token of each prompt and its params, the decode instance's tokens."""
    told = prefill.generate(named(prompts, params=TO_DECODE, max_tokens=1))
    answers = [told[f"r{at}"] for at in range(len(prompts))]
    params = [one["params"] for one in answers]
    asked = [one | {"params": of} for one, of in zip(named(prompts), params, strict=True)]
    told = decode.generate(asked)
    return [one["tokens"] for one in answers], params, [told[one["id"]]["tokens"] for one in asked]


@contextmanager
def pair_of(
    model: str, url: str, settings: dict[str, object], **arguments: Any
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode instance; at the end neither has anything left."""
    one, other = (transfer(url, role, **settings) for role in ("kv_producer", "kv_consumer"))
    with (
        starting(model, one, **arguments) as prefill,
        starting(model, other, **arguments) as decode,
    ):
        assert (prefill.line(), decode.line()) == ("ready\n", "ready\n")
        yield prefill, decode
        prefill.rests()
        decode.rests()


@pytest.fixture
def pair(model: str, empty_redis: RedisServer) -> Iterator[tuple[Engine, Engine]]:
    """At the end Redis has nothing that has no end."""
    with pair_of(model, empty_redis.url, {"claim_deadline_s": 3.0}) as both:
        yield both
        assert -1 not in map(empty_redis.ttl, empty_redis.names())


@pytest.mark.promise("vLLM hands prompts over, partial block included.")
def test_a_prefill_is_handed_over_tails_included(
    pair: tuple[Engine, Engine], alone: Engine, empty_redis: RedisServer
) -> None:
    """Tails of 1, block - 1 and none, and less than a block; both instances run all the time."""
    prefill, decode = pair
    lengths = [6 * _BLOCK + 1, 6 * _BLOCK - 1, 6 * _BLOCK, 20]
    prompts = [prompt(300 + n, length) for n, length in enumerate(lengths)]
    right = alone.tokens(prompts)
    first, params, tokens = handed_over(prefill, decode, prompts)
    assert first == [some[:1] for some in right]
    assert all(some["do_remote_prefill"] and not some["do_remote_decode"] for some in params)
    assert tokens == right
    # What vLLM calls cached in such a request is what the prefill instance had cached.
    assert decode.ask("counts")["loaded_tokens"] == sum(lengths)

    # A ticket that is another prompt's, and one that never comes: computed, and no error.
    other = [prompt(310, 90)]
    for ticket in (params[0]["tierkv_ticket"], "no such ticket"):
        wrong = {"do_remote_prefill": True, "tierkv_ticket": ticket}
        assert decode.tokens(other, params=wrong) == alone.tokens(other), ticket
        decode.ask("forget")
    decode.rests()
    counts = decode.ask("counts")
    assert (counts["loaded_tokens"], counts["lost_tickets"]) == (sum(lengths), 2)
    # Zeroed tails, the negative control.
    tail = [prompt(320, 20)]
    told = prefill.generate(named(tail, params=TO_DECODE, max_tokens=1))
    until(lambda: len(empty_redis.names("*:partial:20*")) == 2)  # as the fourth prompt's is
    zeroed(empty_redis)
    assert decode.tokens(tail, params=told["r0"]["params"]) != alone.tokens(tail)


@pytest.mark.promise("An abort at any step leaves no block behind in vLLM.")
def test_a_hand_over_may_be_aborted_at_every_step(
    pair: tuple[Engine, Engine], alone: Engine
) -> None:
    """On the prefill side while the prompt is computed, saved and published, on the decode side
    while the ticket is waited for and loaded. Who asks for the same afterwards is right."""
    prefill, decode = pair
    for instance in pair:
        instance.ask("faults", slow_s=0.02)
    for step in range(8):
        there = [prompt(330 + step, 3 * _BLOCK + step)]
        right = alone.tokens(there)
        ticket = {"tierkv_ticket": f"t{step}"}
        asked = named(there, params=TO_DECODE | ticket, max_tokens=1)
        prefill.generate(asked, aborts={"r0": step})
        claim = {"do_remote_prefill": True, "do_remote_decode": False} | ticket
        answers = decode.generate(named(there, params=claim), aborts={"r0": step})
        assert answers.get("r0", {"tokens": right[0]})["tokens"] == right[0]
        decode.ask("forget")
        assert decode.tokens(there, params=claim) == right
        prefill.rests()
        decode.rests()


@pytest.fixture(scope="module")
def one(model: str, module_redis: RedisServer) -> Iterator[Engine]:
    """An engine that several tests use, each with prompts of its own."""
    with engine(model, transfer(module_redis.url), events=True, disable_log_stats=False) as running:
        yield running
        running.rests()


def test_what_the_device_has_lost_comes_back_from_the_host(alone: Engine, one: Engine) -> None:
    prompts = [prompt(100 + n, 70 + 45 * n) for n in range(5)]
    right = alone.tokens(prompts)
    assert one.tokens(prompts) == right
    bytes_of = [one.ask("blocks", tokens=some) for some in prompts]
    assert one.ask("forget")
    assert one.answers(prompts) == (right, list(map(len, prompts)))
    assert [one.ask("blocks", tokens=some) for some in prompts] == bytes_of
    one.rests()


def test_what_a_host_does_not_have_is_known_at_once(model: str, alone: Engine) -> None:
    """No request waits for a step, where nothing hits or vLLM's own cache has all of it."""
    prompts = [prompt(170 + n, 3 * _BLOCK + 40 * n) for n in range(5)]
    right = alone.tokens(prompts)
    with engine(model, transfer()) as running:
        assert running.tokens(prompts) == right
        running.rests()
        copied = running.num("copied")
        assert copied >= sum(len(some) // _BLOCK for some in prompts)
        assert running.tokens(prompts) == right
        running.rests()
        assert running.num("asked_again") == 0
        more = running.num("copied") - copied
        assert more <= 2 * len(prompts), "whole prompts are saved again"
        assert running.ask("forget")
        assert running.cached(prompts) == list(map(len, prompts))
        running.rests()


@pytest.mark.promise(
    "vLLM draws its own tokens with the connector, also under eviction and preemption."
)
def test_seeded_sampling_draws_the_same_tokens(alone: Engine, one: Engine) -> None:
    prompts = [prompt(105 + n, 90 + 31 * n) for n in range(4)]
    drawn: dict[str, Any] = {"temperature": 0.8, "max_tokens": 24}
    right = alone.tokens(prompts, seed=7, **drawn)
    assert right != alone.tokens(prompts, seed=8, **drawn)
    assert one.tokens(prompts, seed=7, **drawn) == right
    one.ask("forget")
    assert one.answers(prompts, seed=7, **drawn) == (right, list(map(len, prompts)))


def test_what_one_salt_has_computed_no_other_finds(alone: Engine, one: Engine) -> None:
    prompts = [prompt(110, 150)]
    right = alone.tokens(prompts)
    for salt, found in [("tea", 0), ("milk", 0), (None, 0), ("tea", 150), (None, 150)]:
        assert one.answers(prompts, salt=salt) == (right, [found]), salt
        one.ask("forget")


def test_answers_are_found_by_prompts_that_continue_them(alone: Engine, one: Engine) -> None:
    first = prompt(120, 100)
    [answer] = one.tokens([first], max_tokens=60)
    longer = [first + answer + prompt(121, 20)]
    one.ask("forget")
    # The last token of an answer is not computed.
    assert one.answers(longer) == (alone.tokens(longer), [100 + 60 - 1])


@pytest.mark.promise("vLLM computes blocks whose save, load or promise failed.")
def test_a_load_that_fails_is_computed_and_not_tried_for_ever(alone: Engine, one: Engine) -> None:
    prompts = [prompt(130 + n, 180) for n in range(4)]
    right = alone.tokens(prompts)
    one.tokens(prompts)
    for failures in (2, 1 << 30):
        one.ask("forget")
        one.ask("faults", fail_loads=failures)
        told = one.ask("generate", requests=named(prompts))
        one.ask("faults", fail_loads=0)
        assert [told["answers"][f"r{at}"]["tokens"] for at in range(4)] == right
        assert told["steps"] < 300
        one.rests()


@pytest.mark.promise("vLLM computes blocks whose save, load or promise failed.")
def test_a_save_that_fails_is_no_copy(alone: Engine, one: Engine) -> None:
    """Its blocks are vLLM's again all the same, and the next who computes them saves them."""
    prompts = [prompt(135 + n, 150) for n in range(3)]
    right = alone.tokens(prompts)
    one.ask("faults", fail_saves=1 << 30)
    assert one.tokens(prompts) == right
    one.rests()
    one.ask("faults", fail_saves=0)
    for cached in (0, 150):
        one.ask("forget")
        assert one.answers(prompts) == (right, [cached] * 3)
    one.rests()


@pytest.mark.promise("vLLM computes blocks whose save, load or promise failed.")
def test_promises_that_have_expired_are_computed(alone: Engine, one: Engine) -> None:
    prompts = [prompt(140 + n, 130) for n in range(2)]
    right = alone.tokens(prompts)
    one.tokens(prompts)
    for times in (1, 1 << 30):
        one.ask("forget")
        one.ask("expire_promises", times=times)
        assert one.tokens(prompts) == right
        one.ask("expire_promises", times=0)
        one.rests()


@pytest.mark.promise(
    "vLLM draws its own tokens with the connector, also under eviction and preemption."
)
def test_other_values_in_redis_are_noticed(
    alone: Engine, one: Engine, module_redis: RedisServer
) -> None:
    """The negative controls: of values with right checksums, zeroed ones change tokens, and swapped
    ones, which tokens cannot show, bytes."""
    prompts = [prompt(150, 6 * _BLOCK), prompt(151, 6 * _BLOCK)]
    right = alone.tokens(prompts)
    for at, change in enumerate((zeroed, swapped)):
        some = prompts[at]
        one.ask("drop")
        module_redis.execute("FLUSHALL")
        assert one.tokens([some]) == [right[at]]
        bytes_of = one.ask("blocks", tokens=some)
        one.rests()
        one.ask("drop")
        change(module_redis)
        tokens, cached = one.answers([some])
        assert cached == [6 * _BLOCK]
        assert one.ask("blocks", tokens=some) != bytes_of
        assert at == 1 or tokens != [right[at]]
    module_redis.execute("FLUSHALL")
    one.ask("drop")


def values(server: RedisServer) -> list[tuple[bytes, bytes, ValueIdentity]]:
    """Names, values and what their headers say, of blocks."""
    found = []
    for name in sorted(server.names()):
        if b":ticket:" in name or name.endswith(b":tails"):
            continue
        value = server.execute("GET", name)
        if isinstance(value, bytes) and len(value) > 1000:  # what opened a ticket may be gone
            number = int.from_bytes(value[56:60], "little")
            found.append((name, value, ValueIdentity(value[8:24], value[24:56], number)))
    assert len(found) >= 6
    return found


def put(server: RedisServer, name: bytes, payload: bytes, identity: ValueIdentity) -> None:
    server.execute("SET", name, PlainCodec().encode(payload, identity)[0] + payload, "KEEPTTL")


def zeroed(server: RedisServer) -> None:
    for name, value, identity in values(server):
        put(server, name, bytes(len(value) - HEADER_BYTES), identity)


def swapped(server: RedisServer) -> None:
    found = values(server)
    for (name, _, identity), (_, other, _) in zip(found, found[1:] + found[:1], strict=True):
        put(server, name, other[HEADER_BYTES:], identity)


def test_a_reset_cache_is_not_found_again_in_storage_neither(alone: Engine, one: Engine) -> None:
    prompts = [prompt(160, 100)]
    right = alone.tokens(prompts)
    one.tokens(prompts)
    assert one.ask("reset")
    for cached in (0, 100):
        assert one.answers(prompts) == (right, [cached])
        one.ask("forget")
    one.rests()


@pytest.mark.promise("An abort at any step leaves no block behind in vLLM.")
def test_a_request_may_be_aborted_at_every_step(alone: Engine, one: Engine) -> None:
    """While it is looked up, loaded, computed and saved; another one runs on beside it."""
    there, other = prompt(170, 300), prompt(171, 120)
    one.tokens([there])
    right = alone.tokens([there, other])
    one.ask("faults", slow_s=0.02)  # so that loads and saves last for several steps
    for step in range(24):
        one.ask("forget")
        requests = named([there, prompt(180 + step, 90), other])
        answers = one.generate(requests, aborts={"r0": step, "r1": step})
        assert answers["r2"]["tokens"] == right[1]
        one.rests()
    one.ask("faults", slow_s=0)
    one.ask("forget")
    assert one.tokens([there, other]) == right
    one.rests()


HEADS = [prompt(400 + n, 3 * _BLOCK) for n in range(5)]
MANY = [HEADS[n % 5] + prompt(410 + n, 10 + 3 * n) for n in range(50)]


@pytest.mark.promise(
    "vLLM draws its own tokens with the connector, also under eviction and preemption."
)
def test_fifty_requests_with_shared_prefixes_under_eviction_are_exact(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    """Prompts cut into pieces, few blocks of vLLM's and few on the host, copies that last longer
    than steps, requests that are preempted: and the control, that without the fence before
    preempted blocks are written again, wrong blocks are saved."""
    right = alone.tokens(MANY)
    settings = transfer(empty_redis.url, host_bytes=40 * 3 * 8192)
    small = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 96, "max_num_seqs": 12}
    with engine(model, settings, **small) as tight:
        tight.ask("faults", slow_s=0.005)
        # As many tokens as do not depend on what vLLM computes together.
        assert [some[:12] for some in tight.tokens(MANY, max_tokens=40)] == right
        assert tight.num("preemptions") > 0
        assert tight.tokens(MANY[::-1]) == right[::-1]
        tight.rests()
        counts = tight.ask("counts")
        assert counts["loaded_tokens"] > 50 * _BLOCK
        assert tight.num("stale") == 0
        # Preempted while they are saved; and the control, that the wait for that is needed.
        tight.ask("faults", slow_s=0.1)
        for is_unfenced in (False, True):
            before = tight.num("preemptions")
            long = [prompt(is_unfenced * 20 + 500 + n, 8 * _BLOCK + 8) for n in range(10)]
            tight.tokens(long, max_tokens=100)
            assert tight.num("preemptions") > before
            assert (tight.num("stale") > 0) == is_unfenced
            tight.ask("ignore_fences")


@pytest.mark.parametrize("fault", ["killed", "hung", "flushed"])
def test_a_store_that_fails_costs_time_and_no_token(model: str, alone: Engine, fault: str) -> None:
    prompts = [prompt(600 + n, 150) for n in range(6)]
    right = alone.tokens(prompts)
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        config = transfer(server.url, fetch_deadline_s=1.0)
        running = stack.enter_context(engine(model, config))
        assert running.tokens(prompts[:3]) == right[:3]
        if fault == "killed":
            server.kill()
        elif fault == "hung":
            server.pause()
        for of in ("forget", "drop"):  # with a host tier, and with all of it to be asked for
            running.ask(of)
            if fault == "flushed":
                server.execute("FLUSHALL")
            assert running.tokens(prompts) == right
        running.rests()
        if fault == "hung":
            server.resume()
            running.ask("drop")
            assert running.tokens(prompts) == right
            running.rests()


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_a_slow_store_is_not_waited_for_once_it_is_known(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """By default a request that computes faster does so. Nothing is known of either at first."""
    model = request.getfixturevalue(kind)
    prompts = [prompt(650 + n, 200) for n in range(40)]
    with ExitStack() as stack:
        alone = stack.enter_context(engine(model, None))
        right = alone.tokens(prompts)
        server = stack.enter_context(redis_server())
        with engine(model, transfer(server.url)) as first:
            assert first.tokens(prompts) == right
        proxy = stack.enter_context(proxy_on_a_thread(server.port))
        proxy.delay_s = 0.5
        config = transfer(proxy.url, fetch_policy="best_effort")
        with engine(model, config) as second:
            took, computed = list[float](), list[float]()
            for some, ours in zip(prompts, right, strict=True):
                for of, times in ((alone, computed), (second, took)):
                    started = time.monotonic()
                    assert of.tokens([some]) == [ours]
                    times.append(time.monotonic() - started)
            second.rests()
        # All wait a second at most before the engine's speed is known, and one that it is a try
        # for (`PROBE_EVERY`) later; who waits for an answer waits half a second, 20 s if all do.
        assert sum(took) < 1.5 * sum(computed) + 3.0, (took, computed)
        assert sorted(took)[-6] < statistics.median(computed) + 0.4, (took, computed)
        with engine(model, transfer(server.url, fetch_policy="best_effort")) as third:
            assert third.cached(prompts[:1]) == [200], "a store that is fast is asked"


def test_two_ranks_in_processes_of_their_own_keep_their_halves(
    model: str, empty_redis: RedisServer
) -> None:
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model, None, **settings) as plain:
        right = plain.tokens(PROMPTS)
    with engine(model, transfer(empty_redis.url), **settings) as first:
        assert first.tokens(PROMPTS) == right
        first.ask("forget")
        assert first.cached(PROMPTS[:4]) == _LENGTHS
        first.rests()
    with engine(model, transfer(empty_redis.url), **settings) as second:
        assert second.answers(PROMPTS) == (right, FOUND)
        second.rests()
    with engine(model, transfer(empty_redis.url)) as other:
        assert other.cached(PROMPTS[:2]) == [0, 0]


def test_an_engine_that_was_killed_leaves_no_socket_to_those_that_come(
    model: str, tmp_path: Path
) -> None:
    config = transfer()
    with starting(model, config, sockets=tmp_path, ends=-signal.SIGKILL) as killed:
        assert killed.line() == "ready\n"
        killed.process.kill()
    left = set(tmp_path.glob("*.sock"))
    with engine(model, config, sockets=tmp_path):
        now = set(tmp_path.glob("*.sock"))
        assert (len(now), now & left) == (1, set())


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
def test_other_numbers_of_ranks_find_each_others_blocks(
    model: str, empty_redis: RedisServer, writers: int, readers: int
) -> None:
    """First tokens are compared, since other numbers of ranks go on to round differently; they tell
    heads that were put together wrongly, as zeroed values do above."""

    def ranks(number: int) -> dict[str, Any]:
        two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        return two if number > 1 else {}

    with engine(model, transfer(empty_redis.url), **ranks(writers)) as first:
        right = [some[:3] for some in first.tokens(PROMPTS)]
        assert len({tuple(some) for some in right}) == len(PROMPTS), "they tell prompts apart"
        until(lambda: len(empty_redis.names("*:tails")) == len(PROMPTS))  # all is stored
        first.rests()
    config = transfer(empty_redis.url, peer_tensor_parallel=[writers])
    with engine(model, config, **ranks(readers)) as second:
        tokens, cached = second.answers(PROMPTS)
        assert ([some[:3] for some in tokens], cached) == (right, FOUND)
        second.rests()


def test_engines_share_the_host_memory_of_a_node(model: str, alone: Engine, tmp_path: Path) -> None:
    right = alone.tokens(PROMPTS)
    with node(tmp_path / "node", TIERKV_CACHE__HOST_BLOCKS="1024") as at:
        config = transfer()
        config["kv_connector_extra_config"] = {"node": at.path}
        with engine(model, config) as first, engine(model, config) as second:
            assert first.tokens(PROMPTS) == right
            first.rests()
            # Memory has the tail that the answer has filled; the store has that block as it is now.
            assert second.answers(PROMPTS) == (right, list(map(len, PROMPTS)))
            second.rests()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with windows."""
    return save_tiny("gemma", tmp_path_factory.mktemp("hybrid"))


def test_windows_are_groups_of_their_own(hybrid: str, empty_redis: RedisServer) -> None:
    """vLLM keeps only the blocks of a window; so does tierkv, and finds them in a fresh process,
    in a decode instance with its tail, and under preemption."""
    small = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 96}
    with engine(hybrid, None) as plain:
        right = plain.tokens(PROMPTS)
        many = plain.tokens(MANY[:20])
    with engine(hybrid, transfer(empty_redis.url), **small) as first:
        assert sorted(first.ask("groups")) == ["full attention", "sliding window"]
        assert first.tokens(PROMPTS) == right
        first.ask("forget")
        first.ask("faults", slow_s=0.005)
        assert first.tokens(PROMPTS) == right
        assert [some[:12] for some in first.tokens(MANY[:20], max_tokens=40)] == many
        first.rests()
        assert first.num("stale") == 0
        first.ask("faults", fail_loads=3)
        first.ask("forget")
        assert first.tokens(PROMPTS) == right
        first.rests()
    with engine(hybrid, transfer(empty_redis.url)) as second:
        assert second.answers(PROMPTS) == (right, FOUND)
        second.rests()


def test_an_adapter_whose_files_cannot_be_read_is_nobody_elses(tmp_path: Path) -> None:
    digests = AdapterDigests()

    def digest(name: str) -> bytes:
        deadline = time.monotonic() + 20
        while (found := digests.of(LoRARequest(name, 1, str(tmp_path / "none")))) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return found

    assert digest("a") == digest("a") != digest("b")
    digests.close()


@pytest.mark.promise("vLLM shares KV of LoRA adapters only if their files are equal.")
def test_an_adapters_kv_is_its_own(model: str, tmp_path: Path) -> None:
    """Whatever it is called: two names for the same files share, other files under the same name
    do not."""
    paths = [lora(tmp_path / f"{seed}", seed) for seed in (1, 2)]
    some = [prompt(750, 150)]
    more = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engine(model, None, **more) as plain:
        rights = [plain.tokens(some, lora=[f"l{at}", at + 1, path])[0]
                  for at, path in enumerate(paths)]  # fmt: skip
        bare = plain.tokens(some)[0]
        assert len({tuple(one) for one in (*rights, bare)}) == 3
    with engine(model, transfer(), **more) as running:
        for adapter, cached, right in [
            (None, 0, bare),
            (["first", 1, paths[0]], 0, rights[0]),
            (["other", 2, paths[1]], 0, rights[1]),
            (["same files", 3, paths[0]], 150, rights[0]),
            (None, 150, bare),
        ]:
            running.ask("forget")
            assert running.answers(some, lora=adapter) == ([right], [cached]), adapter
        running.rests()


def lora(path: Path, seed: int) -> str:
    """An adapter of random weights for the attention of `model`."""
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    torch.manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 128, dtype=torch.bfloat16)
            weights[f"{at}.lora_B.weight"] = torch.randn(width, 8, dtype=torch.bfloat16)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.promise("vLLM's metrics count loaded, saved and evicted blocks.")
def test_what_was_loaded_and_saved_is_among_vllms_metrics(alone: Engine, one: Engine) -> None:
    some = [prompt(760, 150)]
    before = one.ask("metrics")
    one.tokens(some)
    one.ask("forget")
    one.tokens(some)
    one.tokens([prompt(761, 40)])  # vLLM asks for statistics in its steps
    after = one.ask("metrics")
    assert after["vllm:tierkv_loaded_tokens"] - before.get("vllm:tierkv_loaded_tokens", 0) == 150
    assert after["vllm:tierkv_saved_blocks"] - before.get("vllm:tierkv_saved_blocks", 0) >= 5


def hint(kind: str, version: str = "1.0") -> dict[str, Any]:
    return {
        "action_id": f"{kind} {version}",
        "action_type": kind,
        "action_version": version,
        "payload": {"source_control_endpoint": "tcp://h", "block_hashes": [1], "mode": "copy"},
    }


@pytest.mark.promise("vLLM's sessions and hints to fetch are followed; unknown hints are counted.")
def test_turns_of_a_session_are_kept_and_hints_are_followed_or_counted(
    alone: Engine, one: Engine
) -> None:
    some, others = prompt(720, 4 * _BLOCK), [prompt(721, 40)]
    right = alone.tokens([some])
    before = one.ask("counts")
    one.ask("events")
    hints = [hint("kv.fetch"), hint("kv.fetch", "9"), hint("kv.pin")]
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": hints}
    unknown = envelope | {"protocol_version": "7"}
    assert one.tokens([some], session="a", hints=envelope) == right
    one.tokens(others)  # vLLM asks for events and counts in its steps
    one.tokens(others, hints=unknown)
    one.rests()
    assert one.ask("drop") == 0, "a session holds nothing"
    assert one.tokens([some], session="a") == right
    one.tokens(others)
    counts = one.ask("counts")
    counted = {name: counts[name] - before.get(name, 0) for name in counts}
    expected = {"fetch_hints": 1, "ignored_hints": 5, "kept_turns": 2}
    assert {name: counted[name] for name in expected} == expected
    metrics = one.ask("metrics")
    assert all(metrics[f"vllm:tierkv_{name}"] >= count for name, count in expected.items())
    stored = [event for event in one.ask("events") if event["kind"] == "BlockStored"]
    names = set(one.ask("hashes", tokens=some))
    assert {event["session"] for event in stored if names & set(event["names"])} == {"a"}
    one.rests()


def test_events_of_host_and_store_have_the_tokens_by_which_routers_find_blocks(
    alone: Engine, one: Engine
) -> None:
    plain, salted = prompt(702, 4 * _BLOCK), prompt(703, 4 * _BLOCK)
    one.ask("events")
    one.tokens([plain])
    one.tokens([salted], salt="of a tenant")
    one.tokens([prompt(704, 40)])
    stored = [event for event in one.ask("events") if event["kind"] == "BlockStored"]
    names = one.ask("hashes", tokens=plain)
    for medium in ("CPU", "STORAGE"):
        known: dict[str | None, list[int]] = {None: []}
        for event in [event for event in stored if event["medium"] == medium and event["tokens"]]:
            before = known.get(event["parent"])
            if before is None:
                continue  # goes on from a block of another test
            for at, name in enumerate(event["names"]):
                before = [*before, *event["tokens"][at * _BLOCK : (at + 1) * _BLOCK]]
                known[name] = before
        assert known[names[-1]] == plain[: len(names) * _BLOCK], medium
        assert salted[:_BLOCK] not in known.values(), medium


def test_the_old_names_of_settings_are_read() -> None:
    given = {"other_ranks": [1, 4], "expires_s": 3.0, "least_tokens": 8}
    found = from_mapping(ConnectorSettings, given, "kv_connector_extra_config")
    assert (found.peer_tensor_parallel, found.promise_ttl_s, found.min_tokens) == ((1, 4), 3.0, 8)


def test_settings_that_are_not_there_are_named() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"host_byte": 1}, r"no setting host_byte \(did you mean host_bytes\?"),
        ({"colour": 1}, "no setting colour; this table has .*host_bytes"),
        ({"host_bytes": "much"}, "Expected `int`, got `str`"),
        (
            {"node": "/run/tierkv/engines", "host_bytes": 1 << 30},
            "node cannot be combined with host_bytes, .*: remove host_bytes",
        ),
    ]
    for given, problem in cases:
        with pytest.raises(ConfigError, match=f"kv_connector_extra_config: .*{problem}"):
            from_mapping(ConnectorSettings, given, "kv_connector_extra_config")
