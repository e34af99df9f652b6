"""`tierkv gateway` as a process: wrong settings are one clear sentence, SIGTERM is exit 0."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.nodes import process, run_to_end

NODES = ("--both", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "a gateway needs nodes"),
        (("--prefill", "http://a", "--decode", "http://a"), "given twice"),
        ((*NODES, "--host", "0.0.0.0"), "can be reached from other machines"),
        ((*NODES, "--node-ca", "missing.pem"), "missing.pem cannot be used"),
        ((*NODES, "--node-key", "key.pem"), "gateway.node_key needs gateway.node_cert"),
        ((*NODES, "--client-ca", "ca.pem"), "need tls.cert"),
    ],
)
async def test_wrong_settings_are_one_sentence(
    options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    status, out, err = await run_to_end(tmp_path, "gateway", "--port", "0", *options)
    assert (status, out) == (1, "")
    assert words in err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1


async def test_nodes_from_the_environment_a_ready_line_and_a_clean_end(tmp_path: Path) -> None:
    nodes = "http://127.0.0.1:1 http://[::1]:1"
    async with process(tmp_path, command="gateway", TIERKV_GATEWAY__DECODE=nodes) as gateway:
        assert re.fullmatch(r"http://127.0.0.1:\d+", gateway.url)
        gateway.terminate()
        assert await gateway.ended() == 0
