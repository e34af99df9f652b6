"""Checks of an index and its pools of slots.

The checks count all blocks and leases anew, and report differences from the kept counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from tierkv.cache.index import Index
from tierkv.cache.keys import DIGEST_BYTES, TOKEN_BYTES, block_digest
from tierkv.cache.node import (
    MAX_KEPT,
    NO_SLOT,
    BlockPool,
    CopyState,
    Tier,
    TreeNode,
    child_key,
)


def findings(
    index: Index, pools: Mapping[Tier, BlockPool], owned_elsewhere: Mapping[Tier, Iterable[int]]
) -> list[str]:
    """Return all violated invariants of `index` and `pools`.

    The call visits the whole tree. Use it in tests, at shutdown, or if an operator asks for it.

    Args:
        index: the index.
        pools: the pool of each tier.
        owned_elsewhere: for each tier, the slots that belong to requests and copies instead of the
            index.

    Returns:
        One sentence for each violation; [] if there is none.
    """
    nodes = list(index.spaces.nodes())
    wrong: list[str] = []
    for root in [*index.spaces.roots(), *index.spaces.retired()]:
        wrong += [f"root {root.space.name!r} {what}" for what in _children_findings(root)]
    for node in nodes:
        wrong += _node_findings(node, index)
    for tier in Tier:
        fit = [copies for node in nodes if (copies := node.copies[tier]).fits(node.num_blocks)]
        slots = np.concatenate([np.zeros(0, np.int32), *(copies.slots for copies in fit)])
        elsewhere = np.fromiter(owned_elsewhere[tier], np.int32)
        owned = np.concatenate([slots[slots != NO_SLOT], elsewhere])
        wrong += pools[tier].findings(owned.tolist())
        for order, space in index.spaces.orders(tier):
            wrong += order.findings([n for n in nodes if space is None or n.space is space])
        wrong += _space_findings(index, nodes, tier)
    wrong += _lease_findings(index, nodes)
    return wrong


def _space_findings(index: Index, nodes: list[TreeNode], tier: Tier) -> list[str]:
    used = Counter[str]()
    for node in nodes:
        used[node.space.name] += node.copies[tier].num_present
    wrong = [
        f"fingerprint {space.name!r} has {used[space.name]} {tier.name} copies, "
        f"but {space.used[tier]} are counted"
        for space in index.spaces.all()
        if used[space.name] != space.used[tier]
    ]
    wrong.extend(
        f"fingerprint {space.name!r} must have both a quota and a {tier.name} queue of its own, "
        "or neither"
        for space in index.spaces.all()
        if space.has_quota != (index.spaces.own_order(space, tier) is not None)
    )
    return wrong


def _lease_findings(index: Index, nodes: list[TreeNode]) -> list[str]:
    wrong = []
    num_leases = 0
    for node in [*index.spaces.roots(), *index.spaces.retired(), *nodes]:
        held_children = sum(child.holders > 0 for child in node.children.values())
        if node.holders < held_children:
            wrong.append(f"node {node.uid} counts fewer holders than its children")
        num_leases += node.holders - held_children
    if num_leases != index.num_held_leases:
        wrong.append(f"{index.num_held_leases} leases are out, but nodes count {num_leases}")
    return wrong


def _node_findings(node: TreeNode, index: Index) -> list[str]:
    name = f"node {node.uid} (blocks {node.start} to {node.end})"
    wrong = [f"{name} {what}" for what in _shape_findings(node, (index.block_size * TOKEN_BYTES))]
    wrong += [f"{name} {what}" for what in _memory_findings(node)]
    wrong += [f"{name} {what}" for what in _children_findings(node)]
    unfit = [tier for tier in Tier if not node.copies[tier].fits(node.num_blocks)]
    if unfit:  # the checks below would read slots of other blocks
        names = " and ".join(tier.name for tier in unfit)
        return [*wrong, f"{name} does not have one {names} slot and state for each of its blocks"]
    wrong += [f"{name} {what}" for what in _residency_findings(node)]
    for tier in Tier:
        wrong += [f"{name} {what}" for what in _tier_findings(node, tier)]
    return wrong


def _shape_findings(node: TreeNode, block_token_bytes: int) -> list[str]:
    parent = node.parent
    assert parent is not None, "the root is not listed"
    wrong = []
    if node.num_blocks < 1:
        wrong.append("holds no block")
    if node.is_tail:
        is_partial = 0 < len(node.tokens) < block_token_bytes
        if not is_partial or node.num_blocks != 1 or node.children:
            wrong.append("is a tail, but not one partial block without children")
    elif len(node.tokens) != node.num_blocks * block_token_bytes:
        wrong.append(f"has {len(node.tokens)} bytes of tokens")
    if node.start != parent.end:
        wrong.append("does not start where its parent ends")
    first = node.tokens[:block_token_bytes]
    is_found = parent.child_with(first, node.extra(node.start)) is node
    if not is_found or parent.children.get(node.key) is not node:
        wrong.append("is not found under its parent by its first block")
    return wrong


def _children_findings(node: TreeNode) -> list[str]:
    wrong = []
    children = node.children.values()
    by_first = {_first(child) for child in children}
    if not by_first <= node.children.keys():
        wrong.append("has a child that its first token does not find")
    if sorted(node.children.keys() - by_first) != node.order:
        wrong.append("lists other children in `order` than it has")
    if any(child.parent is not node or child.space is not node.space for child in children):
        wrong.append("has a child with another parent or space")
    for tier in Tier:
        expected, counted = sum(n.num_present(tier) > 0 for n in children), node.present_children
        if expected != counted[tier]:
            wrong.append(f"counts {counted[tier]} children on {tier.name}, not {expected}")
    if node.parent is not None and sum(child.soft_pins for child in children) > node.soft_pins:
        wrong.append("has fewer soft pins than its children")
    if node.parent is not None and any(child.hits > node.hits for child in children):
        wrong.append("has fewer matches than a child")
    return wrong


def _first(node: TreeNode) -> bytes:
    return child_key(node.tokens[:TOKEN_BYTES], node.extra(node.start))


def _memory_findings(node: TreeNode) -> list[str]:
    parent = node.parent
    assert parent is not None, "the root is not listed"
    wrong = []
    if node.end != node.start + node.num_blocks:
        wrong.append(f"has {node.num_blocks} blocks")
    if len(node.digests) > node.num_blocks * DIGEST_BYTES:
        wrong.append("has more digests than blocks")
    elif node.digests and node.digests != _digests_of(node):
        wrong.append("has digests that do not fit its tokens and its parent's digest")
    if any(not node.start <= block < node.end for block in node.extras or ()):
        wrong.append("has media keys for blocks that it does not have")
    if len(node.stored_in(0, node.num_blocks)) != node.num_blocks:
        wrong.append("does not have one mark for each block that says whether it is stored")
    if node.soft_pins < 0:
        wrong.append(f"is softly pinned {node.soft_pins} times")
    if len(node.packed) > MAX_KEPT * _bytes_that_share(node):
        wrong.append("keeps too many tokens of removed blocks in memory")
    above = node.packed[max(node.packed_at - parent.token_bytes, 0) : node.packed_at]
    # A match compares these bytes together with the node's own tokens.
    if not parent.tokens.endswith(above):
        wrong.append("has other tokens before its own than its parent has")
    if node.holders == 0 and node.last_used > parent.last_used and parent.holders == 0:
        wrong.append("was used after its parent")
    return wrong


def _bytes_that_share(node: TreeNode) -> int:
    """Return how many bytes of `node.packed` the node and the nodes above it still need.

    All bytes count as needed if a child of `node` shares them.
    """
    packed = node.packed
    if any(child.packed is packed for child in node.children.values()):
        return len(packed)
    part: TreeNode | None = node
    needed = 0
    while part is not None and part.packed is packed:
        needed += part.token_bytes
        part = part.parent
    return needed


def _digests_of(node: TreeNode) -> bytes:
    parent = node.parent
    assert parent is not None, "the root is not listed"
    if parent.parent is None:
        digest = node.space.root_digest
    elif len(parent.digests) == parent.num_blocks * DIGEST_BYTES:
        digest = parent.digests[-DIGEST_BYTES:]
    else:
        return b""  # the node's digests cannot have been computed
    again = []
    for i in range(len(node.digests) // DIGEST_BYTES):
        digest = block_digest(digest, node.tokens_of(i, i + 1), node.extra(node.start + i))
        again.append(digest)
    return b"".join(again)


def _residency_findings(node: TreeNode) -> list[str]:
    wrong = []
    device, host = node.copies
    lost = (device.states == CopyState.ABSENT) & (host.states != CopyState.READY)
    if lost.any() and not node.holders:
        wrong.append("keeps blocks that are on no tier")
    parent = node.parent
    assert parent is not None, "the root is not listed"
    above = parent.copies[Tier.DEVICE].states[-1:]  # empty for the root
    # ABSENT < INCOMING < READY: a match infers the states of all blocks from the last one.
    if (np.diff(np.concatenate([above, device.states]).astype(np.int8)) > 0).any():
        wrong.append("has a block on the device without a ready parent block there")
    return wrong


def _tier_findings(node: TreeNode, tier: Tier) -> list[str]:
    wrong = []
    copies = node.copies[tier]
    present = copies.states != CopyState.ABSENT
    if ((copies.slots != NO_SLOT) != present).any():
        wrong.append(f"has {tier.name} slots that do not agree with its states")
    if int(np.count_nonzero(present)) != copies.num_present:
        wrong.append(f"counts {copies.num_present} {tier.name} copies")
    if (copies.states == CopyState.INCOMING).any() and not node.holders:
        wrong.append(f"has {tier.name} bytes incoming, but no holder")
    return wrong
