"""A cache for Hugging Face transformers that keeps prefixes beyond a call of `generate`.

`TierKVCache` is passed as `past_key_values`. The cache owns device memory for one sequence, with
contiguous blocks, so that attention reads loaded blocks in place. One call of `generate` calls
these methods:

    generate -> begin               finds the prefix on device, host and in storage; starts loads
             -> forward: prepare    removes the cached tokens from the model's input
                layer.update        waits for the layer's load; adds the new keys and values
                settle              after a failed load: has the model compute the lost tokens
             -> end                 starts to copy new blocks to the host and to storage
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from types import MethodType, TracebackType
from typing import Any, Generic, NoReturn, ParamSpec, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.cache.layout import Layout, Plane
from tierkv.clock import SystemClock
from tierkv.embed import ForkedError
from tierkv.embed.engine_cache import EngineCache, Found
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    LayoutError,
    ShuttingDownError,
    TierKVError,
    TransferError,
)
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Device, Planes
from tierkv.observe import Stats
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.memory import EnginePlanes
from tierkv.ranks.worker_planes import WorkerPlanes
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.factory import StoreSettings, open_guarded_store

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

FORMAT = "transformers v1"  # the order of bytes in a block
_ALIGNMENT = 512
_MIN_TOKENS = 1024  # smallest number of tokens of a device room
_SPARE = 4  # a room that has to grow gets a quarter more than is needed
_MAX_KEPT = 0.75  # largest share of the host tier for one sequence: the rest is for the next one
_COPY_S = 60.0  # a copy between host and device that takes longer is a fault of the machine
_KEEP_S = 5.0  # longest wait for host slots; blocks without one are not copied
_FIND_S = 12.0  # the service itself ends a lookup after 10
_SLOTS_S = 0.05
_HELD_UP_S = 0.1  # longest time that a text waits while the text before it gets host slots
_ANSWER_S = 2.0
_SAMPLES = 64  # number of hashed elements of each weight
# After a hit transformers computes with a mask, which may double the time of long texts (32k tokens
# on an H100: 2.9 s after 64 tokens, 1.4 s from the first): a smaller share of them is no hit.
_LONG_TOKENS, _MIN_SHARE = 4096, 1 / 8
# Two prompts with the same _FEW_TOKENS first tokens show whether a model is causal. Experts, which
# then see other tokens, may round differently: by _ROUNDING times the dtype's last digit.
_FEW_TOKENS, _ROUNDING, _MIN_ROUNDING = 8, 4, 1e-4
# Lengths of prompts that are computed to measure the model's speed, until _SPEED_S have passed.
_SPEED_TOKENS, _SPEED_S = (32, 128, 512, 2048), 0.2
# Newer versions of transformers call the argument `cache`.
_ARGUMENTS = ("cache", "past_key_values")
_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
_BY_POSITION = ("position_ids", "cache_position")
_CHUNKS = "prefill_chunk_size"
_TENSORS = frozenset({"input_ids", "attention_mask", *_BY_POSITION})
_CHANGING_ROPE = frozenset({"dynamic", "longrope"})
_ONE_ROW = (
    "a TierKVCache holds one sequence: call generate for each row separately, without "
    "beams and with one returned sequence (each of these makes several rows)"
)


@dataclass(frozen=True, slots=True)
class PromptHit:
    """The sources of the KV of a prompt's tokens, as numbers of tokens.

    Attributes:
        device: tokens whose KV was still on the device.
        host: tokens that were loaded from host memory.
        storage: tokens that were fetched from the store.
        computed: tokens that the model computed.
        problem: the error that prevented cached tokens from being loaded; None without an error.
    """

    device: int = 0
    host: int = 0
    storage: int = 0
    computed: int = 0
    problem: str | None = None

    def __add__(self, other: PromptHit) -> PromptHit:
        return PromptHit(
            self.device + other.device,
            self.host + other.host,
            self.storage + other.storage,
            self.computed + other.computed,
            other.problem or self.problem,
        )

    def __str__(self) -> str:
        return (
            f"{self.device} tokens on the device, {self.host} from host, {self.storage} from "
            f"storage, {self.computed} computed" + (f" ({self.problem})" if self.problem else "")
        )


_NO_HIT = PromptHit()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class OwnMemoryLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a cache of transformers whose memory exists before the first token."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory exists.

        Args:
            key_states: ignored.
            value_states: ignored.
        """

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # as older versions call it
        return -1


class PagedLayer(OwnMemoryLayer):
    """A layer of `TierKVCache`: attention gets views of the layer's contiguous device blocks.

    Attributes:
        length: number of tokens whose keys and values the layer has.

    Args:
        number: number of the layer.
        wait: called before the layer's blocks are read or written, with the number of the layer and
            the number of tokens that the layer will then have.
    """

    is_croppable = True

    def __init__(self, number: int, wait: Callable[[int, int], None]) -> None:
        super().__init__()
        self.length = 0
        self._number = number
        self._wait = wait

    def place(self, room: _DeviceRoom, planes: Sequence[int], length: int) -> None:
        """Use two planes of `room` as the layer's keys and values.

        Args:
            room: the device memory of the sequence.
            planes: numbers of the planes of keys and of values in `room`.
            length: number of the sequence's first tokens whose keys and values the planes already
                have.
        """
        self._room = room
        self._keys, self._values = planes
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        self.length = length
        states = self._room.cut(0, length)
        self.keys, self.values = states[self._keys], states[self._values]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens' keys and values.

        Args:
            key_states: [1, kv_heads, new tokens, dim].
            value_states: [1, kv_heads, new tokens, dim].
            args: ignored.
            kwargs: ignored.

        Returns:
            Views of the keys and of the values of all tokens, [1, kv_heads, tokens, dim] each.

        Raises:
            LayoutError: the shapes or the dtype are not those of this cache's model.
        """
        start, stop = self.length, self.length + key_states.shape[-2]
        self._wait(self._number, stop)
        rooms = self._room.cut(start, stop)
        for plane, states in ((self._keys, key_states), (self._values, value_states)):
            room = rooms[plane]
            if room.shape != states.shape or room.dtype != states.dtype:
                raise LayoutError(
                    f"layer {self._number} computed {tuple(states.shape)} of "
                    f"{_name(states.dtype)}, but this cache expects "
                    f"{tuple(room.shape)} of {_name(room.dtype)}: use this cache only "
                    "with the model that it was made for"
                )
            room.copy_(states.detach() if states.requires_grad else states)
        self._set_length(stop)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.length + new, 0

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end.

        Args:
            tokens_to_remove: -n to remove the last n tokens; n > 0 to leave the first n tokens, as
                older versions of transformers do; 0 to do nothing.
        """
        if tokens_to_remove:
            left = tokens_to_remove + (self.length if tokens_to_remove < 0 else 0)
            self._set_length(min(max(left, 0), self.length))

    def reset(self) -> None:
        self._set_length(0)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise BadRequestError(_ONE_ROW)

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


