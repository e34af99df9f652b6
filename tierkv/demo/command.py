"""The command `tierkv demo`: reads the prompt, starts the nodes, and prints each scene."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import click
import msgspec
import uvloop

from tierkv.api.settings import masked_url
from tierkv.clock import SystemClock
from tierkv.demo.processes import DemoError, private_redis
from tierkv.demo.prompts import (
    BLOCK_SIZE,
    ChatPrompts,
    Prompts,
    TextPrompts,
    choose_model,
    device_blocks,
)
from tierkv.demo.scenes import DemoNodes, Play, Scene
from tierkv.errors import ConfigError
from tierkv.storage.factory import StoreSettings, open_store

_MAX_PROMPT_TOKENS = 100_000


@click.command()
@click.option(
    "--model",
    metavar="PATH",
    help="The model, a directory or a GGUF file, or `tiny` for the model of bytes that is built "
    "in.  [default: SmolLM2-135M-Instruct, which ./scripts/demo installs; else tiny]",
)
@click.option("--prompt", help="The text of the prompt, instead of the demo's own document.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    help="A UTF-8 text file to use as the prompt.",
)
@click.option(
    "--storage",
    metavar="URL",
    help=(
        "The store that the nodes share: file:///DIR, redis://HOST:PORT/DB, or 'redis' to "
        "start a private redis-server for the demo.  [default: a temporary directory]"
    ),
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 256),
    help="Number of tokens of each answer, at most.  [default: 32; 48 of the tiny model]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def demo(
    model: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    storage: str | None,
    *,
    max_tokens: int | None,
    as_json: bool,
) -> None:
    """Run a demonstration with real processes on this machine.

    The demo starts a prefill node and a decode node that share only storage, and a single node that
    computes everything. A prompt with a partial last block is handed over, first through storage,
    then directly from the prefill node's memory. The next turn of the conversation finds its blocks
    on the device. Other prompts evict these blocks, and a turn finds them on the host. The decode
    node restarts, and a turn finds its blocks in storage. Then a gateway runs in front of two
    prefill and two decode nodes, and the decode node is killed during its answer. After each scene,
    the answer is compared with the single node's.

    The command exits with 0 if every answer was identical, with 1 if an answer differed or
    something failed, and with 2 on wrong usage. All processes are stopped at the end.
    """
    chosen, text = choose_model(model), read_prompt(prompt, prompt_file)
    if storage in ("none", "memory://"):
        raise ConfigError(
            f"--storage {storage} cannot be shared by processes: give "
            "file:///DIRECTORY or redis://HOST:PORT/DB"
        )

    if storage not in (None, "redis"):
        open_store(storage, StoreSettings(), SystemClock())  # connects to nothing: checks the URL

    def say(line: str) -> None:
        if not as_json:
            click.echo(line)

    started = time.monotonic()
    if chosen.why:
        click.echo(f"{chosen.why}.", err=True)
    prompts: Prompts = TextPrompts(text, max_tokens)
    if chosen.path is not None:
        prompts = ChatPrompts(chosen.path, text, max_tokens)
        say(f"model: {chosen.path.stem}")
    try:
        scenes = uvloop.run(_play(chosen.path, prompts, storage, say))
    except asyncio.CancelledError as error:
        raise DemoError("stopped by a signal; every process of the demo was stopped") from error
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(scene) for scene in scenes], indent=2))
    identical = sum(scene.is_identical for scene in scenes)
    say(
        f"\n{identical} of {len(scenes)} answers identical to a single node, "
        f"{time.monotonic() - started:.0f} s in all."
    )
    if identical < len(scenes):
        raise DemoError("an answer differs from the single node's: the cache gave wrong bytes")


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """Return the prompt's text from the options; None if the user gives none.

    Args:
        prompt: the text; None if not given.
        prompt_file: a file with the text; None if not given.

    Raises:
        ConfigError: the text is empty, too long or not UTF-8, or the file cannot be read.
        click.UsageError: both arguments are given.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    text = prompt if prompt_file is None else _read_file(prompt_file)
    if text is None:
        return None
    try:
        num_tokens = len(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError("the prompt is not valid UTF-8 text") from error
    if num_tokens == 0:
        raise ConfigError("the prompt is empty: give at least one character")
    if num_tokens > _MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"the prompt has {num_tokens} tokens (one per byte), and the demo allows "
            f"{_MAX_PROMPT_TOKENS}: shorten it"
        )
    return text


