"""The cost of the connector's calls in vLLM's scheduler step: `.venv-peers/bin/python benchmarks/vllm_connector.py`.

vLLM's own Request and SchedulerOutput, a real daemon, no engine. One JSON row an operation: {"op", "median_us"}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm.v1.core.sched.output import SchedulerOutput

from tests.daemon_process import Daemon, until
from tests.vllm.step_bench import Steps, answers, feature, item, request

ROUNDS = 20_000


def measured(op: str, call: Callable[[], object]) -> None:
    """Prints the median over single calls."""
    took = []
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - started)
    print(json.dumps({"op": op, "median_us": round(statistics.median(took) / 1e3, 2)}), flush=True)


def main() -> None:
    with Daemon() as daemon, Steps(daemon.start().socket) as engine:
        connector, worker = engine.connector, engine.workers[0]
        nothing = SchedulerOutput.make_empty()
        nothing.total_num_scheduled_tokens = 1
        for pictures in (1, 8):
            asked = request(*(feature(item(n), f"p{n}", 1 + n * 17) for n in range(pictures)))
            answers([engine], engine.add(asked))
            ensure = partial(connector.ensure_cache_available, asked, asked.num_computed_tokens)
            measured(f"ensure, decode, {pictures} picture(s)", ensure)
            engine.finish(asked)
            # A new request whose prompt has all its keys and values cached.
            measured(f"ensure, prompt cached, {pictures} picture(s)", ensure)
        waiting = engine.add(request(100))
        until(lambda: connector.ensure_cache_available(waiting, 0), "an answer")
        measured("ensure, settled and not yet scheduled", lambda: connector.ensure_cache_available(waiting, 0))
        measured("has_cache_item", lambda: connector.has_cache_item("picture-100"))
        measured("build_connector_meta, nothing to do", lambda: connector.build_connector_meta(nothing))
        metadata = connector.build_connector_meta(nothing)

        def step_of_worker() -> None:
            worker.bind_connector_metadata(metadata)
            worker.start_save_caches(encoder_cache={})
            worker.start_load_caches({})
            worker.get_finished(set())
            worker.build_connector_worker_meta()
            worker.clear_connector_metadata()

        measured("a worker's step, nothing to do", step_of_worker)
        measured("stats, nothing counted", connector.get_ec_connector_stats)


if __name__ == "__main__":
    main()
