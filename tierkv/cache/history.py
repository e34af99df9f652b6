"""A bounded record of events by which blocks left the cache, to explain later misses."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec
from xxhash import xxh3_64_intdigest

from tierkv.cache.index import segments
from tierkv.cache.keys import TOKEN_BYTES, Prompt
from tierkv.cache.node import HOST, Tier, TreeNode


class MissCause(Enum):
    """The kind of event that made a block unavailable."""

    EVICTED = "evicted"
    DAMAGED = "checksum failed"
    LATE = "over deadline"
    NOT_WORTH_IT = "computing was estimated to be faster"
    FAILED = "the transfer failed"

    def __init__(self, _: str) -> None:
        self.reason = self._name_.lower()  # made once, since reading `name` takes 0.1 us


class HistoryEvent(msgspec.Struct, frozen=True, gc=False):
    """An event that explains why a block is not in a tier, such as its eviction.

    Attributes:
        fate: the kind of event.
        tier: "device", "host" or "storage".
        at: time of the event, in seconds of the event loop's clock.
        detail: more about the event, in words; "" for nothing more.
    """

    fate: MissCause
    tier: str
    at: float
    detail: str = ""


# Hash of the fingerprint, the block's index, and the tokens and media of the block and of up to
# _BEFORE blocks before it. Different prompts get different keys without a hash of all blocks.
_Key = int
_BEFORE = 32  # blocks
_MAX_BACK = 8192  # number of earlier blocks at which `find` searches for a run
_MAX_RUNS = 3  # number of runs kept that begin with the same block
_RUN_BYTES, _EXTRA_BYTES = 400, 120  # memory of a run without its tokens, and of one of its extras
_NO_EXTRAS: Mapping[int, bytes] = {}


class _Run(msgspec.Struct, frozen=True, gc=False):
    """An event, with the tokens of the consecutive blocks that it is about.

    Attributes:
        packed: packed tokens, from which the event's blocks have bytes [start, stop).
        extras: extra keys (identity of media) by block index.
        longer: events about more blocks that begin with the same block, newest first.
    """

    event: HistoryEvent
    packed: bytes
    start: int
    stop: int
    extras: Mapping[int, bytes]
    longer: tuple[_Run, ...] = ()

    def covers(self, prompt: Prompt, first: int, block: int) -> bool:
        width = prompt.block_token_bytes
        tokens = prompt.tokens[first * width : (block + 1) * width]
        return (
            len(tokens) == (block + 1 - first) * width
            and self.packed.startswith(tokens, self.start, self.stop)
            and all(
                self.extras.get(number, b"") == prompt.extra(number)
                for number in range(first, block + 1)
            )
        )


class History:
    """The newest events about blocks, and the tokens of the newest evicted blocks.

    An event needs about 240 bytes. A full history drops its older half.

    Args:
        capacity: largest number of events.
        capacity_bytes: largest number of bytes for tokens.
    """

    def __init__(self, capacity: int = 32_768, capacity_bytes: int = 4 << 20) -> None:
        self._max_events = max(capacity // 2, 1)
        self._max_bytes = capacity_bytes // 2
        self._num_bytes = 0
        self._events: dict[_Key, HistoryEvent] = {}  # the newest event of each block
        self._older_events: dict[_Key, HistoryEvent] = {}
        self._runs: dict[_Key, _Run] = {}  # the newest run by its first block
        self._older_runs: dict[_Key, _Run] = {}
        self._packed = b""  # the tokens of the newest run

    def __len__(self) -> int:
        """Return the number of blocks with a recorded event."""
        return len(self._events.keys() | self._older_events.keys())

    def evicted(self, node: TreeNode, first: int, stop: int, tier: Tier, at_s: float) -> None:
        """Record that blocks [first, stop) of a node are about to be evicted from `tier`.

        Args:
            node: the tree node that still has the blocks.
            first: index of the first block within the node.
            stop: index after the last block within the node.
            tier: the tier: device or host.
            at_s: time of the event, in seconds of `time.monotonic()`.
        """
        width = node.token_bytes // node.num_blocks
        name = "host" if tier is HOST else "device"
        event = HistoryEvent(MissCause.EVICTED, name, at_s)
        key = hash((node.space.name, node.start + first, _mark_before(node, first, width)))
        self._keep(key, event)
        if stop - first > 1 and len(node.packed) < self._max_bytes:
            extras = dict(node.extras) if node.extras else _NO_EXTRAS
            at = node.packed_at
            run = _Run(event, node.packed, at + first * width, at + stop * width, extras)
            self._keep_run(key, run)

    def record(self, prompt: Prompt, block: int, event: HistoryEvent) -> None:
        """Record an event about one block.

        Args:
            prompt: the prompt that has the block.
            block: index of the block in the prompt.
            event: the event.
        """
        self._keep(self._key(prompt, block), event)

    def find(self, prompt: Prompt, block: int) -> HistoryEvent | None:
        """Return the newest event about a block of a prompt.

        Args:
            prompt: the prompt.
            block: index of the block in the prompt.

        Returns:
            The event; None if none is recorded.
        """
        newest = self.newest(prompt, block)
        is_any = self._runs or self._older_runs
        for first in range(block, max(block - _MAX_BACK, -1), -1) if is_any else ():
            known = self._run_at(self._key(prompt, first))
            for run in (known, *known.longer) if known is not None else ():
                is_newer = newest is None or run.event.at > newest.at
                if is_newer and run.covers(prompt, first, block):
                    newest = run.event
        return newest

    def newest(self, prompt: Prompt, block: int) -> HistoryEvent | None:
        """Return the newest event about a block, or about a run of blocks that begins with it.

        Args:
            prompt: the prompt.
            block: index of the block in the prompt.

        Returns:
            The event; None if there is none. An event about a run of blocks that begins earlier and
                includes this block is not found; `find` finds it, but takes longer.
        """
        if not self._events:
            return None
        key = self._key(prompt, block)
        event = self._events.get(key)
        return event if event is not None else self._older_events.get(key)

    def _run_at(self, key: _Key) -> _Run | None:
        run = self._runs.get(key)
        return run if run is not None else self._older_runs.get(key)

    def _key(self, prompt: Prompt, block: int) -> _Key:
        first, width = block - _BEFORE if block > _BEFORE else 0, prompt.block_size * TOKEN_BYTES
        tokens = prompt.tokens[first * width : (block + 1) * width]
        if not prompt.extras:
            return hash((prompt.space, block, xxh3_64_intdigest(tokens)))
        numbers = range(first, block + 1)
        extras = [(number, extra) for number in numbers if (extra := prompt.extra(number))]
        return hash((prompt.space, block, _mark(tokens, extras)))

    def _keep(self, key: _Key, event: HistoryEvent) -> None:
        if len(self._events) >= self._max_events:
            self._older_events, self._events = self._events, {}
        self._events[key] = event

    def _keep_run(self, key: _Key, run: _Run) -> None:
        """Record `run`, and keep up to _MAX_RUNS longer runs that begin with the same block."""
        if (known := self._run_at(key)) is not None:
            most = run.stop - run.start
            others = (msgspec.structs.replace(known, longer=()), *known.longer)
            longer = [one for one in others if one.stop - one.start > most][:_MAX_RUNS]
            run = msgspec.structs.replace(run, longer=tuple(longer))
            self._num_bytes += sum(_RUN_BYTES + len(one.packed) for one in longer)
        # The tokens are shared with the run recorded before, if it is of the same node.
        if run.packed is not self._packed:
            self._packed = run.packed
            self._num_bytes += len(run.packed)
        self._num_bytes += _RUN_BYTES + _EXTRA_BYTES * len(run.extras)
        if self._num_bytes > self._max_bytes:
            self._older_runs, self._runs = self._runs, {}
            self._num_bytes = _RUN_BYTES + len(run.packed)
        self._runs[key] = run


def _mark_before(node: TreeNode, first: int, width: int) -> int:
    """Return a hash of a block and up to _BEFORE blocks before it, to find its events later.

    `first` is the block's index within the node, `width` the bytes of a block's packed tokens.
    """
    block, at = node.start + first, node.packed_at + first * width
    back = min(_BEFORE, block)
    if back <= first and not node.extras:  # all hashed blocks are in this node
        return xxh3_64_intdigest(node.packed[at - back * width : at + width])
    pieces, left, part = [node.packed[node.packed_at : at + width]], back - first, node.parent
    has_extras = bool(node.extras)
    while left > 0 and not has_extras:
        assert part is not None, "blocks before one are on its path"
        stop, count = part.packed_at + part.token_bytes, min(left, part.num_blocks)
        pieces.append(part.packed[stop - count * width : stop])
        left, has_extras, part = left - count, bool(part.extras), part.parent
    if not has_extras:
        return xxh3_64_intdigest(b"".join(reversed(pieces)))
    parts = segments(node, block - back, block + 1)
    tokens = b"".join([part.tokens_of(start, stop) for part, start, stop in parts])
    extras = [
        (number, extra)
        for part, start, stop in parts
        if part.extras
        for number in range(part.start + start, part.start + stop)
        if (extra := part.extra(number))
    ]
    return _mark(tokens, extras)


def _mark(tokens: bytes, extras: list[tuple[int, bytes]]) -> int:
    mark = xxh3_64_intdigest(tokens)  # for 2 KiB a quarter of the time of hash()
    return hash((mark, *extras)) if extras else mark
