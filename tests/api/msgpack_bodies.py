"""Hooks of schemathesis: every body is sent as msgpack."""

from __future__ import annotations

from typing import Any

import msgpack
import schemathesis

from tierkv.http.bodies import MSGPACK


@schemathesis.hook
def before_load_schema(_: schemathesis.HookContext, raw_schema: dict[str, Any]) -> None:
    for operations in raw_schema["paths"].values():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            for media_type in set(content) - {MSGPACK}:
                del content[media_type]


@schemathesis.serializer(MSGPACK)
def packed(_: object, value: Any) -> bytes | None:
    try:
        return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))
    except (OverflowError, ValueError):  # JSON has numbers and depths that msgpack has not
        return None
