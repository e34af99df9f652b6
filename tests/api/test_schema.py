"""schemathesis over the OpenAPI document: whatever a client makes of it, the node does not fail."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.api.nodes import clean_environ, process

# What ends or empties the node for all that comes after, or only waits.
LEFT_OUT = [
    "/v1/drain",
    "/v1/pause",
    "/v1/sleep",
    "/v1/tiers/storage",
    "/v1/decode",
    "/v1/resize",
]
# 502 and 503 are deliberate: no room now, no ticket, storage detached.
CONFIG = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "502", "503"]
"""
OF_MSGPACK = {
    "SCHEMATHESIS_HOOKS": "tests.api.msgpack_bodies",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


# 10,000 cases of each type, in runs of their own, which a busy machine can end one at a time.
SLOW = [
    pytest.param(
        *(seed, media_type, "coverage,fuzzing", 66, 2_500),
        marks=[pytest.mark.slow, pytest.mark.timeout(1800)],
    )
    for media_type in ("json", "msgpack")
    for seed in range(1, 5)
]


@pytest.mark.parametrize(
    ("seed", "media_type", "phases", "num_examples", "least_cases"),
    [(1, "msgpack", "fuzzing", 1, 25), *SLOW],
)
async def test_no_client_that_follows_the_document_makes_the_node_fail(
    seed: int, media_type: str, phases: str, num_examples: int, least_cases: int, tmp_path: Path
) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    async with process(tmp_path) as node:
        left_out = [part for path in LEFT_OUT for part in ("--exclude-path", path)]
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)),
            *("run", f"{node.url}/openapi.json", "--url", node.url, *left_out),
            *("--phases", phases, "--max-examples", str(num_examples)),
            *("--checks", "not_a_server_error,content_type_conformance,status_code_conformance"),
            *("--checks", "response_schema_conformance,response_headers_conformance"),
            *("--seed", str(seed), "--request-timeout", "20", "--no-color", "--workers", "1"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=clean_environ(tmp_path) | (OF_MSGPACK if media_type == "msgpack" else {}),
            cwd=tmp_path,
        )
        out, _ = await child.communicate()
        assert child.returncode == 0, out.decode()[-6000:]
        found = re.search(r"(\d+) generated, (\d+) passed", out.decode())
        assert found, out.decode()[-2000:]
        assert int(found[1]) == int(found[2]) >= least_cases
        assert (await node.client.get("/v1/verify")).body == {"findings": []}
        assert "Traceback" not in node.log_text()
        node.terminate()
        assert await node.ended() == 0
