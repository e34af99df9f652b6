"""Settings as a node may show them: without passwords, keys and salts."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tierkv.api.settings import NodeSettings

MASK = "***"
_SECRETS = re.compile(r"(^|_)(password|secret|token|key|salt|tenant)$")
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*@")  # user too: some stores take a token there
_QUERY = re.compile(r"(?<=[?&])([^=&#]+)=[^&#]*")


def masked(settings: NodeSettings) -> dict[str, dict[str, Any]]:
    """Every table, as plain data."""
    plain: dict[str, dict[str, Any]] = msgspec.to_builtins(settings)
    return {table: _masked(fields) for table, fields in plain.items()}


def masked_url(url: str) -> str:
    """`url` without its user, password and the values of its query."""
    return _QUERY.sub(rf"\1={MASK}", _PASSWORD.sub(f"{MASK}@", url))


def _masked(value: Any) -> Any:  # noqa: ANN401 - plain data of any shape
    if isinstance(value, dict):
        return {name: _masked_field(name, part) for name, part in value.items()}
    if isinstance(value, list):
        return [_masked(part) for part in value]
    return masked_url(value) if isinstance(value, str) else value


def _masked_field(name: str, value: Any) -> Any:  # noqa: ANN401 - plain data of any shape
    is_secret = isinstance(value, str) and value and _SECRETS.search(name)
    return MASK if is_secret else _masked(value)
