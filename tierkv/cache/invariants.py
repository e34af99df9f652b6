"""Recounts an index and its pools and says in words what does not add up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tierkv.cache.index import Index
from tierkv.cache.node import NO_SLOT, Node, Tier
from tierkv.cache.pool import BlockPool
from tierkv.cache.states import CopyState


def findings(
    index: Index, pools: Mapping[Tier, BlockPool], owned_elsewhere: Mapping[Tier, Iterable[int]]
) -> list[str]:
    """Everything wrong with `index` and `pools`; [] if nothing is.

    owned_elsewhere: slots of each tier that requests and movements hold outside the index.
    Walks the whole tree: for tests, shutdown, and an operator who asks.
    """
    nodes = list(index.nodes())
    wrong: list[str] = []
    for node in nodes:
        wrong += _node_findings(node, index)
    for tier in Tier:
        slots = [
            int(slot)
            for node in nodes
            for slot in node.copies[tier].slots[node.copies[tier].states != CopyState.ABSENT]
        ]
        wrong += pools[tier].findings([*slots, *owned_elsewhere[tier]])
        wrong += index.order[tier].findings(nodes)
    if index.num_held_leases == 0 and (held := [n.uid for n in nodes if n.holders]):
        wrong.append(f"no lease is out, but nodes {held[:5]} count holders")
    return wrong


def _node_findings(node: Node, index: Index) -> list[str]:
    wrong = []
    name = f"node {node.uid} (blocks {node.start} to {node.end})"
    parent = node.parent
    assert parent is not None, "the root is not listed"
    width = index.block_token_bytes
    if node.num_blocks < 1:
        wrong.append(f"{name} holds no block")
    if node.is_tail:
        if not 0 < len(node.tokens) < width or node.num_blocks != 1 or node.children:
            wrong.append(f"{name} is a tail, but not one partial block without children")
    elif len(node.tokens) != node.num_blocks * width:
        wrong.append(f"{name} has {len(node.tokens)} bytes of tokens")
    if node.start != parent.end:
        wrong.append(f"{name} does not start where its parent ends")
    if parent.children.get(node.first_key(width)) is not node:
        wrong.append(f"{name} is not found under its parent by its first block")
    if sorted(node.children) != node.order:
        wrong.append(f"{name} lists other children in order than it has")
    if node.holders < sum(child.holders for child in node.children.values()):
        wrong.append(f"{name} counts fewer holders than its children")
    device, host = node.copies
    for tier in Tier:
        wrong += _tier_findings(node, tier, name)
    lost = (device.states == CopyState.ABSENT) & (host.states != CopyState.READY)
    below = bool(node.children)
    if lost.any() and not node.holders and (below or not lost[int(np.argmax(lost)) :].all()):
        wrong.append(f"{name} has blocks on no tier with blocks below that depend on them")
    if lost.any() and not node.holders and not below:
        wrong.append(f"{name} keeps blocks that are on no tier")
    on_device = device.states != CopyState.ABSENT
    if (np.diff(on_device.astype(np.int8)) > 0).any():
        wrong.append(f"{name} has a block on the device whose parent block is not there")
    if on_device.any() and parent.parent is not None:
        above = parent.copies[Tier.DEVICE].states
        if len(above) and above[-1] == CopyState.ABSENT:
            wrong.append(f"{name} is on the device, but its parent is not")
    return wrong


def _tier_findings(node: Node, tier: Tier, name: str) -> list[str]:
    wrong = []
    copies = node.copies[tier]
    if len(copies.slots) != node.num_blocks or len(copies.states) != node.num_blocks:
        wrong.append(f"{name} has {len(copies.slots)} {tier.name} slots")
        return wrong
    present = copies.states != CopyState.ABSENT
    if ((copies.slots != NO_SLOT) != present).any():
        wrong.append(f"{name} has {tier.name} slots that its states do not tell of")
    if int(np.count_nonzero(present)) != copies.num_present:
        wrong.append(f"{name} counts {copies.num_present} {tier.name} copies")
    if (copies.states == CopyState.INCOMING).any() and not node.holders:
        wrong.append(f"{name} has {tier.name} bytes incoming, but nobody holds it")
    expected = sum(child.copies[tier].num_present > 0 for child in node.children.values())
    if expected != node.present_children[tier]:
        wrong.append(
            f"{name} counts {node.present_children[tier]} children on {tier.name}, not {expected}"
        )
    return wrong
