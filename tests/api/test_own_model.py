"""Where a node computes itself, nobody else says what is in its memory."""

from __future__ import annotations

import pytest

from tests.api.nodes import here

PROMPT = "nothing has computed this prompt"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/requests", {"request_id": "r", "prompt": PROMPT}),
        ("/v1/requests/r/commit", {}),
        ("/v1/requests/r/stream", {}),
        ("/v1/requests/r/publish", {"first_tokens": [65]}),
        ("/v1/requests/r/extend", {"num_tokens": 1}),
        ("/v1/requests/r/preempt", {}),
        ("/v1/requests/r/resume", {}),
        ("/v1/requests/r/finish", {}),
        ("/v1/claims", {"request_id": "c", "ticket_id": "r", "prompt": PROMPT}),
    ],
)
async def test_nobody_else_admits_commits_or_publishes_on_a_node_with_its_own_model(
    path: str, body: dict[str, object]
) -> None:
    async with here(is_engine_attached=False) as on:
        truth = (await on.client.post("/v1/generate", {"prompt": "x" * 40})).body["text"]
        answer = await on.client.post(path, body)
        assert (answer.status, answer.code) == (409, "no_engine")
        assert "its own model" in answer.body["detail"]
        again = await on.client.post("/v1/generate", {"prompt": "x" * 40})
        assert again.body["text"] == truth
        lookup = await on.client.post("/v1/lookup", {"prompt": PROMPT})
        assert lookup.body["device_tokens"] + lookup.body["host_tokens"] == 0


async def test_what_the_node_s_own_model_computes_can_still_be_ended_by_its_id() -> None:
    async with here(is_engine_attached=False) as on:
        answer = await on.client.ask("DELETE", "/v1/requests/nobody")
        assert answer.status == 404
