"""Good inputs for each target, from which fuzzing starts: bytes at random get no further than the
first check."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from tests.fuzz.targets import BODIES
from tierkv.pd.tickets import Acknowledgement, OpenTicket, Ticket
from tierkv.storage.codec import PlainCodec, ValueIdentity

_HEAD_BYTES = 22  # of a record of `tierkv.storage.codec`; targets put a right one in front
_ALL = {
    "prompt": "Once upon",
    "tokens": b"\1\0\0\0\2\0\0\0",
    "ticket_id": "t",
    "num_tokens": 3,
    "new_tokens": [1, 2],
    "blocks": 7,
    "tier": "device",
    "first_tokens": [5],
    "max_tokens": 4,
    "temperature": 0.5,
    "seed": 7,
    "deadline_s": 1.0,
    "ttl_s": 60.0,
    "request_id": "r",
    "priority": 1,
    "policy": "whole",
    "wait": "loaded",
}


def seeds() -> dict[str, list[bytes]]:
    """By target."""
    handed: dict[str, Any] = {
        "ticket_id": "t",
        "fingerprint": {"model": "m"},
        "block_size": 16,
        "num_tokens": 17,
        "digests": (bytes(32), bytes(range(32))),
        "created_at": 1.0,
        "expires_at": 2.0,
        "producer": "p",
    }
    acknowledged = Acknowledgement(ticket_id="t", created_at=1.0, claimer="c", claimed_at=2.0)
    plan: dict[str, Any] = {"type": "plan", "number": 1, "kind": "load"}
    plan |= {"source": b"\0" * 4, "target": b"\1\0\0\0"}
    payload = bytes(100)
    header, _ = PlainCodec().encode(payload, ValueIdentity(bytes(16), bytes(32), 16))
    return {
        "ticket": [
            Ticket(**handed, first_tokens=(1,)).encode()[_HEAD_BYTES:],
            OpenTicket(**handed, incarnation="i").encode()[_HEAD_BYTES:],
        ],
        "acknowledgement": [acknowledged.encode()[_HEAD_BYTES:]],
        "worker_record": [
            msgpack.packb({"type": "report", "number": 3, "problem": "no"}),
            msgpack.packb({"type": "alive"}),
            msgpack.packb(plan),
        ],
        "json_body": [
            bytes([i]) + msgspec.json.encode(some(kind)) for i, kind in enumerate(BODIES)
        ],
        "msgpack_body": [
            bytes([i]) + msgspec.msgpack.encode(some(kind)) for i, kind in enumerate(BODIES)
        ],
        "resp": [
            b"\xff\xff\5\0\0\0\1\2\3\4+OK\r\n$3\r\nabc\r\n$5\r\nhello\r\n:1\r\n$-1\r\n-ERR no\r\n"
        ],
        "value": [header + payload],
        "small_value": [b"TKVS\1\0\1\0" + bytes(40)],
        "completion": [
            b'{"prompt": "a", "stop": ["b", "c"], "stream": true, "seed": 3}',
            b'{"prompt": [[1, 2], [3]], "max_tokens": 3, "temperature": 0.5, "logit_bias": {}}',
        ],
        "redis_url": [
            b"rediss://user:pass@host:6379/3",
            b"redis+sentinel://a,b:1,[::1]:2/service/0",
            b"unix:///path?db=2",
        ],
        "problem": [b'{"title":"a","status":404,"detail":"b","code":"c","request_id":"d"}'],
        "auth_file": [
            b'{"version":1,"certificates":[{"subject":"CN:a","name":"a","role":"read"}],"tokens":[]}'
        ],
    }


def some(kind: type[msgspec.Struct]) -> dict[str, object]:
    """A body with every field of `kind` that we have a value for, but for one kind of prompt."""
    fields = {field.encode_name for field in msgspec.structs.fields(kind)}
    given = {name: _ALL[name] for name in _ALL if name in fields}
    if "tokens" in given:
        given.pop("prompt", None)
    return given
