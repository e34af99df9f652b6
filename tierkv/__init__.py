"""tierkv keeps the KV cache of LLM inference in three tiers: Device, Host and Storage."""

__version__ = "0.1.0"
