"""vLLM's server as a neighbour: it is put to sleep at level 1, which copies its weights to the host's memory.

Owns: the endpoints /is_sleeping, /metrics and /sleep. It does not wake the server: waking it while its memory is taken
would end it.

The endpoints need VLLM_SERVER_DEV_MODE=1, and a server that was started with --enable-sleep-mode.
"""

from __future__ import annotations

import re
from math import inf
from typing import Final

from msgspec import Struct

from .http import Http, NeighbourBusy, NeighbourFailed

_NOT_FOUND: Final = 404
_COUNT: Final = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{.*\})? (\S+)", re.MULTILINE)


class Sleeping(Struct):
    """The answer of /is_sleeping."""

    is_sleeping: bool


def free_vllm(http: Http) -> str:
    """As `registry.Free`. It is busy by the requests that its metrics count as running or waiting."""
    try:
        if http.get_as("/is_sleeping", Sleeping).is_sleeping:
            raise NeighbourBusy("it sleeps already")
    except NeighbourFailed as failed:
        if failed.status != _NOT_FOUND:
            raise
        raise NeighbourFailed(
            "it has no /is_sleeping: start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode", failed.status
        ) from None
    requests = _counted(http.get("/metrics").decode(errors="replace"))
    if requests:
        raise NeighbourBusy(f"{requests:g} requests run or wait" if requests > 1 else "1 request runs or waits")
    http.post("/sleep?level=1")
    return ""


def _counted(metrics: str) -> float:
    """The sum of the counts of requests of all its engines. Raises NeighbourFailed if one is not there."""
    found: dict[str, list[float]] = {"running": [], "waiting": []}
    for name, count in _COUNT.findall(metrics):
        found[name].append(float(count))
    running, waiting = found.values()
    # Each engine has a line of each name.
    if not len(running) == len(waiting) > 0 or not all(0 <= count < inf for count in running + waiting):
        raise NeighbourFailed("/metrics does not count running and waiting requests: whether it is idle is unknown")
    return sum(running + waiting)
