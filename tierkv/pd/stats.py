"""Counts of hand-offs, as they are shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HandoffStats:
    """Counts since the start.

    early_blocks: stored before their prompt was computed, of published_blocks. failed_publishes:
    prompts whose ticket did not come. claims_without_ticket: those that a policy let compute.
    """

    published_prompts: int = 0
    published_blocks: int = 0
    early_blocks: int = 0
    failed_publishes: int = 0
    claimed_prompts: int = 0
    claims_without_ticket: int = 0
    refused_claims: int = 0
