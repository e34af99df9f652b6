"""The choice of a node for a prompt, and a memory of the prompts that each node has cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from tierkv.cache.keys import TOKEN_BYTES
from tierkv.gateway.nodes import BackendNode

# By a node's URL, the number of leading prompt tokens that the node has cached.
CachedTokens = Mapping[str, int]


def choose_prefill(
    nodes: Sequence[BackendNode], num_tokens: int, cached_by_url: CachedTokens
) -> BackendNode:
    """Return the node that has the fewest tokens to compute if it receives the prompt.

    These are the tokens that the node's running requests still need, plus the prompt's tokens that
    the node has not cached. Among equal nodes, the one with the fewest running requests is chosen.

    Args:
        nodes: The nodes to choose from; at least one.
        num_tokens: Number of tokens of the prompt.
        cached_by_url: Number of leading prompt tokens that each node has cached, by the node's URL;
            a missing node counts as 0.
    """
    return min(
        nodes,
        key=lambda node: (
            node.outstanding_tokens + num_tokens - cached_by_url.get(node.url, 0),
            node.running,
        ),
    )


def choose_decode(nodes: Sequence[BackendNode], cached_by_url: CachedTokens) -> BackendNode:
    """Return the decode node with the fewest running requests.

    Among equal nodes, the one with the fewest tokens left to compute or generate is chosen, then
    the one with the most cached tokens of the prompt.

    Args:
        nodes: The nodes to choose from; at least one.
        cached_by_url: Number of leading prompt tokens that each node has cached, by the node's URL;
            a missing node counts as 0.
    """
    return min(
        nodes,
        key=lambda node: (node.running, node.outstanding_tokens, -cached_by_url.get(node.url, 0)),
    )


_CHUNK_TOKENS = 64
_CHUNK_BYTES = _CHUNK_TOKENS * TOKEN_BYTES
REMEMBERED_BYTES = 1024 * _CHUNK_BYTES  # hashing them takes 2 ms
_MAX_CHUNKS = 1 << 16  # about 4 million tokens, some 10 MB


class PrefixMemory:
    """A memory of the nodes that have seen a prompt prefix, by the hash of the prefix.

    Only prefixes of a multiple of 64 tokens are remembered. A hash collision can lead to a slower
    node, never to a wrong answer.

    Args:
        max_chunks: Largest number of remembered prefixes; the least recently used are removed
            first.
    """

    def __init__(self, max_chunks: int = _MAX_CHUNKS) -> None:
        # By hash, (URL, num_recoveries) of each node that has seen the prefix. The
        # prefixes of a prompt that only one node has seen share one tuple, to save memory.
        self._seen: OrderedDict[int, tuple[tuple[str, int], ...]] = OrderedDict()
        self._max_chunks = max_chunks

    def remember(self, tokens: bytes, url: str, num_recoveries: int) -> None:
        """Remember that a node has cached a prompt.

        Args:
            tokens: The prompt's token ids, as little-endian int32 bytes; only the first 65,536
                tokens are remembered.
            url: URL of the node.
            num_recoveries: Number of times so far that the node has become ready again after
                failures. After the next such recovery, the prompt no longer counts as cached.
        """
        alone = ((url, num_recoveries),)
        for digest in _chain(tokens[:REMEMBERED_BYTES]):
            others = tuple([one for one in self._seen.get(digest, ()) if one[0] != url])
            self._seen[digest] = (*others, *alone) if others else alone
            self._seen.move_to_end(digest)
        while len(self._seen) > self._max_chunks:
            self._seen.popitem(last=False)

    def matched(self, tokens: bytes, recoveries: Mapping[str, int]) -> dict[str, int]:
        """Return the number of leading prompt tokens that each node has seen and may still have.

        Args:
            tokens: The prompt's token ids, as little-endian int32 bytes.
            recoveries: By the node's URL, `BackendNode.num_recoveries` of each node to look up. A
                prompt that was remembered with a lower number may be lost, and does not count.

        Returns:
            By the node's URL, the number of tokens.
        """
        found: dict[str, int] = {}
        chunks = 0
        left = set(recoveries)
        for digest in _chain(tokens):
            seen = self._seen.get(digest, ())
            for url in [url for url in left if (url, recoveries[url]) not in seen]:
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
