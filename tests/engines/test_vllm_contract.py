"""The adapter against the source of vLLM's interfaces, read and not run: no GPU, no import.

Looks at vLLM where it is installed, and at unpacked wheels that VLLM_SOURCES names (directories
that hold `vllm/`, separated by colons), such as the newest official one:

    pip download --no-deps vllm && unzip -d newest vllm-*.whl '*.py' && VLLM_SOURCES=$PWD/newest ...
"""

from __future__ import annotations

import ast
import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
# What the adapter reads: of each class its attributes, properties and methods.
USED = {
    ("v1/request.py", "Request"): [
        "request_id", "prompt_token_ids", "prompt_embeds", "all_token_ids", "output_token_ids",
        "num_tokens", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "resumable",
        "mm_features", "lora_request", "cache_salt", "kv_transfer_params", "block_hashes",
        "skip_reading_prefix_cache", "session_id", "kv_hints",
    ],
    ("v1/kv_hints/protocol.py", "KvHintsEnvelope"): ["protocol_version", "actions"],
    ("v1/kv_hints/protocol.py", "KvHintAction"): ["action_type", "action_version"],
    ("v1/core/sched/output.py", "SchedulerOutput"): [
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids",
        "kv_connector_block_state", "total_num_scheduled_tokens", "kv_cache_block_copies",
    ],
    ("v1/core/sched/output.py", "CachedRequestData"): ["resumed_req_ids", "new_block_ids"],
    ("v1/core/sched/output.py", "NewRequestData"): ["req_id", "block_ids", "num_computed_tokens"],
    ("v1/core/sched/output.py", "KVConnectorBlockState"): [
        "get_block_ids", "boundary_state_offloads",
    ],
    ("v1/core/kv_cache_utils.py", "KVCacheBlockCopy"): ["dst_block_id"],
    ("v1/core/kv_cache_manager.py", "KVCacheBlocks"): ["get_block_ids"],
    ("v1/outputs.py", "KVConnectorOutput"): ["finished_recving", "kv_connector_worker_meta"],
    ("v1/kv_cache_interface.py", "KVCacheConfig"): [
        "num_blocks", "kv_cache_groups", "hash_block_size", "kv_tp_replicas",
    ],
    ("v1/kv_cache_interface.py", "KVCacheGroupSpec"): [
        "layer_names", "kv_cache_spec", "enable_kv_transfer",
    ],
    ("v1/kv_cache_interface.py", "SlidingWindowSpec"): ["sliding_window"],
    ("v1/kv_cache_interface.py", "ChunkedLocalAttentionSpec"): ["attention_chunk_size"],
    ("v1/kv_cache_interface.py", "AttentionSpec"): ["tokens_per_state"],
    ("v1/kv_cache_interface.py", "KVCacheSpec"): ["prefix_cacheable"],
    ("v1/kv_cache_interface.py", "UniformTypeKVCacheSpecs"): ["kv_cache_specs"],
    ("v1/kv_cache_interface.py", "MambaSpec"): [
        "shapes", "dtypes", "mamba_cache_mode", "tokens_per_state",
    ],
    ("config/speculative.py", "SpeculativeConfig"): [
        "num_speculative_tokens", "use_eagle_block_drop",
    ],
    ("v1/kv_cache_interface.py", "FullAttentionSpec"): [
        "num_kv_heads", "kv_quant_mode", "block_size",
    ],
    (_BASE, "KVConnectorTransferResults"): [
        "finished_sending", "finished_recving", "failed_recving",
    ],
    ("distributed/kv_events.py", "BlockStored"): [
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "group_idx", "session_id",
    ],
    ("distributed/kv_events.py", "BlockRemoved"): ["block_hashes", "medium", "group_idx"],
    ("multimodal/inputs.py", "MultiModalFeatureSpec"): ["identifier", "mm_position"],
    ("multimodal/inputs.py", "PlaceholderRange"): ["offset", "length"],
    ("lora/request.py", "LoRARequest"): ["lora_name", "lora_path"],
    ("config/scheduler.py", "SchedulerConfig"): ["max_num_batched_tokens"],
    ("config/kv_transfer.py", "KVTransferConfig"): [
        "engine_id", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config",
        "is_kv_producer", "is_kv_consumer",
    ],
    ("distributed/kv_transfer/kv_connector/v1/metrics.py", "KVConnectorStats"): [
        "aggregate", "reduce", "is_empty", "reset",
    ],
}  # fmt: skip
FUNCTIONS = {
    "v1/core/kv_cache_utils.py": "maybe_convert_block_hash",
    "v1/kv_cache_interface.py": "get_kv_cache_spec_kind",
    "v1/metrics/utils.py": "create_metric_per_engine",
    "lora/utils.py": "get_adapter_absolute_path",
    "distributed/parallel_state.py": "get_tensor_model_parallel_rank",
}


