"""The sides of a connector whose engine is not covered: nothing is looked up, loaded or stored.

Owns: the answers that vLLM expects. Does not own: the reason, which the connector logs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata


class IdleScheduler:
    """Replaces vLLM's OffloadingConnectorScheduler."""

    def on_new_request(self, request: Any) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int, bool]:
        return 0, False

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata:
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={})

    def has_pending_push_work(self) -> bool:
        return False

    def update_connector_output(self, connector_output: Any) -> None:
        pass

    def request_finished(self, request: Any) -> tuple[bool, None]:
        return False, None

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> None:
        pass

    def get_stats(self) -> None:
        return None

    def shutdown(self) -> None:
        pass


class IdleWorker:
    """Replaces vLLM's OffloadingConnectorWorker."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        pass

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        pass

    def start_kv_transfers(self, metadata: Any) -> None:
        pass

    def prepare_store_kv(self, metadata: Any) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return set(), set()

    def build_connector_worker_meta(self) -> None:
        return None

    def shutdown(self) -> None:
        pass
