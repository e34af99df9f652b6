"""An index of which tests say what is cached, without leases and slots."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.cache import invariants
from tierkv.cache.eviction import EvictionPolicy, Lru
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.cache.node import BlockPool, Tier, TreeNode


class Cached:
    def __init__(self, block_size: int = 1, policy: EvictionPolicy | None = None) -> None:
        self.index = Index(block_size, policies=(policy or Lru(), Lru()))
        self.pools = {Tier.DEVICE: BlockPool("device", 400), Tier.HOST: BlockPool("host", 20)}

    def prompt(self, tokens: Sequence[int]) -> Prompt:
        return Prompt.of(tokens, self.index.block_size)

    def put(
        self,
        prompt: Prompt | Sequence[int],
        tier: Tier = Tier.DEVICE,
        *,
        is_request: bool = False,
    ) -> TreeNode:
        """Use what is there of its whole blocks and place the others; returns the run they end.

        is_request: what is there is counted as hit.
        """
        prompt = prompt if isinstance(prompt, Prompt) else self.prompt(prompt)
        match = self.index.match(prompt)
        lease = self.index.hold(match.node, match.num_blocks)
        if is_request:
            self.index.count_hit(lease)
        slots = self.pools[tier].allocate(prompt.num_blocks - match.num_blocks)
        self.index.insert(tier, lease, prompt, prompt.num_blocks, slots)
        self.index.release(lease)
        return lease.node

    def num_matched(self, prompt: Prompt | Sequence[int]) -> int:
        prompt = prompt if isinstance(prompt, Prompt) else self.prompt(prompt)
        return self.index.match(prompt).num_blocks

    def evict(self, count: int) -> None:
        """From the device."""
        for victim in self.index.spaces.order[Tier.DEVICE].victims(count):
            self.drop(*victim)

    def drop(self, node: TreeNode, start: int, stop: int) -> None:
        """From the device."""
        self.pools[Tier.DEVICE].release(self.index.drop(Tier.DEVICE, node, start, stop))

    def findings(self) -> list[str]:
        return invariants.findings(self.index, self.pools, {tier: [] for tier in Tier})
