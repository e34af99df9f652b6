"""The command `tierkv demo`: reads the prompt, sets the stage, prints what the scenes showed."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

import click
import msgspec
import uvloop

from tierkv.api.settings import masked_url
from tierkv.cli.output import progress
from tierkv.clock import SystemClock
from tierkv.demo.processes import DemoError, private_redis
from tierkv.demo.scenes import DemoNodes, Play, Scene
from tierkv.errors import ConfigError
from tierkv.storage.factory import StoreSettings, open_store

_BLOCK_SIZE = 16
_ROOM_FOR_TURNS = 512  # tokens: answers and the follow-up question
_MAX_PROMPT_TOKENS = 100_000


@click.command()
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
    default=48,
    show_default=True,
    help="Number of tokens of each answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def demo(
    prompt: str | None,
    prompt_file: Path | None,
    storage: str | None,
    max_tokens: int,
    *,
    as_json: bool,
) -> None:
    """Run a demonstration with real processes on this machine.

    The demo starts a prefill node and a decode node that share only storage, and a single node that
    computes everything. A prompt with a partial last block is handed over, first through storage,
    then directly from the prefill node's memory. A follow-up turn hits the device; pressure moves
    blocks to the host, and a turn hits the host; the decode node restarts, and a turn hits storage.
    Then a gateway runs in front of two prefill and two decode nodes, and the decode node is killed
    during its answer. After each scene the answer is compared with the single node's.

    Exits with 0 if every answer was identical, with 1 if an answer differed or something failed,
    and with 2 on wrong usage. All processes are stopped at the end.
    """
    text = read_prompt(prompt, prompt_file)
    if storage in ("none", "memory://"):
        raise ConfigError(
            f"--storage {storage} cannot be shared by processes: give "
            "file:///DIRECTORY or redis://HOST:PORT/DB"
        )

    if storage not in (None, "redis"):
        open_store(storage, StoreSettings(), SystemClock())  # touches nothing; is it a URL at all?

    def say(line: str) -> None:
        if not as_json:
            click.echo(line)

    started = time.monotonic()
    try:
        scenes = uvloop.run(_play(text, storage, max_tokens, say))
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


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt's text.

    Raises:
        ConfigError: there is no usable prompt.
        click.UsageError: two prompts were given.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    if prompt_file is not None:
        text = _read_file(prompt_file)
    elif prompt is not None:
        text = prompt
    else:
        text = resources.files("tierkv.demo").joinpath("document.md").read_text(encoding="utf-8")
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
        # A named pipe is not open before somebody writes into it.
        with progress(f"reading {path}"), path.open("rb") as file:
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
    text: str, storage: str | None, max_tokens: int, say: Callable[[str], None]
) -> list[Scene]:
    """Run every scene.

    SIGTERM, Ctrl-C and closing the terminal cancel it, and no child process or folder remains.
    """
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    scenes: list[Scene] = []
    with tempfile.TemporaryDirectory(prefix="tierkv-demo-") as temporary:
        folder = Path(temporary)
        config = folder / "node.toml"
        config.write_text(node_config(len(text.encode())))
        async with _storage(storage, folder) as url:
            say(f"prompt: {len(text.encode())} tokens; storage: {masked_url(url)}")
            nodes = DemoNodes(url, config, folder)
            async with nodes.running():
                async for scene in Play(nodes, text, max_tokens, say).scenes():
                    scenes.append(scene)
                    say(report(scene, len(scenes)))
                await nodes.check_books()
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


def report(scene: Scene, number: int) -> str:
    """Return a scene as a few lines of text."""
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
    answer                 {scene.text[:60]!r}
    identical to a single node: {"yes" if scene.is_identical else "NO"}
"""


def node_config(num_tokens: int) -> str:
    """Return the TOML config of the demo's nodes.

    The device has room for little more than one conversation, so that pressure is easy to make, and
    write-back moves its blocks to the host.
    """
    blocks = -(-(num_tokens + _ROOM_FOR_TURNS) // _BLOCK_SIZE)
    return f"""
[cache]
block_size = {_BLOCK_SIZE}
device_blocks = {blocks + blocks // 4}
host_blocks = {8 * blocks}
host_write = "write_back"
storage_write = "write_through"
"""
