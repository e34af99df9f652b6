"""The cache service: one model's cache on one device, as engines and the API use it."""

from tierkv.service.service import Service

__all__ = ["Service"]
