"""vLLM's engine in a process of its own, driven step by step as its own loop does it.

python connector_process.py MODEL KV_TRANSFER_CONFIG_JSON ENGINE_ARGUMENTS_JSON. A command per line
in, an answer per line out, as JSON; see `Driver`. Scheduler and worker are in this process, so that
blocks can be counted and read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from tests.engines.processes import serve, take_stdout
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import BlockCopy, Direction
from tierkv.ranks.link import Plan

PATIENCE_S = 120.0
# Several at once; kernels for one token and for many round bfloat16 differently there.
ON_GPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20, "dtype": "float32"}


class Faults:
    """The `before_copy` of the worker's device: copies that take long, and copies that fail."""

    def __init__(self) -> None:
        self.fail_loads = 0
        self.fail_saves = 0
        self.slow_s = 0.0

    def __call__(self, copy: BlockCopy) -> None:
        time.sleep(self.slow_s)
        is_load = copy.direction is Direction.LOAD
        if is_load and self.fail_loads:
            self.fail_loads -= 1
            raise OSError("this load was to fail")
        if not is_load and self.fail_saves:
            self.fail_saves -= 1
            raise OSError("this save was to fail")


class Driver:
    """Its public methods are the commands; their arguments are the command's other fields."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, more: dict[str, Any]) -> None:
        is_alone = more.pop("is_core_alone", False)  # the core in a process of its own, or in this
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(is_alone))
        from vllm import EngineArgs
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.v1.engine.llm_engine import LLMEngine

        self.copies = Faults()
        self.is_on_gpu = torch.cuda.is_available()
        if transfer and self.is_on_gpu:
            from tierkv.gpu import cuda_device

            device = partial(cuda_device.CudaDevice, before_copy=self.copies)
            vars(cuda_device)["CudaDevice"] = device
        elif transfer:
            from tierkv.adapters import vllm_connector

            vars(vllm_connector)["CpuDevice"] = lambda: CpuDevice(before_copy=self.copies)
        settings: dict[str, Any] = {
            "max_model_len": 512,
            "max_num_seqs": 8,
            "block_size": 32,
            "num_gpu_blocks_override": 256,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "disable_log_stats": True,
        } | (ON_GPU if self.is_on_gpu else {})
        if more.pop("splits_prefills", False):
            self._split_prefills()
        events = None
        if more.pop("events", False):
            events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        arguments = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            kv_events_config=events,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **(settings | more),
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.told: Counter[str] = Counter()
        self.events_told: list[dict[str, Any]] = []
        # preemptions; asked_again: lookups that had no answer yet; copied: blocks given to saves;
        # stale: those that were saved with other bytes than they had
        self.seen: Counter[str] = Counter()
        if is_alone:
            self.has_requests = self.engine.has_unfinished_requests
            return
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.has_requests = self.scheduler.has_requests
        self.connector = self.scheduler.connector
        if transfer and transfer["kv_connector"] == "TierKVConnector":
            self._listen()

    def _split_prefills(self) -> None:
        """End a Mamba2 prefill's step where its state is kept.

        vLLM's scan on a processor returns no states from within a step, which Mamba2 asks it for.
        """
        from vllm.model_executor.layers.mamba.abstract import MambaBase
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

        MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec

    def _listen(self) -> None:
        """To what the connector tells, to preemptions, and to what is saved."""

        def hear(owner: Any, name: str, tell: Callable[[Any], None]) -> None:
            call = getattr(owner, name)

            def called(*given: Any, **more: Any) -> Any:
                answer = call(*given, **more)
                tell(answer)
                return answer

            setattr(owner, name, called)

        def hear_stats(stats: Any) -> None:
            self.told.update(stats.data if stats else {})

        # Nothing public counts preemptions.
        hear(self.scheduler, "_preempt_request", lambda _: self.seen.update(preemptions=1))
        hear(self.connector, "get_kv_connector_stats", hear_stats)
        hear(
            self.connector,
            "get_num_new_matched_tokens",
            lambda answer: self.seen.update(asked_again=answer[0] is None),
        )
        take_events = self.connector.take_events

        def events() -> Any:
            for event in take_events():
                names = [self._name(one) for one in event.block_hashes]
                kind = type(event).__name__
                told = {"kind": kind, "medium": event.medium, "names": names}
                if kind == "BlockStored":
                    told["tokens"] = event.token_ids
                    told["session"] = event.session_id
                    told["parent"] = event.parent_block_hash and self._name(event.parent_block_hash)
                self.events_told.append(told)
                yield event

        self.connector.take_events = events
        self._watch_saves()

    def _watch_saves(self) -> None:
        """Compare what is on the host when a save is over with what the blocks held when the step
        that filled them had ended."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return  # the workers are other processes
        planes = get_kv_transfer_group().worker.planes
        start, finished = planes.start_saves, planes.finished
        arrays = [one.arrays for one in planes._planes]  # noqa: SLF001 - a test's look inside
        hosts = self.connector.scheduler.cache._host.slots  # noqa: SLF001
        expected: dict[int, list[tuple[int, int, bytes]]] = {}

        def started(plan: Plan, *after: Any) -> None:
            if self.is_on_gpu:
                torch.cuda.synchronize()  # CuPy reads on a stream of its own
            expected[plan.number] = [
                (group, slot, b"".join(plane[block].tobytes() for plane in arrays[group]))
                for group, blocks, slots in plan.parts()
                for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True)
            ]
            self.seen["copied"] += len(expected[plan.number])
            start(plan, *after)

        def over() -> Any:
            reports = finished()
            for report in reports:
                for group, slot, right in expected.pop(report.number, ()):
                    is_stale = hosts[group].array[slot].tobytes() != right
                    self.seen["stale"] += report.problem is None and is_stale
            return reports

        planes.start_saves, planes.finished = started, over

    def groups(self) -> list[str]:
        return [group.kind.value for group in self.connector.scheduler.cache.groups]

    def num(self, of: str) -> int:
        return self.seen[of]

    def generate(
        self, requests: list[dict[str, Any]], aborts: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Tokens, greedy ones unless a request says otherwise, tokens from a cache, and
        kv_transfer_params of each request. aborts: after so many steps this request is aborted."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.kv_hints import KvHintsEnvelope

        for request in requests:
            params = request.get("params")
            sampling = SamplingParams(
                temperature=request.get("temperature", 0.0),
                seed=request.get("seed"),
                max_tokens=request.get("max_tokens", 12),
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
            if request.get("salt"):
                prompt["cache_salt"] = request["salt"]
            adapter = LoRARequest(*request["lora"]) if request.get("lora") else None
            hints = request.get("hints")
            self.engine.add_request(
                request["id"],
                prompt,
                sampling,
                lora_request=adapter,
                session_id=request.get("session"),
                kv_hints=msgspec.convert(hints, KvHintsEnvelope) if hints else None,
            )
        answers: dict[str, Any] = {}
        left = dict(aborts or {})
        steps = 0
        deadline = time.monotonic() + PATIENCE_S
        while self.has_requests():
            for name in [name for name, at in left.items() if at <= steps]:
                self.engine.abort_request([name])
                del left[name]
            outputs = self.engine.step()
            steps += 1
            for output in outputs:
                if output.finished:
                    answers[output.request_id] = {
                        "tokens": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                        "params": output.kv_transfer_params,
                        "reason": output.outputs[0].finish_reason,
                    }
            if not outputs:
                time.sleep(0.001)
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {steps} steps: {sorted(answers)} alone are over")
        return {"answers": answers, "steps": steps}

    def blocks(self, tokens: list[int]) -> list[str | None]:
        """For each full block of a prompt that vLLM has in its own cache, a digest of its bytes."""
        pool = self.scheduler.kv_cache_manager.block_pool
        layers = self.core.vllm_config.compilation_config.static_forward_context
        found: list[str | None] = []
        for key in self._hashes(tokens):
            block = pool.get_cached_block(key, [0])
            if not block:
                found.append(None)
                continue
            digest = hashlib.sha256()
            for name in sorted(layers):
                content = layers[name].kv_cache[block[0].block_id].contiguous().cpu()
                digest.update(content.view(-1).view(dtype=torch.uint8).numpy().tobytes())
            found.append(digest.hexdigest())
        return found

    def _hashes(self, tokens: list[int]) -> list[Any]:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request("look", tokens, SamplingParams(), None,
                          block_hasher=self.core.request_block_hasher)  # fmt: skip
        return list(request.block_hashes)

    def forget(self) -> bool:
        """vLLM forgets its own cache, and tierkv keeps its."""
        return bool(self.scheduler.reset_prefix_cache())

    def drop(self) -> int:
        """tierkv forgets what it has on the host, and vLLM its own cache."""
        self.scheduler.reset_prefix_cache()
        return int(self.connector.scheduler.cache.reset().wait(PATIENCE_S))

    def faults(self, **fields: float) -> None:
        for name, value in fields.items():
            assert hasattr(self.copies, name)
            setattr(self.copies, name, value)

    def expire_promises(self, times: int) -> None:
        """What the next lookups promise is given back just before it is loaded."""
        cache = self.connector.scheduler.cache
        left = itertools.repeat(None, times)

        def load(name: str, *rest: Any) -> Any:
            for _ in left:
                cache.release(name)
                break
            return type(cache).load(cache, name, *rest)

        cache.load = load

    def ignore_fences(self) -> None:
        """The worker overwrites blocks that are still being saved."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().worker.before_step = lambda _: None

    def events(self) -> list[dict[str, Any]]:
        """Those that the connector has told since the last time."""
        told, self.events_told = self.events_told, []
        return told

    def hashes(self, tokens: list[int]) -> list[str]:
        """What vLLM calls the full blocks of a prompt in its events."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        return [self._name(maybe_convert_block_hash(key)) for key in self._hashes(tokens)]

    def _name(self, key: Any) -> str:
        return key.hex() if isinstance(key, bytes) else str(key)

    def counts(self) -> dict[str, int]:
        """What the connector has told vLLM's statistics."""
        return dict(self.told)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters, as Prometheus has them."""
        found = self.engine.get_metrics()
        return {one.name: one.value for one in found if hasattr(one, "value")}

    def reset(self) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_connector=True))

    def at_rest(self) -> dict[str, Any]:
        """What is wrong when nothing runs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        found: list[str] = []
        if self.connector is not None:
            cache = self.connector.scheduler.cache
            deadline = time.monotonic() + PATIENCE_S
            while True:
                found = cache.verify().wait(PATIENCE_S)
                if not found or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        return {"taken": taken, "requests": len(self.scheduler.requests), "findings": found}


def main() -> None:
    answers = take_stdout()
    model, transfer, more = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    driver = Driver(model, transfer, more)
    serve(answers, lambda command: getattr(driver, command.pop("do"))(**command))
    driver.engine.engine_core.shutdown(30.0)  # after 5 s vLLM would kill its core


if __name__ == "__main__":
    main()
