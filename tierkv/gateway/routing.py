"""The choice of a node, and the gateway's memory of prompts.

The node with the fewest tokens to compute is chosen, with cached and waiting tokens counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from tierkv.cache.keys import TOKEN_BYTES
from tierkv.gateway.nodes import BackendNode

Held = Mapping[str, int]  # leading prompt tokens that a node has at hand, by its URL


def choose_prefill(nodes: Sequence[BackendNode], num_tokens: int, held: Held) -> BackendNode:
    """Return the node with the fewest tokens to compute, with waiting tokens counted.

    Of equal nodes, the node with fewer requests is returned.
    """
    return min(
        nodes,
        key=lambda node: (
            node.outstanding_tokens + num_tokens - held.get(node.url, 0),
            node.running,
        ),
    )


def choose_decode(nodes: Sequence[BackendNode], held: Held) -> BackendNode:
    """Return the node with the fewest streams.

    Of equal nodes, the node with fewer tokens to generate is returned, then the node with more
    cached
    tokens of the prompt.
    """
    return min(
        nodes,
        key=lambda node: (node.running, node.outstanding_tokens, -held.get(node.url, 0)),
    )


_CHUNK_TOKENS = 64
_CHUNK_BYTES = _CHUNK_TOKENS * TOKEN_BYTES
REMEMBERED_BYTES = 1024 * _CHUNK_BYTES  # of a prompt: some 2 ms of the loop's time
_MOST_CHUNKS = 1 << 16  # about 4 million tokens, some 10 MB


class PrefixMemory:
    """Chunks of 64 tokens, chained, with the node that saw each last.

    A hash that collides costs a worse choice of node, never a wrong answer.
    """

    def __init__(self, most_chunks: int = _MOST_CHUNKS) -> None:
        # By node and life; one tuple for all chunks of a prompt that only one node has seen.
        self._seen: OrderedDict[int, tuple[tuple[str, int], ...]] = OrderedDict()
        self._most = most_chunks

    def remember(self, tokens: bytes, url: str, life: int) -> None:
        """Note that the node at `url`, in this life of it, has the packed tokens.

        Only the first 65,536 tokens count.
        """
        alone = ((url, life),)
        for digest in _chain(tokens[:REMEMBERED_BYTES]):
            others = tuple([one for one in self._seen.get(digest, ()) if one[0] != url])
            self._seen[digest] = (*others, *alone) if others else alone
            self._seen.move_to_end(digest)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def matched(self, tokens: bytes, lives: Mapping[str, int]) -> dict[str, int]:
        """Return the number of leading tokens that each node has, if it has evicted nothing.

        Args:
            tokens: The packed tokens.
            lives: The current life of each node, by URL; tokens cached in an earlier life are lost.
        """
        found: dict[str, int] = {}
        chunks = 0
        left = set(lives)
        for digest in _chain(tokens):
            seen = self._seen.get(digest, ())
            for url in [url for url in left if (url, lives[url]) not in seen]:
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
