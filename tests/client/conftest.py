"""The node that a client asks."""

from tests.api.conftest import on

__all__ = ["on"]
