"""A KV connector for vLLM that does nothing, to measure vLLM's own part of a connector's cost."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class IdleConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM has no types here
    """Finds nothing and saves nothing."""

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...  # noqa: ANN401

    def wait_for_layer_load(self, *_: Any) -> None: ...  # noqa: ANN401

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...  # noqa: ANN401

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:  # noqa: ANN401
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None: ...  # noqa: ANN401

    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:  # noqa: ANN401
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:  # noqa: ANN401
        return False, None
