"""A causal language model of transformers that runs on the blocks of the device tier.

The module loads the model's files, computes its fingerprint, and runs forward passes.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tierkv.adapters.transformers import (
    FORMAT,
    check_model,
    content_of,
    layout_of,
    speeds,
    states_of_one_token,
)
from tierkv.cache.keys import Fingerprint
from tierkv.cache.layout import Layout
from tierkv.errors import ConfigError, LayoutError, TierKVError
from tierkv.gguf_file import GGUFFile
from tierkv.gpu.room import require_room
from tierkv.hf.paged import ATTENTION, PagedStep, Pages, TokenRun

log = logging.getLogger(__name__)

_SETTING = "node.model (--model)"
_REMEDY = "use a decoder-only model with full attention in all layers"
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError,
)  # fmt: skip
_PROBE_TOKENS, _PROBE_CUT = 24, 17
# Allowed relative difference of logits: in units of the dtype's epsilon, and at least.
_ROUNDING, _MIN_ROUNDING = 32, 1e-3


def load_model(path: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Load a model onto `device`, in evaluation mode.

    Args:
        path: A directory with a config.json, or a GGUF file.
        dtype: The type of the weights; "auto" is the type in the files, float32 for GGUF.
        device: The device of the weights.

    Raises:
        ConfigError: There is no such model, its files cannot be read, a library is missing, or
            there is no memory for the weights.
        LayoutError: The model is an encoder-decoder.
    """
    source = path
    named: dict[str, Any] = {"local_files_only": True}
    if path.is_file() and path.suffix == ".gguf":
        path, named["gguf_file"] = path.parent, path.name
    elif not (path / "config.json").is_file():
        raise ConfigError(
            f"there is no model at {str(source)!r}: {_SETTING} names a directory with a "
            "config.json, or a .gguf file"
        )
    if dtype == "auto" and "gguf_file" in named:
        dtype = "float32"
    transformers_logging.disable_progress_bar()  # it would write hundreds of lines to a node's log
    try:
        if device.type == "cpu":
            what = f"the model {source}"
            lever = "its size (--dtype bfloat16, or a smaller model)"
            require_room(_weight_bytes(source, dtype), what, lever, is_filled_now=True)
        is_encoder_decoder = "gguf_file" not in named and (
            AutoConfig.from_pretrained(path, **named).is_encoder_decoder
        )
        if is_encoder_decoder:
            raise LayoutError(f"encoder-decoder models cannot be served: {_REMEDY}")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **named)
        found: PreTrainedModel = model.to(device).eval()
    except ImportError as error:
        raise ConfigError(
            f"the model at {str(source)!r} needs a library ({error}): GGUF files need `pip "
            "install gguf accelerate`"
        ) from error
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(
            f"the model at {str(source)!r} does not fit into the memory of {device}: use a "
            "smaller model, or a smaller transformers.dtype"
        ) from error
    except _UNREADABLE as error:
        raise ConfigError(f"the model at {str(source)!r} cannot be loaded: {error}") from error
    return found


def _weight_bytes(path: Path, dtype: str) -> int:
    if path.is_file():
        num_items = sum(math.prod(shape) for shape in GGUFFile(path).tensors.values())
    else:
        files = [*path.glob("*.safetensors")]
        if dtype == "auto" or not files:
            return sum(one.stat().st_size for one in files or path.glob("*.bin"))
        num_items = 0
        for file in files:
            with safe_open(file, "pt") as opened:
                shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118 - it is no dict
            num_items += sum(map(math.prod, shapes))
    item_bytes: int = getattr(torch, dtype).itemsize
    return num_items * item_bytes


