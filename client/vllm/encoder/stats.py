"""The connector's counters, in the form that vLLM collects: a sum for each step, logged at vLLM's interval and exported
to Prometheus.

Owns: the counters' names and texts. Does not own: when they are counted. Invariants: each amount is reported once.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS: Final = {
    "hits": "Encoder inputs taken from tensord instead of being encoded.",
    "misses": "Encoder inputs that this engine encoded.",
    "waits": "Requests deferred because another engine was encoding one of their inputs.",
    "wait_timeouts": "Requests that waited for another engine too long, and encoded the input themselves.",
    "overtaken": "Requests that did not wait for another engine, since this engine would finish sooner.",
    "canaries": "Hits that were encoded anyway and compared.",
    "canary_failures": "Hits that differed from this engine's own output: sharing ended. Must stay 0.",
    "mismatches": "Stored outputs whose rows, width or dtype differ from those that the request expects.",
    "unshared": "Encoder inputs that have no name to share them by.",
    "late": "Encoder inputs not looked up because the connector's thread was busy.",
    "loads": "Encoder outputs copied into a worker.",
    "load_bytes": "Bytes of encoder outputs copied into a worker.",
    "inline": "Encoder outputs sent to workers by value, because one had not mapped the ring yet.",
    "load_failures": "Loads that failed; their requests were ended with an error.",
    "saves": "Encoder outputs stored.",
    "save_bytes": "Bytes of encoder outputs stored.",
    "refused": "Encoder outputs that the daemon did not store.",
    "dropped": "Encoder outputs not stored because too many were in flight.",
    "errors": "Errors in the connector's threads; the log has the first of each kind.",
}

CONNECTED: Final = "connected"
_CONNECTED_TEXT: Final = "1 while the engine is connected to a daemon that answers, as of the engine's last step."


class TensordECStats(ECConnectorStats):  # type: ignore[misc, unused-ignore]
    """Sums by the names of COUNTERS, and the last value of CONNECTED."""

    data: dict[str, int | float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = amount if name == CONNECTED else self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        # vLLM drops empty stats. A lost connection must be reported, so stats with CONNECTED are not empty.
        return CONNECTED not in self.data and not any(self.data.values())


class TensordPromMetrics(ECConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """The metrics `vllm:ec_tensord_NAME` of each engine: a counter for each name in COUNTERS, and the gauge
    CONNECTED."""

    def __init__(self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], engines: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, engines)

        def made(kind: Any, name: str, text: str, **more: Any) -> Any:
            metric = kind(name=f"vllm:ec_tensord_{name}", documentation=text, labelnames=labelnames, **more)
            return create_metric_per_engine(metric, engines)

        self._counters = {name: made(self._counter_cls, name, text) for name, text in COUNTERS.items()}
        self._connected = made(self._gauge_cls, CONNECTED, _CONNECTED_TEXT, multiprocess_mode="mostrecent")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if name == CONNECTED:
                self._connected[engine_idx].set(amount)
            elif amount and name in self._counters:
                self._counters[name][engine_idx].inc(amount)