def _read_file(path: Path) -> str:
    try:
        # Opening a named pipe waits until another process writes into it.
        with path.open("rb") as file:
            raw = file.read(_MAX_PROMPT_TOKENS + 1)  # a device or a pipe may have no end
        if len(raw) > _MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"the prompt file {path} has more than {_MAX_PROMPT_TOKENS} tokens "
                "(one per byte), the maximum: shorten it"
            )
        return raw.decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"the prompt file {path} does not exist") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the prompt file {path} is not valid UTF-8 (byte {error.start}): give a text file"
        ) from error
    except OSError as error:
        raise ConfigError(f"the prompt file {path} cannot be read: {error.strerror}") from error


async def _play(
    model: Path | None, prompts: Prompts, storage: str | None, say: Callable[[str], None]
) -> list[Scene]:
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    # A signal cancels this task, which then stops all processes and removes the folder.
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    scenes: list[Scene] = []
    with tempfile.TemporaryDirectory(prefix="tierkv-demo-") as temporary:
        folder = Path(temporary)
        config = folder / "node.toml"
        config.write_text(node_config(prompts, model, folder))
        async with _storage(storage, folder) as url:
            say(f"prompt: {prompts.num_tokens} tokens; storage: {masked_url(url)}")
            if prompts.question:
                say(f"        a document, then: {prompts.question}")
            nodes = DemoNodes(url, config, folder)
            async with nodes.running():
                async for scene in Play(nodes, prompts, say).scenes():
                    scenes.append(scene)
                    say(report(scene, len(scenes), prompts.shown_characters))
                await nodes.check_blocks()
    return scenes


@asynccontextmanager
async def _storage(storage: str | None, folder: Path) -> AsyncIterator[str]:
    if storage == "redis":
        async with private_redis(folder) as url:
            yield url
    elif storage is None:
        yield f"file://{folder / 'store'}"
    else:
        yield storage


def report(scene: Scene, number: int, shown_characters: int) -> str:
    """Return the text that the demo prints for one scene.

    Args:
        scene: the results of the scene.
        number: number of the scene, from 1.
        shown_characters: largest number of characters of the answer to show.
    """
    lines = []
    if scene.matched is not None:
        matched = ", ".join(f"{tier} {count}" for tier, count in scene.matched.items() if count)
        lines.append(f"matched                {matched or 'nothing'}")
    if scene.moved is not None:
        sizes = (f"{leg} {size / 1024:.0f} KiB" for leg, size in scene.moved.items() if size)
        lines.append(f"moved on decode node   {', '.join(sizes) or 'nothing'}")
    if scene.event:
        lines.append(f"on the way             {scene.event}")
    middle = "".join(f"\n    {line}" for line in lines)
    with_ms, without_ms = scene.ttft_s * 1000, scene.ttft_without_s * 1000
    tail = f", the last {scene.tail_tokens} of them a tail" if scene.tail_tokens else ""
    return f"""
({"abcdef"[number - 1]}) {scene.title}
    prompt                 {scene.prompt_tokens} tokens{tail}{middle}
    time to first token    {with_ms:.1f} ms; without cache {without_ms:.1f} ms
    answer                 {scene.text[:shown_characters]!r}
    identical to a single node: {"yes" if scene.is_identical else "NO"}
"""


def node_config(prompts: Prompts, model: Path | None, folder: Path) -> str:
    """Return the config file of the demo's nodes, in TOML.

    The device has room for little more than one conversation, so other prompts soon evict its
    blocks. Blocks are copied to the host when they are evicted from the device. Requests wait for
    storage until all blocks have arrived, so that the demo shows the same hits on a busy machine.

    Args:
        prompts: the prompts, whose length determines the size of the tiers.
        model: path of the model; None for the built-in one.
        folder: directory in which the nodes share the model's weights.
    """
    blocks = device_blocks(prompts)
    path = "" if model is None else str(model.absolute())
    return f"""
[node]
model = {json.dumps(path)}

[engine]
weights_dir = {json.dumps(str(folder / "weights"))}

[cache]
block_size = {BLOCK_SIZE}
device_blocks = {blocks}
host_blocks = {6 * blocks}
host_write = "write_back"
storage_write = "write_through"
fetch_policy = "wait_complete"
"""