def sources() -> list[Path]:
    found = [Path(one, "vllm") for one in os.environ.get("VLLM_SOURCES", "").split(":") if one]
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parent)
    return found


if not sources():
    pytest.skip("there is no source of vLLM to look at", allow_module_level=True)

pytestmark = [pytest.mark.parametrize("source", sources(), ids=lambda path: path.parent.name)]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def class_of(path: Path, name: str) -> ast.ClassDef:
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    pytest.fail(f"{path} has no class {name}")


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args)]


def members(path: Path, node: ast.ClassDef) -> set[str]:
    """Names of methods, properties and attributes, those of bases in the same file included."""
    names = set(methods(node))
    for one in ast.walk(node):
        if isinstance(one, ast.AnnAssign | ast.Assign):
            targets = [one.target] if isinstance(one, ast.AnnAssign) else one.targets
            for target in targets:
                if isinstance(target, ast.Name):
                    names.add(target.id)
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    names.add(target.attr)
    for base in node.bases:
        above = ast.unparse(base)
        if any(isinstance(one, ast.ClassDef) and one.name == above for one in tree(path).body):
            names |= members(path, class_of(path, above))
    return names


OURS = {
    "TierKVConnector": ("vllm_connector.py", _BASE, ["KVConnectorBase_V1", "SupportsHMA"]),
    "TierKVTier": ("vllm.py", "v1/kv_offload/tiering/base.py", ["SecondaryTierManager"]),
}


@pytest.mark.promise("The connector has every method of vLLM's interface.")
@pytest.mark.parametrize("name", OURS)
def test_every_method_takes_what_vllm_gives_and_none_is_left_out(source: Path, name: str) -> None:
    file, base, classes = OURS[name]
    own = methods(class_of(_ROOT / "tierkv" / "adapters" / file, name))
    theirs: dict[str, ast.FunctionDef] = {}
    for one in classes:
        theirs |= methods(class_of(source / base, one))
    ours = {m: one for m, one in own.items() if m == "__init__" or m[0] != "_"}
    strange = ours.keys() - theirs.keys() - {"scheduler", "worker"}
    assert strange == set(), "vLLM calls no such method"
    for method in ours.keys() & theirs.keys():
        assert parameters(ours[method]) == parameters(theirs[method]), method
    abstract = {
        method
        for method, function in theirs.items()
        if any(ast.unparse(one) == "abstractmethod" for one in function.decorator_list)
    }
    assert abstract <= ours.keys(), "left out"


def test_what_the_adapter_reads_is_there(source: Path) -> None:
    missing = []
    for (file, name), wanted in USED.items():
        path = source / file
        there = members(path, class_of(path, name))
        missing += [f"{name}.{one}" for one in wanted if one not in there]
    for file, function in FUNCTIONS.items():
        names = {one.name for one in tree(source / file).body if isinstance(one, ast.FunctionDef)}
        if function not in names:
            missing.append(function)
    assert missing == []


def test_the_kinds_of_groups_are_vllms(source: Path) -> None:
    path = source / "v1" / "kv_cache_interface.py"
    kinds = {
        one.value.value
        for one in class_of(path, "KVCacheSpecKind").body
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)
    }
    adapter = tree(_ROOT / "tierkv" / "adapters" / "vllm_connector.py")
    [known] = [
        one.value
        for one in adapter.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "_KINDS"
    ]
    assert isinstance(known, ast.Dict)
    assert {ast.literal_eval(key) for key in known.keys if key is not None} <= kinds