class PagedModel:
    """A transformers model that has its keys and values only in the planes of the device tier.

    The constructor computes a short text with the model's own attention and with attention over
    blocks, and refuses the model if the logits differ.

    Args:
        model: The model, in evaluation mode. Its attention is replaced, and the caller cannot use
            the model for anything else.
        block_size: Number of tokens of a block.
        max_context: Largest number of tokens of a request, prompt and answer together; 0 for the
            model's own limit.

    Attributes:
        pads: True if all requests that generate attend in one call, padded to the longest; False if
            each request attends in a call of its own.

    Raises:
        LayoutError: The model's cache is not keys and values of every token, or its attention does
            not work over blocks.
        ConfigError: `max_context` is above the model's own limit.
    """

    def __init__(self, model: PreTrainedModel, block_size: int, max_context: int = 0) -> None:
        if not model.is_backend_compatible():
            raise LayoutError(
                f"{type(model).__name__} has attention code of its own, and the engine "
                "transformers needs models that use transformers' AttentionInterface: use "
                "another model"
            )
        check_model(model, remedy=_REMEDY)
        like = states_of_one_token(model, remedy=_REMEDY)
        self.layout: Layout = layout_of(like, block_size)
        self.device = model.device
        self.speeds = list(speeds(model))
        self.config = model.config.get_text_config(decoder=True)
        own = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        if max_context > own:
            raise ConfigError(
                f"transformers.max_context is {max_context}, and the model takes {own}: lower it"
            )
        self.max_positions = max_context or own
        self.end_tokens = _end_tokens(model)
        self._model = model
        self._shapes = [(one.shape[1], one.shape[3]) for one in like]
        self._dtype = like[0].dtype
        parameters = inspect.signature(model.forward).parameters
        self._cache = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self.content = content_of(model)
        self._returns_all = True
        # One padded call for all requests is faster on a GPU. On a CPU a call for each request is
        # as fast, and its results are those of the request alone.
        self.pads = self.device.type == "cuda"
        self._probe()

    @cached_property
    def vocab_size(self) -> int:
        size: int = self._model.get_output_embeddings().weight.shape[0]
        return size

    def fingerprint(self, tenant: str) -> Fingerprint:
        """Return the identity of the model's KV: equal fingerprints share cached blocks.

        The adapter `TierKVCache` makes the same fingerprint for the same model.

        Args:
            tenant: Name of the owner of the blocks; other tenants do not find them.
        """
        return Fingerprint(
            f"{type(self._model).__name__} of {FORMAT}",
            self.layout,
            revision=self.content,
            weight_dtype=str(self._model.dtype).removeprefix("torch."),
            tenant=tenant,
        )

    def pages(self, planes: Sequence[torch.Tensor]) -> Pages:
        """Return a view of the device planes for `forward`.

        Args:
            planes: uint8 [num_blocks, block_bytes] each: the layers' keys and values, in the
                layout's order.
        """
        pages = Pages(planes, self.layout, self._shapes, self._dtype)
        pages.returns_all = self._returns_all
        return pages

    def forward(
        self, pages: Pages, runs: Sequence[TokenRun], before_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """Run one forward pass: write the KV of all given tokens, and return the wanted logits.

        Args:
            pages: The planes that are written and read.
            runs: The tokens of each request; no two requests write to the same block.
            before_layer: Called with the number of each layer before the layer's planes are used.
                If it raises, the error passes to the caller, and only the earlier layers are
                written.

        Returns:
            [number of runs that want logits, vocab_size].
        """
        with torch.inference_mode():
            step = PagedStep(
                runs, self.layout.block_size, self.device, before_layer, pads=self.pads
            )
            pages.step = step
            named: dict[str, Any] = {self._cache: pages.cache, "pages": pages}
            if self._keeps_logits:
                named["logits_to_keep"] = step.wanted
            try:
                found = self._model(
                    input_ids=step.ids, position_ids=step.positions, use_cache=True, **named
                )
            finally:
                pages.step = None
            logits: torch.Tensor = found.logits[0]
            return logits if self._keeps_logits else logits[step.wanted]

    def _probe(self) -> None:
        """Switch the model to attention over blocks, and check that its logits stay the same.

        Raise LayoutError if they differ, or if the model cannot use this attention.
        """
        size = min(self.vocab_size, 1 << 16)
        tokens = np.random.default_rng(0).integers(0, size, _PROBE_TOKENS).astype(np.int32)
        with torch.inference_mode():
            ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)[None]
            expected = self._model(input_ids=ids, use_cache=False).logits[0, -1]
        self._model.set_attn_implementation(ATTENTION)
        num_blocks = -(-_PROBE_TOKENS // self.layout.block_size)
        planes = [
            torch.zeros(num_blocks, plane.block_bytes, dtype=torch.uint8, device=self.device)
            for plane in self.layout.planes
        ]
        table = np.arange(num_blocks)[::-1]
        pages = self.pages(planes)
        first = TokenRun(tokens[:_PROBE_CUT], 0, table, wants_logits=False)
        rest = TokenRun(tokens[_PROBE_CUT:], _PROBE_CUT, table)
        try:
            self.forward(pages, [first], lambda _: None)
            logits = self.forward(pages, [rest], lambda _: None)
        except TierKVError:
            raise
        except Exception as error:
            raise LayoutError(
                f"the model's attention cannot be served: use another model ({error})"
            ) from error
        most = max(_ROUNDING * torch.finfo(logits.dtype).eps, _MIN_ROUNDING)
        if not bool((logits[0] - expected).norm() <= most * expected.norm()):
            raise LayoutError(
                "the model cannot be served, since its attention over blocks gives other "
                "logits than its own attention: use another model"
            )
        self._returns_all = not pages.reads_planes


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    for config in (model.generation_config, model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
