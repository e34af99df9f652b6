"""What the gateway remembers of where prompts went, so that like goes to like."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import xxhash

from tierkv.cache.tokens import TOKEN_BYTES

_CHUNK_TOKENS = 64
_CHUNK_BYTES = _CHUNK_TOKENS * TOKEN_BYTES
_MOST_CHUNKS = 1 << 16  # about 4 million tokens, some 20 MB


class PrefixMemory:
    """Chunks of 64 tokens, chained, with the node that saw each last.

    A hash that collides costs a worse choice of node, never a wrong answer.
    """

    def __init__(self, most_chunks: int = _MOST_CHUNKS) -> None:
        self._seen: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._most = most_chunks

    def remember(self, tokens: bytes, url: str, life: int) -> None:
        """The node at `url`, in that life of it, has the packed tokens."""
        for digest in _chain(tokens):
            self._seen.setdefault(digest, {})[url] = life
            self._seen.move_to_end(digest)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def matched(self, tokens: bytes, lives: Mapping[str, int]) -> dict[str, int]:
        """How many leading tokens each node should have, if it has forgotten nothing.

        lives: the life that each node is in, by URL; what it had in an earlier one is gone.
        """
        found: dict[str, int] = {}
        chunks = 0
        left = set(lives)
        for digest in _chain(tokens):
            seen = self._seen.get(digest, {})
            for url in [url for url in left if seen.get(url) != lives[url]]:
                found[url] = chunks * _CHUNK_TOKENS
                left.remove(url)
            if not left:
                break
            chunks += 1
        return found | dict.fromkeys(left, chunks * _CHUNK_TOKENS)


def _chain(tokens: bytes) -> Iterator[int]:
    state = xxhash.xxh3_64()
    for start in range(0, len(tokens) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        state.update(tokens[start : start + _CHUNK_BYTES])
        yield state.intdigest()
