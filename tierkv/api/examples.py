"""One example of a body or answer for each type that people write or read by hand."""

from __future__ import annotations

from typing import Any

from tierkv.api.problems import Problem
from tierkv.api.types import DecodeBody, GenerateBody, LookupBody, PrefillBody
from tierkv.api.types_cache import PinBody, PrefetchAnswer, PrefetchBody
from tierkv.api.types_requests import (
    AdmitBody,
    ClaimBody,
    CommitBody,
    EndAnswer,
    ExtendBody,
    PublishBody,
    RequestAnswer,
    ResumeBody,
    StreamBody,
)

_TOKENS = "AQAAAAIAAAADAAAA"  # 1, 2, 3 as little-endian 32-bit integers

EXAMPLES: dict[type, dict[str, Any]] = {
    Problem: {
        "title": "There is no room now",
        "status": 503,
        "detail": "device: 64 blocks needed, 12 available",
        "code": "out_of_blocks",
        "request_id": "chat-17",
    },
    GenerateBody: {"prompt": "Once upon", "max_tokens": 8},
    PrefillBody: {"prompt": "Once upon", "ticket_id": "chat-17"},
    DecodeBody: {"prompt": "Once upon", "ticket_id": "chat-17", "max_tokens": 8},
    LookupBody: {"tokens": [1, 2, 3]},
    AdmitBody: {"request_id": "chat-17", "tokens": _TOKENS, "max_new_tokens": 256},
    RequestAnswer: {
        "request_id": "chat-17",
        "state": "running",
        "loads": "loading",
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "computed_tokens": 0,
        "matched": {"device": 16, "host": 16, "storage": 0},
        "block_size": 16,
        "block_table": [7, 3, 12],
        "expires_in_s": 60.0,
    },
    CommitBody: {"new_tokens": [17, 4]},
    EndAnswer: {"request_id": "chat-17", "state": "finished", "computed_tokens": 42},
    ExtendBody: {"num_tokens": 64},
    ResumeBody: {"max_new_tokens": 64},
    StreamBody: {"ticket_id": "chat-17"},
    PublishBody: {"ticket_id": "chat-17", "first_tokens": [17]},
    ClaimBody: {"ticket_id": "chat-17", "tokens": _TOKENS, "max_new_tokens": 256},
    PrefetchBody: {"request_id": "warm-3", "tokens": _TOKENS},
    PrefetchAnswer: {
        "prefetch_id": "warm-3",
        "state": "done",
        "prompt_tokens": 4096,
        "first_token": 1024,
        "fetched_tokens": 3072,
        "problem": None,
    },
    PinBody: {"tokens": _TOKENS, "ttl_s": 600.0},
}
