"""Either side of a connector whose engine is not covered: nothing is looked up, loaded or stored.

Owns: the answers that vLLM expects. Does not own: the reason, which the connector logs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

_ANSWERS: Final[dict[str, Callable[[], Any]]] = {
    "get_num_new_matched_tokens": lambda: (0, False),
    "get_external_cache_hit_sources": dict,
    "build_connector_meta": lambda: OffloadingConnectorMetadata(load_jobs={}, store_jobs={}),
    "has_pending_push_work": lambda: False,
    "request_finished": lambda: (False, None),
    "take_events": tuple,
    "get_finished": lambda: (set(), set()),
}
"""The answers other than None."""


class Idle:
    """Replaces vLLM's OffloadingConnectorScheduler, or its OffloadingConnectorWorker."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        answer = _ANSWERS.get(name)
        return lambda *args, **kwargs: answer() if answer is not None else None
