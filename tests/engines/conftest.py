"""A store, and a model small enough for tests of whole engines."""

from __future__ import annotations

import pytest

from tests.engines.tiny_models import save_tiny
from tests.redis_server import empty_redis, module_redis  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("model"))
