"""The stored keys of a prompt, as a list."""

from __future__ import annotations

from tierkv.cache.keys import KeyRun, Prompt, StoredKey


def stored_keys(root: bytes, prompt: Prompt) -> list[StoredKey]:
    """Every block of the prompt and, last, its tail if there is one."""
    return list(KeyRun.of(prompt, root))
