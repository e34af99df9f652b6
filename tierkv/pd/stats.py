"""Counts of hand-offs, as they are shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HandoffStats:
    """Counts since the start.

    early_blocks: stored before their prompt was computed, of published_blocks. failed_publishes:
    prompts whose ticket did not come. claims_without_ticket: those that a policy let compute.
    shown_blocks: of this node's tiers, that claimers were told of. device_blocks: that this node
    read from others' devices, to its own. memory_blocks, network_blocks: that it read from others'
    host tiers, on the same machine or not; what storage gave is in its own counts.
    damaged_direct_blocks: had changed meanwhile, and came from storage.
    """

    published_prompts: int = 0
    published_blocks: int = 0
    early_blocks: int = 0
    failed_publishes: int = 0
    claimed_prompts: int = 0
    claims_without_ticket: int = 0
    refused_claims: int = 0
    shown_blocks: int = 0
    device_blocks: int = 0
    memory_blocks: int = 0
    network_blocks: int = 0
    damaged_direct_blocks: int = 0
    failed_direct_reads: int = 0
