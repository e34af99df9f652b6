"""What of a hand-off can be asked for over HTTP."""

from __future__ import annotations

from tests.api.nodes import here
from tests.latch import until
from tierkv.clock import SystemClock
from tierkv.storage.memory import MemorySettings, MemoryStore


async def test_a_prefill_that_waits_for_nothing_answers_and_is_claimed_and_counted() -> None:
    store = MemoryStore(MemorySettings(), SystemClock())
    async with here(store=store) as prefill, here(store=store) as decode:
        body = {"prompt": "the quick brown fox jumps over the lazy dog", "ticket_id": "t"}
        answer = await prefill.client.post("/v1/prefill", body | {"wait": "nothing"})
        assert answer.status == 200
        assert answer.body["present_blocks"] is None
        assert answer.body["expires_at"] is None
        assert (answer.body["num_blocks"], answer.body["tail_tokens"]) == (3, 11)
        claimed = await decode.client.post("/v1/decode", body | {"max_tokens": 4})
        assert claimed.status == 200
        assert claimed.body["first_tokens"] == answer.body["tokens"]
        assert claimed.body["computed_tokens"] == 0
        published, claims = [
            (await one.client.get("/v1/stats")).body["handoff"] for one in (prefill, decode)
        ]
        assert (published["published_prompts"], published["published_blocks"]) == (1, 3)
        assert claims["claimed_prompts"] == 1
        await until(lambda: prefill.node.service.stats().running_requests == 0)
        await prefill.settle()
        await decode.settle()


async def test_a_decode_that_may_compute_answers_without_a_ticket() -> None:
    async with here() as node:
        body = {"prompt": "the quick brown fox", "ticket_id": "never", "max_tokens": 4}
        whole = await node.client.post("/v1/decode", body | {"deadline_s": 1.0})
        assert (whole.status, whole.body["reason"]) == (503, "not_yet")
        alone = await node.client.post("/v1/generate", {"prompt": body["prompt"], "max_tokens": 4})
        for policy in ("recompute", "recompute_all"):
            asked = body | {"policy": policy, "deadline_s": 0.05}
            answer = await node.client.post("/v1/decode", asked)
            assert answer.status == 200
            assert answer.body["producer"] is None
            assert answer.body["first_tokens"] == []
            assert answer.body["tokens"] == alone.body["tokens"]
        await node.settle()
