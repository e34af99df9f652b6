"""The cache service, which keeps the KV cache of one model on one device, the host and storage."""

from tierkv.service.service import Service

__all__ = ["Service"]