class _DeviceRoom:
    """Device memory for one sequence: contiguous blocks for each plane, in one allocation.

    Attributes:
        num_tokens: number of tokens that fit.
        planes: uint8 [num_blocks, block_bytes] each, in the order of the layout.
        states: the same memory as [1, heads, num_tokens, dim] each.

    Args:
        like: keys and values of one token, [1, heads, 1, dim] each, in the order of the layout's
            planes; they set dtypes and device.
        layout: the layout of a block.
        num_tokens: number of tokens to allocate memory for; rounded up to whole blocks.
    """

    def __init__(self, like: Sequence[torch.Tensor], layout: Layout, num_tokens: int) -> None:
        num_blocks = -(-num_tokens // layout.block_size)
        self.num_tokens = num_blocks * layout.block_size
        sizes = [num_blocks * plane.block_bytes for plane in layout.planes]
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        # A tensor that is made in inference mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            memory = torch.empty(sum(padded), dtype=torch.uint8, device=like[0].device)
        self.planes: list[torch.Tensor] = []
        self.states: list[torch.Tensor] = []
        for piece, size, one in zip(memory.split(padded), sizes, like, strict=True):
            self.planes.append(piece[:size].view(num_blocks, -1))
            by_token = piece[:size].view(one.dtype).view(self.num_tokens, *one.shape[1::2])
            self.states.append(by_token.transpose(0, 1)[None])
        self._every: torch.Tensor | None = None
        if len({(one.shape, one.dtype) for one in like}) == 1:  # as nearly always
            by_plane = memory.view(len(sizes), -1)[:, : sizes[0]].view(like[0].dtype)
            by_token = by_plane.view(len(sizes), 1, self.num_tokens, *like[0].shape[1::2])
            self._every = by_token.transpose(2, 3)
        self._cuts: dict[tuple[int, int, bool], Sequence[torch.Tensor]] = {}

    def cut(self, start: int, stop: int) -> Sequence[torch.Tensor]:
        """Return views of tokens [start, stop) of every plane, [1, heads, tokens, dim] each."""
        # One cut serves all layers, in a tenth of the time of one per layer.
        key = (start, stop, torch.is_inference_mode_enabled())  # each mode has views of its own
        found = self._cuts.get(key)
        if found is None:
            if self._every is None:
                found = [one.narrow(2, start, stop - start) for one in self.states]
            else:
                found = self._every.narrow(3, start, stop - start).unbind()
            if len(self._cuts) > 1:  # those of the pass before: new tokens, and all tokens
                self._cuts.clear()
            self._cuts[key] = found
        return found


@dataclass(slots=True)
class _Load:
    """A running copy of cached blocks from the host to the device, for one sequence.

    Attributes:
        key: name of the sequence's lookup in the engine cache.
        number: number of the plan that the copy carries out.
        valid: number of the sequence's leading tokens whose KV is on the device already.
    """

    key: str
    number: int
    valid: int


@dataclass(slots=True)
class _Begun:
    """A prompt that began to load before the model was called.

    Attributes:
        tokens: int64 [n], the prompt.
        hit: the sources of the tokens' KV.
    """

    tokens: npt.NDArray[np.int64]
    hit: PromptHit

    @property
    def num_there(self) -> int:
        return len(self.tokens) - self.hit.computed

    def is_of(self, tokens: npt.NDArray[np.int64], max_tokens: int) -> bool:
        begins = np.array_equal(tokens[: len(self.tokens)], self.tokens)
        return begins and self.num_there <= max_tokens


class TierKVCache(Cache):  # type: ignore[misc]
    """A transformers cache with prefixes that outlive the call, the process and the machine.

        cache = TierKVCache.for_model(model, store="redis://127.0.0.1:6379/0")
        model.generate(**inputs, past_key_values=cache)
        print(cache.last_hit)

    Each `generate` finds the longest prefix of its input in the cache's device memory, in host
    memory or in the store, and computes the rest. Afterwards the KV of all tokens is cached,
    including the generated tokens. Blocks that the store does not deliver in time are computed.

    A cache has one sequence at a time: one row, no beams, no padding. Images, embeddings and token
    types are refused, because tierkv finds KV by token ids alone. To call `model(...)` in a loop
    instead of `generate`, put the loop into `with cache.sequence():`. The model then returns logits
    only for the tokens that it computed, not for cached tokens.

    Attributes:
        last_hit: the sources of the KV of the last sequence's tokens.
    """

    @classmethod
    def for_model(  # noqa: PLR0913 - where, how much, and what makes another's bytes usable
        cls,
        model: PreTrainedModel,
        store: str | None = None,
        *,
        host_bytes: int = 4 << 30,
        block_size: int = 64,
        ttl_s: float | None = 86_400.0,
        revision: str | None = None,
        tenant: str = "",
        fetch_policy: FetchPolicy = FetchPolicy.BEST_EFFORT,
        settings: StoreSettings | None = None,
        device: Device | None = None,
    ) -> Self:
        """Return an open cache for `model`; close it, or use it in a `with`.

        Args:
            model: the model that will be called with this cache. Its `generate` is replaced, and
                hooks are added to it.
            store: storage URL, such as file:///path or redis://host; None for host memory alone.
            host_bytes: bytes of host memory, which is pinned for a GPU.
            block_size: tokens of a block.
            ttl_s: seconds that a value stays in the store; None for as long as the store keeps it.
            revision: a name for the model's weights: models share KV if configuration and revision
                are equal. None hashes all weights once, and uses the hash as the revision. Models
                with different active PEFT adapters or adapter scales never share KV.
            tenant: name of the owner of the blocks; other tenants do not find them.
            fetch_policy: BEST_EFFORT fetches blocks if fetching is estimated to be faster than
                computing, WAIT_COMPLETE fetches all stored blocks.
            settings: further settings of the store; None for the defaults.
            device: tierkv's object for the device that the model is on; None makes one, with
                PyTorch's current stream as its compute stream.

        Raises:
            LayoutError: the model's cache is not keys and values of every token.
            ConfigError: the model or a setting cannot be used.
            StoreUnavailableError: the store cannot be used.
        """
        virtual = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
        if virtual:  # prompt or prefix tuning
            raise ConfigError(
                "PEFT's prompt and prefix tuning put virtual tokens before the text, and "
                "their KV cannot be cached: use LoRA, or generate without this cache"
            )
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        check_model(model)
        if store is not None and revision is None and _hooks_of(model):
            raise ConfigError(
                "the model has forward hooks, which may change its keys and values: "
                "pass revision= with a name for the weights and hooks together"
            )
        like = states_of_one_token(model)
        fingerprint = Fingerprint(
            f"{type(model).__name__} of {FORMAT}",
            layout_of(like, block_size),
            revision=content_of(model) if revision is None else revision,
            weight_dtype=_name(model.dtype),
            adapter=_adapters_of(model),
            tenant=tenant,
        )
        rules = CacheSettings(
            block_size=block_size,
            fetch_policy=fetch_policy,
            storage_write=WritePolicy.NONE if store is None else WritePolicy.WRITE_THROUGH,
        )
        device = _device_of(like[0].device) if device is None else device
        room = _DeviceRoom(like, fingerprint.layout, _MIN_TOKENS)
        planes = WorkerPlanes(device, _adopted(device, fingerprint.layout, room))
        engine = EngineCache(
            fingerprint,
            [fingerprint.layout],
            host_bytes=host_bytes,
            cache=rules,
            store=lambda: (
                None
                if store is None
                else open_guarded_store(store, settings or StoreSettings(), SystemClock())
            ),
            planes=planes,
            handoff=HandoffSettings(block_ttl_s=ttl_s),
        )
        max_kept = int(host_bytes * _MAX_KEPT) // fingerprint.layout.block_bytes
        moves = _Moves(device, planes, engine, max_kept)
        made = cls(model, like, room, fingerprint.layout, moves)
        engine.open()
        try:
            if store is not None:
                moves.note_prefills(list(speeds(model)))
            _install(model)
        except BaseException:  # Ctrl-C too: no caller can close a cache that was not made
            made.close()
            raise
        return made

    def __init__(
        self,
        model: PreTrainedModel,
        like: Sequence[torch.Tensor],
        room: _DeviceRoom,
        layout: Layout,
        moves: _Moves,
    ) -> None:
        """Use `for_model` instead, which makes the arguments of this constructor."""
        super().__init__(layers=[PagedLayer(n, self._wait) for n in range(layout.num_layers)])
        self.last_hit = PromptHit()
        self._model = model
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._weights = _state_of(model)
        self._like = like
        self._room = room
        self._layout = layout
        self._moves = moves
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._fed: list[tuple[int, torch.Tensor]] = []  # first position, token ids [tokens]
        self._stop = 0  # number of tokens after the running forward pass
        self._held = np.zeros(0, np.int64)  # the tokens with KV in the room
        self._num_kept = 0  # number of the sequence's leading tokens that lookups find
        self._keeping: _Asked[int] | None = None  # uses the room until it ends
        self._is_whole = True  # False if Ctrl-C or a signal has interrupted a change
        self._is_kept = True  # False if the sequence has tokens that `_keep` has not seen
        self._load: _Load | None = None
        self._begun: _Begun | None = None
        self._hit = _NO_HIT  # of the running forward pass
        self._timer = _Timer(like[0].device)
        self._stream = _stream_of(like[0].device)
        self._place(0)

    # A sequence

    @contextmanager
    def sequence(self, prompt: torch.Tensor | None = None) -> Iterator[Self]:
        """Begin a new token sequence, which the calls of the model inside the `with` continue.

        On leaving the `with`, the KV of all tokens of the sequence is cached. `generate` enters a
        sequence by itself.

        Args:
            prompt: token ids [1, tokens] that the model will be given first; their cached part
                begins to load at once. None if the ids are not known.

        Raises:
            BadRequestError: another sequence runs.
            ConfigError: the model has changed since the cache was made.
            ShuttingDownError: this cache is closed.
        """
        self._check_open()
        if self._turn.locked():
            raise BadRequestError(
                "another generate uses this cache now: wait for its end, or make a "
                "cache for each thread"
            )
        with self._turn:
            self._moves.hurry()
            self._keep()  # the text of calls outside a sequence
            self.last_hit = PromptHit()
            self._fed.clear()
            self._stop = 0
            try:
                with self._changing():
                    if prompt is not None:
                        self._begin(prompt)
                    self._place(0)
                    self._check_model()  # while the load runs
                yield self
            finally:
                self._keep()

    def reset(self) -> None:
        """Store the KV of the present text in the cache, and begin a new text.

        Code that calls `model(...)` without `sequence` calls this between two texts.
        """
        with self.sequence():
            pass

    def prepare(
        self, model: PreTrainedModel, args: Sequence[Any], arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a forward pass without the cached tokens.

        A hook calls this before each forward pass. Loads of cached tokens start here.

        Args:
            model: the model that is called.
            args: positional arguments of the call.
            arguments: keyword arguments of the call.

        Raises:
            BadRequestError: the model or an argument does not fit this cache.
            ShuttingDownError: this cache is closed.
        """
        if model is not self._model:
            raise BadRequestError(
                "this cache was made for another model: make a cache for this model"
            )
        if not self._is_on_stream():
            raise BadRequestError(
                "the model runs on another CUDA stream than the stream on which this "
                "cache was made, and copies would not be ordered with it: make the "
                "cache on the stream that computes"
            )
        self._check_open()
        self._moves.hurry()
        self._kept()
        given = dict(zip(self._parameters, args, strict=False)) | dict(arguments)
        with self._changing():
            return self._prepared(given)

    def _prepared(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = _checked_ids(given)
        start, count = self.get_seq_length(), ids.shape[1]
        is_text = start == 0 or count >= self._layout.block_size
        _check_places(given, start, count)
        max_tokens = max(start + count - _num_logits(given), start)
        hit = None if self._begun is None else self._pop_begun(ids, max_tokens)
        if hit is None:
            self._reserve(start + count)
        self._fed.append((start, ids[0].detach().clone()))
        self._stop = start + count
        self._is_kept = False
        if is_text:
            self._hit = hit or self._fetch(start, ids[0].cpu().numpy(), max_tokens)
            given = _without(given, count, count - self._hit.computed)
            if self._load is None and self._hit.computed >= self._layout.block_size:
                self._timer.start(self._hit.computed)
        return given

    def settle(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a second forward pass if a load has failed, otherwise None.

        A hook calls this after each forward pass. The second pass computes the tokens that did not
        load.

        Args:
            arguments: keyword arguments of the forward pass, made by `prepare`.
        """
        with self._changing():
            self._timer.stop()
            load, self._load = self._load, None
            hit, self._hit = self._hit, _NO_HIT
            if load is None or not self._moves.failed(load):
                if hit is not _NO_HIT:
                    self.last_hit += hit
                return None
            start, ids = self._fed[-1]
            device = load.valid - start
            lost = len(ids) - device
            log.warning(
                "%d cached tokens did not load: the model computes them", hit.host + hit.storage
            )
            self.last_hit += PromptHit(device, 0, 0, lost, "a load failed")
            self._place(load.valid)
            given = {**arguments, "input_ids": ids[device:][None]}
            for name in _BY_POSITION:
                if (places := given.get(name)) is not None:
                    every = torch.arange(load.valid, load.valid + lost, device=places.device)
                    given[name] = every.expand(*places.shape[:-1], lost)
            return given

    # What is there

    @property
    def stats(self) -> Stats:
        """The current statistics of the tiers and the store."""
        self._check_open()
        self._kept()
        return self._moves.engine.stats().wait(_COPY_S)

    def verify(self) -> list[str]:
        """Compare a recount of host slots, leases and protected blocks with the cache's own counts.

        Returns:
            A sentence for each difference; empty if there is none.
        """
        self._check_open()
        self._kept()
        return self._moves.engine.verify().wait(_COPY_S)

    def close(self) -> None:
        """Store the KV of the current text, wait for writes to the store, and free all memory.

        Further calls do nothing.
        """
        if self._moves.is_open and os.getpid() == self._process:
            with self._turn:
                self._keep()
                self._kept()
            self._moves.close()
            self._held, self._num_kept = self._held[:0], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _check_open(self) -> None:
        if not self._moves.is_open:
            raise ShuttingDownError("this cache is closed: make another one")
        if os.getpid() != self._process:
            raise ForkedError(
                "this cache belongs to the parent of this forked process: make another cache here"
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the cached sequence as inconsistent for the duration of the `with` block.

        The mark stays if an exception other than a TierKVError, such as Ctrl-C, ends the block. The
        sequence is then discarded.
        """
        self._is_whole = False
        try:
            yield
        except TierKVError:
            self._is_whole = True
            raise
        self._is_whole = True

    def _start_anew(self) -> None:
        """Wait for all running copies, and forget the sequence."""
        self._moves.start_anew(self._room)
        self._load = self._begun = None
        self._fed.clear()
        self._stop = 0
        self._held, self._num_kept = self._held[:0], 0
        self._hit, self._is_kept = _NO_HIT, True
        self._place(0)
        self._is_whole = True

    def _is_on_stream(self) -> bool:
        return _stream_of(self._like[0].device) == self._stream

    def _begin(self, prompt: torch.Tensor) -> None:
        if prompt.ndim != 2 or prompt.shape[0] != 1 or not self._is_on_stream():  # noqa: PLR2004
            return
        tokens = prompt[0].detach().cpu().numpy()
        if len(tokens) > 1 and tokens.dtype.kind == "i":
            self._reserve(len(tokens))
            self._begun = _Begun(tokens, self._fetch(0, tokens, len(tokens) - 1))

    def _pop_begun(self, ids: torch.Tensor, max_tokens: int) -> PromptHit | None:
        """Use the load that `_begin` started, and return the sources of the KV of `ids`.

        Drop the load and return None if the load does not fit `ids`, brings more than `max_tokens`
        tokens, or `ids` has more tokens than the device memory has room for.
        """
        begun, tokens = self._begun, ids[0].cpu().numpy()
        if (
            begun is None
            or not begun.is_of(tokens, max_tokens)
            or len(tokens) > self._room.num_tokens
        ):
            self._forget_begun()
            return None
        self._begun = None
        self._place(begun.num_there)
        return begun.hit + PromptHit(computed=len(tokens) - len(begun.tokens))

    def _forget_begun(self) -> None:
        load, self._load, self._begun = self._load, None, None
        if load is not None:  # it has overwritten the text before
            self._moves.failed(load)
            self._held, self._num_kept = self._held[:0], 0

    def _place(self, num_tokens: int) -> None:
        for layer, planes in zip(self.layers, self._layout.planes_of_layer, strict=True):
            layer.place(self._room, planes, num_tokens)

    def _reserve(self, num_tokens: int) -> None:
        if num_tokens <= self._room.num_tokens:
            return
        old, layout = self._room, self._layout
        self._room = _DeviceRoom(self._like, layout, num_tokens + num_tokens // _SPARE)
        for mine, theirs in zip(self._room.states, old.states, strict=True):
            mine[:, :, : old.num_tokens].copy_(theirs)
        self._moves.use(self._room)
        self._place(self.get_seq_length())

    def _fetch(self, start: int, new: npt.NDArray[np.int64], max_tokens: int) -> PromptHit:
        """Start to load the cached KV of `new`, the tokens after the text's first `start` tokens.

        At most `max_tokens` tokens of the text come from the cache. Return how many of the tokens
        in `new` come from the device, the host and storage, and how many the model must compute.
        """
        size = self._layout.block_size
        tokens, have = new, start
        if start:
            tokens = self._tokens(start + len(new))
        else:
            have = min(_num_common(self._held, new), max_tokens)
            self._num_kept = min(self._num_kept, have)
        hit = PromptHit(have - start, 0, 0, start + len(new) - have)
        found, load = Found(0), None
        if have < max_tokens and not start % size:  # a load writes whole blocks
            found, load = self._moves.load(tokens, have, max_tokens)
        if load is None:
            self._place(have)
            return PromptHit(hit.device, 0, 0, hit.computed, found.problem)
        brought = min(found.num_tokens, max_tokens - have)
        stored = min(found.storage_tokens, brought)
        self._load = load
        self._num_kept = max(self._num_kept, have + found.num_tokens)
        self._place(have + brought)
        return PromptHit(
            hit.device, brought - stored, stored, hit.computed - brought, found.problem
        )

    def _wait(self, layer: int, stop: int) -> None:
        if stop != self._stop:
            raise BadRequestError(
                "the model ran before its prompt was looked up in this cache: call or "
                "generate with the whole model that this cache was made for, not one "
                "of its parts"
            )
        if self._load is not None:
            self._moves.wait_layer(self._load, layer)

    def _keep(self) -> None:
        """End the current sequence: record its tokens and start copying new blocks to host."""
        self._kept()
        if not self._is_whole:
            self._start_anew()
        with self._changing():
            if self._begun is not None:
                self._forget_begun()
            load, self._load = self._load, None
            if load is not None and self._moves.failed(load):  # nor did the forward pass end
                self._place(load.valid)
            if not self._is_kept:
                self._keep_text()

    def _keep_text(self) -> None:
        lengths = {layer.length for layer in self.layers}
        num_tokens = min(lengths)
        self._held = self._tokens(num_tokens)
        if len(lengths) > 1:
            self._place(num_tokens)
        self._moves.note_prefills(self._timer.read())
        if num_tokens > self._num_kept:
            self._keeping = self._moves.keep(self._held, self._num_kept)
        self._is_kept = True

    def _kept(self) -> None:
        keeping = self._keeping
        if keeping is not None:
            self._num_kept = keeping.result()
            self._keeping = None

    def _tokens(self, num_tokens: int) -> npt.NDArray[np.int64]:
        found = np.zeros(max((at + len(ids) for at, ids in self._fed), default=0), np.int64)
        if self._fed:
            every, read = torch.cat([ids for _, ids in self._fed]).cpu().numpy(), 0
            for start, ids in self._fed:  # later tokens replace cropped ones
                found[start : start + len(ids)] = every[read : read + len(ids)]
                read += len(ids)
        return found[:num_tokens]

    def _check_model(self) -> None:
        _check_drops_nothing(self._model)
        if _state_of(self._model) != self._weights:
            raise ConfigError(
                "the model's weights, adapters, hooks or device changed after this "
                "cache was made: close this cache and make another (PEFT's "
                "adapter_names sets hooks during a call)"
            )


class _Moves:
    """A thread that makes all calls to an `EngineCache` and waits for the results, with deadlines.

    Ctrl-C and signal handlers interrupt the main thread at any point, but never this thread.

    Args:
        device: the device that copies.
        planes: the device blocks that loads write and saves read.
        engine: the cache with host memory and store.
        max_kept_blocks: largest number of blocks of one sequence to copy to the host.
    """

    def __init__(
        self, device: Device, planes: WorkerPlanes, engine: EngineCache, max_kept_blocks: int
    ) -> None:
        self.engine = engine
        self.is_open = True
        self._layout = planes.layouts[0]
        self._device = device
        self._planes = planes
        self._max_kept_blocks = max_kept_blocks
        self._numbers = itertools.count()
        self._loads: dict[str, _Load] = {}  # running, by key
        self._hurries = False  # True if another text waits for the running `keep`
        self._todo: SimpleQueue[_Asked[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="tierkv-moves", daemon=True)
        self._thread.start()

    def use(self, room: _DeviceRoom) -> None:
        self._ask(self._use, room).result()

    def load(
        self, tokens: npt.NDArray[np.int64], have: int, max_tokens: int
    ) -> tuple[Found, _Load | None]:
        self.hurry()
        return self._ask(self._start_load, tokens, have, max_tokens).result()

    def failed(self, load: _Load) -> bool:
        """Wait for the end of the load; return True if a block is missing.

        TransferError is raised after 60 s.
        """
        return self._ask(self._has_failed, load).result()

    def keep(self, tokens: npt.NDArray[np.int64], num_kept: int) -> _Asked[int]:
        """Start copying a text to the host, without its first `num_kept` tokens.

        The later result is the number of the text's leading tokens that lookups then find.
        """
        self._hurries = False
        return self._ask(self._kept, tokens, num_kept)

    def hurry(self) -> None:
        """Make a running `keep` (copies to the host) stop waiting soon for a free host slot."""
        self._hurries = True

    def note_prefills(self, computed: Sequence[tuple[int, float]]) -> None:
        for num_tokens, seconds in computed:
            self._ask(self.engine.note_prefill, num_tokens, seconds)

    def start_anew(self, room: _DeviceRoom) -> None:
        """Wait until all loads have ended, then use `room` (device memory) for new copies."""
        self._ask(self._end_all, room).result()

    def _ask(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> _Asked[T]:
        asked = _Asked(partial(call, *args, **named))
        self._todo.put(asked)
        return asked

    # On the thread

    def _live(self) -> None:
        while (asked := self._todo.get()) is not None:
            asked.run()

    def _use(self, room: _DeviceRoom) -> None:
        self._planes.replace(_adopted(self._device, self._layout, room))

    def _end_all(self, room: _DeviceRoom) -> None:
        for load in list(self._loads.values()):
            self._has_failed(load)
        self._use(room)

    def _start_load(
        self, tokens: npt.NDArray[np.int64], have: int, max_tokens: int
    ) -> tuple[Found, _Load | None]:
        key, size = f"prompt {next(self._numbers)}", self._layout.block_size
        found = self._find(key, Prompt(pack(tokens), size), have)
        stop = min(have + found.num_tokens, max_tokens)
        if not have and len(tokens) >= _LONG_TOKENS and stop < _MIN_SHARE * len(tokens):
            stop = 0
        first, last = have // size, -(-stop // size)
        plan = None
        if stop > have:
            plan = self.engine.load(key, [range(first, last)], [first])
        if plan is None:
            self.engine.release(key)
            return found, None
        self._planes.start_loads(plan)
        load = self._loads[key] = _Load(key, plan.number, first * size)
        return found, load

    def _find(self, key: str, prompt: Prompt, have: int) -> Found:
        deadline = time.monotonic() + _FIND_S
        while True:
            self.engine.poll()
            found = self.engine.lookup(key, prompt, have)
            if found is not None:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                return Found(0, problem="the lookup took too long")
            self.engine.wait(left)

    def wait_layer(self, load: _Load, layer: int) -> None:
        """Let the compute stream wait until a layer is loaded.

        A failed load raises no error here; `failed` reports it.
        """
        with suppress(TierKVError):
            self._planes.wait_layer(load.number, layer, _COPY_S)

    def _has_failed(self, load: _Load) -> bool:
        deadline = time.monotonic() + _COPY_S
        while True:
            for key, failed in self.engine.poll().loaded:
                if key == load.key:
                    del self._loads[key]
                    self.engine.release(key)
                    return bool(failed)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferError(
                    f"the copy of cached blocks to the device did not end within {_COPY_S:g} s"
                )
            self._planes.wait(load.number, left)

    def _kept(self, tokens: npt.NDArray[np.int64], num_kept: int) -> int:
        size = self._layout.block_size
        stop = min(-(-len(tokens) // size), self._max_kept_blocks)
        prompt = Prompt(pack(tokens), size)
        for first in dict.fromkeys((num_kept // size, 0)):  # 0 if earlier blocks were evicted
            if first >= stop:
                return num_kept
            try:
                if self._save(prompt, first, stop):
                    return min(len(tokens), stop * size)
            except TierKVError as error:
                log.warning("the computed keys and values were not stored: %s", error)
                break
            if self._hurries:
                break
        return 0

    def _save(self, prompt: Prompt, first: int, stop: int) -> bool:
        """Copy blocks [first, stop) to the host; return True if lookups find all of them."""
        key, plans, left = f"saved {next(self._numbers)}", [], stop - first
        kept: list[int] = []  # number of findable blocks, for each answered plan
        deadline, held_up_s = time.monotonic() + _KEEP_S, 0.0
        while left and time.monotonic() < deadline and held_up_s < _HELD_UP_S:
            plan = self.engine.save(key, prompt, [range(first, stop)], [first])
            if plan is None:  # host slots are being made free
                began = time.monotonic()
                self.engine.wait(_SLOTS_S)
                if self._hurries:
                    held_up_s += time.monotonic() - began
            else:
                self._planes.start_saves(plan)
                plans.append(plan.number)
                left -= len(plan.slots()[0])
            kept += self._stored(key)
        for number in plans:
            self._planes.wait(number, _COPY_S)
        deadline = time.monotonic() + _ANSWER_S
        while True:
            kept += self._stored(key)
            if len(kept) >= len(plans) or time.monotonic() > deadline:
                break
            self.engine.wait(_ANSWER_S)
        self.engine.release(key)
        return sum(kept) >= stop - first

    def _stored(self, key: str) -> list[int]:
        return [count for name, count in self.engine.poll().stored if name == key]

    def close(self) -> None:
        self.is_open = False
        self._todo.put(None)
        self._thread.join()
        try:
            self.engine.close()
        finally:
            self._device.close()


class _Asked(Generic[T]):
    """A call for the thread of `_Moves`, and its outcome.

    A Ctrl-C can leave the lock of a `concurrent.futures.Future` locked, because Python code
    acquires the lock. Therefore a call waits on a queue that is implemented in C.

    Args:
        work: the function to call.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._bell: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised where the task is awaited
            self._error = error
        self._is_done = True
        self._bell.put(None)

    def result(self) -> T:
        if not self._is_done:
            self._bell.get()
        if self._error is not None:
            raise self._error
        return cast("T", self._result)


class _Timer:
    """A clock for the time that the model needs to compute prompts.

    On CUDA, `read` waits until the device has computed them.

    Args:
        device: the device that the model computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._under_way: tuple[int, Any] | None = None
        self._done: list[tuple[int, Any, Any]] = []

    def start(self, num_tokens: int) -> None:
        self._under_way = (num_tokens, self._now())

    def stop(self) -> None:
        if self._under_way is not None:
            self._done.append((*self._under_way, self._now()))
            self._under_way = None

    def read(self) -> list[tuple[int, float]]:
        """Return (number of tokens, seconds) of each prompt that was timed since the last call."""
        done, self._done = self._done, []
        if not self._is_cuda:
            return [(count, end - start) for count, start, end in done]
        for _, _, end in done:
            end.synchronize()
        return [(count, start.elapsed_time(end) / 1e3) for count, start, end in done]

    def _now(self) -> object:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# The model: its identity, and its forward passes


_REMEDY = "use another model, or generate without this cache"


def check_model(model: PreTrainedModel, *, remedy: str = _REMEDY) -> None:
    """Check that the KV of a token depends only on this token and the tokens before it.

    Args:
        model: the model to check; two short prompts are computed.
        remedy: what the user can do, as the end of an error sentence.

    Raises:
        LayoutError: the model has sliding windows, recurrent states, an encoder, or a rope that
            changes with the text's length, or its tokens attend to later tokens.
        ConfigError: the model is split over processes, or trains with dropout.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds != {DynamicLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise LayoutError(
            f"only layers of full attention can be cached, and this model has {names}: {remedy}"
        )
    if model.config.is_encoder_decoder:
        raise LayoutError(
            "encoder-decoder models cannot be cached, since their cache also depends on "
            f"the encoder's input: {remedy}"
        )
    parts = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    if changing := sorted(_CHANGING_ROPE & set(_rope_types(parts))):
        raise LayoutError(
            f"rope of type {changing[0]} encodes the same tokens differently in a "
            f"longer text, so cached blocks would be wrong there: {remedy}"
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise ConfigError(
            "the model is split over several processes, and this cache supports one: load "
            "the model without tp_plan"
        )
    _check_drops_nothing(model)
    if not _is_causal(model):
        raise LayoutError(
            "the model's tokens attend to later tokens, so the cached beginning of a "
            "text would be wrong in a longer text: for models such as BERT, set "
            "is_decoder=True in the configuration"
        )


def _is_causal(model: PreTrainedModel) -> bool:
    """Return True if the KV of a prompt's first tokens does not depend on the tokens after them."""
    # The second layer is compared: the first layer's KV depends on each token alone.
    layers = [_computed(model, _FEW_TOKENS, last).layers[:2][-1] for last in (0, 1)]
    if not all(layer.is_initialized for layer in layers):
        return True  # another check refuses such a model
    one, other = (layer.values[:, :, : _FEW_TOKENS // 2] for layer in layers)
    most = max(_ROUNDING * torch.finfo(one.dtype).eps, _MIN_ROUNDING)
    return not bool((one - other).norm() > most * one.norm())


def _rope_types(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (str(value[name]) for name in ("rope_type", "type") if name in value)
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _rope_types(one)


def _computed(model: PreTrainedModel, num_tokens: int, last: int = 0) -> DynamicCache:
    """Compute a prompt of `num_tokens` tokens, to measure or examine a model; return its KV.

    The tokens of the prompt's first half are 0, and those of its second half are `last`.
    """
    cache = DynamicCache(config=model.config)
    taken = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {_ARGUMENT if _ARGUMENT in taken else "past_key_values": cache}
    if "logits_to_keep" in taken:
        arguments["logits_to_keep"] = 1
    with torch.no_grad():
        ids = torch.zeros((1, num_tokens), dtype=torch.long, device=model.device)
        ids[:, num_tokens // 2 :] = last
        model(input_ids=ids, use_cache=True, **arguments)
    return cache


def speeds(model: PreTrainedModel) -> Iterator[tuple[int, float]]:
    """Measure the model: yield pairs of a prompt's length in tokens and its seconds of computing.

    Prompts have fixed lengths from 32 to 2,048 tokens. The longer ones are left out once 0.2 s have
    passed.
    """
    timer, most = _Timer(model.device), getattr(model.config, "max_position_embeddings", None)
    spent = 0.0
    for num_tokens in _SPEED_TOKENS:
        if spent < _SPEED_S and num_tokens < (most or _SPEED_TOKENS[-1] + 1):
            for _ in range(2):  # the first of a size also loads kernels
                timer.start(num_tokens)
                _computed(model, num_tokens)
                timer.stop()
            (_, first), (_, took) = timer.read()
            spent += first + took
            yield num_tokens, took


def states_of_one_token(model: PreTrainedModel, *, remedy: str = _REMEDY) -> list[torch.Tensor]:
    """Return keys and values as the model computes them for one token, [1, heads, 1, dim] each.

    Args:
        model: the model; one token is computed.
        remedy: what the user can do, as the end of an error sentence.

    Returns:
        Keys of layer 0, values of layer 0, keys of layer 1, and so on.

    Raises:
        LayoutError: a layer has no keys and values in the cache, or has them in another shape.
        ConfigError: the layers are on several devices.
    """
    cache = _computed(model, 1)
    empty = [at for at, layer in enumerate(cache.layers) if not layer.is_initialized]
    if empty:
        raise LayoutError(
            f"layers {empty} of the model store no keys and values in its cache: {remedy}"
        )
    states = [one for layer in cache.layers for one in (layer.keys, layer.values)]
    if wrong := [tuple(one.shape) for one in states if one.ndim != 4 or one.shape[::2] != (1, 1)]:  # noqa: PLR2004
        raise LayoutError(
            "keys and values must have the shape [1, heads, tokens, dim]: for one "
            f"token this model makes {wrong[0]}"
        )
    if len({one.device for one in states}) > 1:
        raise ConfigError(
            "the model's layers are on several devices, and this cache supports one: load "
            'the model with device_map={"": DEVICE}'
        )
    return states


def layout_of(states: Sequence[torch.Tensor], block_size: int) -> Layout:
    """Return the layout of blocks for a model, given the keys and values of one token.

    Args:
        states: keys of layer 0, values of layer 0, keys of layer 1, and so on, [1, heads, 1, dim]
            each. Only their shapes and types are used.
        block_size: tokens of a block.
    """
    widths = [one.numel() * one.element_size() for one in states]
    return Layout(
        block_size,
        tuple(
            Plane(at // 2, ("key", "value")[at % 2], _name(one.dtype), width * block_size, width)
            for at, (one, width) in enumerate(zip(states, widths, strict=True))
        ),
    )


def _device_of(device: torch.device) -> Device:
    if device.type == "cpu":
        return CpuDevice()
    if device.type != "cuda":
        raise ConfigError(
            f"the model is on {device}, and this cache supports only CPU and CUDA: move "
            "the model to one of these"
        )
    from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - only where there is a GPU

    return CudaDevice(device.index or 0, compute_stream=_stream_of(device))


def _stream_of(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.cuda.current_stream(device).cuda_stream)


def _adopted(device: Device, layout: Layout, room: _DeviceRoom) -> Planes:
    if room.planes[0].device.type == "cpu":
        return EnginePlanes(layout, [plane.numpy() for plane in room.planes])
    from tierkv.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - only where there is a GPU

    if not isinstance(device, CudaDevice):
        raise ConfigError(
            f"the device {device.name} cannot use memory that PyTorch has allocated: use a "
            "device of cpu or cuda"
        )
    return device.adopt_planes(layout, room.planes)


def _state_of(model: PreTrainedModel) -> list[object]:
    """Return a value that changes when a weight, an adapter or a hook of the model changes."""
    version = attrgetter("_version")  # PyTorch counts the writes to a tensor
    found: list[object] = [
        (one.data_ptr(), 0 if one.is_inference() else version(one)) for one in model.parameters()
    ]
    for layer in _adapter_layers(model).values():
        scaling = getattr(layer, "scaling", None)
        scales = tuple(scaling.values()) if isinstance(scaling, dict) else scaling
        found.append((tuple(layer.active_adapters), layer.disable_adapters, scales))
    return [*found, *_hooks_of(model)]


_LOOKERS = ("transformers.", "tierkv.")


def _hooks_of(model: PreTrainedModel) -> list[int]:
    found: list[int] = []
    for one in map(vars, model.modules()):
        for hooks in (one["_forward_pre_hooks"], one["_forward_hooks"]):
            for number, hook in hooks.items():
                if not str(getattr(hook, "__module__", "")).startswith(_LOOKERS):
                    found.append(number)
    return found


def _adapter_layers(model: PreTrainedModel) -> dict[str, Any]:
    # The property is looked up on the class: a lookup on a module without it takes 5 us.
    return {
        name: one
        for name, one in model.named_modules()
        if hasattr(type(one), "disable_adapters") and isinstance(one.disable_adapters, bool)
    }


def _adapters_of(model: PreTrainedModel) -> str:
    layers = {name: _settings_of(one) for name, one in _adapter_layers(model).items()}
    return hashlib.sha256(repr(sorted(layers.items())).encode()).hexdigest() if layers else ""


def _settings_of(layer: torch.nn.Module) -> list[tuple[str, object]]:

    def is_plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(map(is_plain, value)) and all(map(is_plain, value.values()))
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    named = {name: value for name, value in vars(layer).items() if name != "training"}
    return sorted(
        (name, sorted(value.items(), key=repr) if isinstance(value, dict) else value)
        for name, value in named.items()
        if is_plain(value)
    )


def _check_drops_nothing(model: PreTrainedModel) -> None:
    if not model.training:
        return
    named = [value for name, value in model.config.to_dict().items() if "drop" in name]
    rates = [*named, *(one.p for one in model.modules() if isinstance(one, torch.nn.Dropout))]
    if any(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
        raise ConfigError(
            "the model is in training mode, where dropout makes keys and values "
            "random: call model.eval() first"
        )


def content_of(model: PreTrainedModel) -> str:
    """Return a digest of the model's configuration and weights: equal models have equal digests.

    For each weight, the digest covers the sum of its elements' bits, read as integers, and a sample
    of its elements.

    Raises:
        ConfigError: a weight is not in memory.
    """
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name not in _NOT_CONTENT
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        if not isinstance(weight, torch.Tensor) or not weight.numel():
            continue
        if weight.device.type == "meta":
            raise ConfigError(
                f"the weight {name} is not in memory, so the weights cannot be hashed: "
                "pass revision= with a name for them"
            )
        integers = _INTEGERS[weight.element_size()]
        bits = weight.detach().contiguous().view(-1).view(integers)
        some = bits[:: max(len(bits) // _SAMPLES, 1)].to("cpu", torch.int64).numpy().tobytes()
        total = bits.sum(dtype=torch.int64).item()
        digest.update(
            f"{name} {_name(weight.dtype)} {tuple(weight.shape)} {total} ".encode() + some
        )
    return digest.hexdigest()


_NOT_CONTENT = {"transformers_version", "use_cache", "dtype", "torch_dtype"}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _num_common(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    length = min(len(left), len(right))
    other = np.flatnonzero(left[:length] != right[:length])
    return int(other[0]) if len(other) else length


def _checked_ids(given: Mapping[str, Any]) -> torch.Tensor:
    ids = given.get("input_ids")
    if ids is None:
        raise BadRequestError(
            "a TierKVCache needs input_ids, by which it finds cached blocks: pass "
            "input_ids, not inputs_embeds"
        )
    if ids.ndim != 2 or ids.shape[0] != 1:  # noqa: PLR2004
        raise BadRequestError(f"{_ONE_ROW}; input_ids has the shape {tuple(ids.shape)}")
    if given.get("use_cache") is False:
        raise BadRequestError(
            "use_cache=False cannot be combined with a TierKVCache: remove one of them"
        )
    for name, value in given.items():
        if name in _TENSORS or value is None or isinstance(value, (Cache, bool, int, float, str)):
            continue
        raise BadRequestError(
            f"{name} changes keys and values, but is not part of the key of cached "
            f"blocks: generate without this cache, or remove {name}"
        )
    return ids


def _num_logits(given: Mapping[str, Any]) -> int:
    wanted = given.get("logits_to_keep")
    return wanted if isinstance(wanted, int) and wanted > 0 else 1


def _check_places(given: Mapping[str, Any], start: int, count: int) -> None:
    mask = given.get("attention_mask")
    if mask is not None and (mask.ndim != 2 or not bool(mask.all())):  # noqa: PLR2004
        raise BadRequestError(
            "attention_mask masks tokens, and a TierKVCache holds texts without padding: "
            "remove the padding and the mask"
        )
    for name in _BY_POSITION:
        places = given.get(name)
        if places is not None:
            if places.shape[-1] == count == 1 and places.numel() == 1:
                is_right = places.item() == start
            else:
                expected = torch.arange(start, start + count, device=places.device)
                is_right = places.shape[-1] == count and bool((places == expected).all())
            if not is_right:
                raise BadRequestError(
                    f"{name} must be {start} to {start + count - 1}, the positions of the "
                    "new tokens"
                )


def _without(given: Mapping[str, Any], count: int, num_tokens: int) -> dict[str, Any]:
    cut = {
        name: given[name][..., num_tokens:]
        for name in ("input_ids", *_BY_POSITION)
        if given.get(name) is not None and given[name].shape[-1] == count
    }
    return {**given, **cut}


def _install(model: PreTrainedModel) -> None:
    # Hooks and method are set on this object alone, so that a copy of the model gets its own.
    if "generate" not in vars(model):
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True)
        model.generate = MethodType(_generate, model)


def _generate(self: PreTrainedModel, *args: object, **arguments: object) -> object:
    """Run the model's `generate`; with a `TierKVCache`, reuse and cache the KV of its prompt."""
    cache = _cache_in(arguments)
    generate = type(self).generate
    if cache is None:
        return generate(self, *args, **arguments)
    for name in _ARGUMENTS:
        arguments.pop(name, None)
    with cache.sequence(_prompt_of(self, args, arguments)):
        return generate(self, *args, **arguments, **{_ARGUMENT: cache})


def _prompt_of(
    model: PreTrainedModel, args: Sequence[object], arguments: Mapping[str, object]
) -> torch.Tensor | None:
    """Return the token ids of the model's first forward pass in `generate`; None if not known."""
    # With prefill in chunks, the first call gets only a part of the prompt.
    configs = (*args[1:2], arguments.get("generation_config"), model.generation_config)
    cuts = [arguments.get(_CHUNKS), *(getattr(one, _CHUNKS, None) for one in configs)]
    given = args[0] if args else arguments.get("inputs", arguments.get("input_ids"))
    return given if isinstance(given, torch.Tensor) and not any(cuts) else None


def _before(
    model: PreTrainedModel, args: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]] | None:
    cache = _cache_in(arguments)
    return None if cache is None else ((), cache.prepare(model, args, arguments))


def _after(
    model: PreTrainedModel, _: tuple[Any, ...], arguments: dict[str, Any], __: object
) -> object:
    cache = _cache_in(arguments)
    again = None if cache is None else cache.settle(arguments)
    return None if again is None else model.forward(**again)


def _cache_in(arguments: Mapping[str, Any]) -> TierKVCache | None:
    for name in _ARGUMENTS:
        if isinstance(cache := arguments.get(name), TierKVCache):
            return cache
    return None
