"""vllm-router before real vLLM servers with tierkv's connector: it finds what host and store have,
and takes a ticket from the prefill server to the decode server.

`./scripts/test --engines` runs these. The servers are processes of vLLM's own HTTP server, with a
small model of random weights and few GPU blocks, so that a prompt soon lies on the host alone.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.processes import needs, vllm_environment
from tests.redis_server import free_port, redis_server

needs("vllm", "vllm_router")

from tests.engines.test_vllm_connector import prompt as tokens_of
from tests.engines.test_vllm_connector import transfer

pytestmark = [pytest.mark.timeout(600)]

_BLOCK = 32
_NUM_GPU_BLOCKS = 24  # two prompts of these tests
_PROMPT = 9 * _BLOCK + 10  # tokens, with a partial last block
_START_S = 240.0


@dataclass(frozen=True)
class Server:
    """A server of vLLM: its HTTP port, and those of its events and of their replay."""

    port: int
    events: int
    replay: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, metric: str) -> float:
        """Return the sum of a metric's samples."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))


def complete(url: str, prompt: list[int]) -> list[str]:
    """Return the tokens that follow `prompt`, as text."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        tokens: list[str] = json.load(answer)["choices"][0]["logprobs"]["tokens"]
        return tokens


def prompt(seed: int) -> list[int]:
    return tokens_of(seed, _PROMPT)


def _until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(0.5)
    pytest.fail(log.read_text()[-3000:])


@contextlib.contextmanager
def _running(name: str, folder: Path, *arguments: str, url: str) -> Iterator[None]:
    """A module of Python as a process, from its first healthy answer on."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=vllm_environment(), stdout=out, stderr=out
        )
    try:
        _until_healthy(url, process, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # the router drains connections that stay open
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("router")


@pytest.fixture(scope="module")
def servers(model: str, folder: Path) -> Iterator[list[Server]]:
    """Two servers of vLLM on one store."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"<{at}>" for at in range(512 - len(letters)))]
    tokenizer = Tokenizer(models.BPE(vocab={w: at for at, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(f"{model}/tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    Path(f"{model}/tokenizer_config.json").write_text(json.dumps(named))
    with redis_server() as redis, contextlib.ExitStack() as stack:
        made = [Server(free_port(), free_port(), free_port()) for _ in range(2)]
        for at, server in enumerate(made):
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{server.events}",
                "replay_endpoint": f"tcp://*:{server.replay}",
            }
            arguments = ["--model", model, "--served-model-name", "m", "--port", str(server.port)]
            arguments += ["--block-size", str(_BLOCK), "--max-model-len", "512", "--enforce-eager"]
            arguments += ["--num-gpu-blocks-override", str(_NUM_GPU_BLOCKS)]
            arguments += ["--kv-transfer-config", json.dumps(transfer(redis.url))]
            arguments += ["--kv-events-config", json.dumps(events)]
            module = "vllm.entrypoints.openai.api_server"
            running = _running(f"server{at}", folder, module, *arguments, url=server.url)
            stack.enter_context(running)
        yield made


@contextlib.contextmanager
def router(folder: Path, *arguments: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    listens = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    module = "vllm_router.launch_router"
    with _running(f"router{port}", folder, module, *listens, *arguments, url=url):
        yield url


def _kv_aware(servers: list[Server]) -> list[str]:
    """As docs/routers.md has it."""
    arguments = ["--worker-urls", *(server.url for server in servers), "--policy", "kv_aware"]
    arguments += ["--kv-event-model", "m", "--kv-event-block-size", str(_BLOCK)]
    for server in servers:
        arguments += ["--kv-event-source", f"{server.url}=tcp://127.0.0.1:{server.events}"]
        arguments += ["--kv-event-replay-source", f"{server.url}=tcp://127.0.0.1:{server.replay}"]
    return arguments


def _served(servers: list[Server], url: str, tokens: list[int]) -> int:
    """Return the number of the server that the router at `url` asks."""
    done = "vllm:request_success_total"
    before = [server.count(done) for server in servers]
    complete(url, tokens)
    after = [server.count(done) for server in servers]
    [at] = [at for at in range(len(servers)) if after[at] > before[at]]
    return at


def _push_out(server: Server, seed: int) -> None:
    """Fill the GPU blocks of `server` with other prompts."""
    for at in range(3):
        complete(server.url, prompt(seed + at))


def test_the_router_asks_the_server_whose_host_memory_has_the_prompt(
    servers: list[Server], folder: Path
) -> None:
    with router(folder, *_kv_aware(servers)) as url:
        for round_ in range(2):
            for at, server in enumerate(servers):
                some = prompt(100 + 10 * round_ + at)
                complete(server.url, some)
                _push_out(server, 1000 + 100 * round_ + 10 * at)  # to the host alone
                time.sleep(1)  # events are published in steps
                loaded = server.count("vllm:tierkv_loaded_tokens_total")
                assert _served(servers, url, [*some, 7, 8, 9]) == at
                assert server.count("vllm:tierkv_loaded_tokens_total") - loaded >= 9 * _BLOCK


def test_a_router_that_starts_later_learns_of_earlier_blocks_by_replay(
    servers: list[Server], folder: Path
) -> None:
    old = [prompt(300), prompt(301)]
    for server, some in zip(servers, old, strict=True):
        complete(server.url, some)
    with router(folder, *_kv_aware(servers)) as url:
        for at, server in enumerate(servers):  # the first event shows a gap, which is replayed
            complete(server.url, prompt(310 + at))
        time.sleep(2)
        assert [_served(servers, url, [*some, 7]) for some in old] == [0, 1]


def test_the_ticket_goes_from_the_prefill_server_to_the_decode_server(
    servers: list[Server], folder: Path
) -> None:
    prefill, decode = servers
    arguments = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    arguments += ["--prefill", prefill.url, "--decode", decode.url]
    some = prompt(400)
    with router(folder, *arguments) as url:
        loaded = decode.count("vllm:tierkv_loaded_tokens_total")
        answer = complete(url, some)
    assert decode.count("vllm:tierkv_loaded_tokens_total") - loaded == _PROMPT  # with its tail
    assert answer == complete(prefill.url, some)
