"""vLLM's server as a neighbour: it is put to sleep at level 1, which copies its weights to the host's memory.

Owns: the endpoints /is_sleeping, /metrics and /sleep. It does not wake the server: waking it while its memory is taken
would end it.

The endpoints need VLLM_SERVER_DEV_MODE=1, and a server that was started with --enable-sleep-mode.
"""

from __future__ import annotations

from math import inf, nan
from typing import Final

from msgspec import Struct

from .http import Http, NeighbourFailed

_NOT_FOUND: Final = 404
_COUNTED: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class Sleeping(Struct):
    """The answer of /is_sleeping."""

    is_sleeping: bool


class VllmServer:
    """A server of vLLM as a Neighbour."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def busy(self) -> str:
        """As in Neighbour, by the requests that its metrics count as running or waiting."""
        try:
            if self._http.get_as("/is_sleeping", Sleeping).is_sleeping:
                return "it sleeps already"
        except NeighbourFailed as failed:
            if failed.status != _NOT_FOUND:
                raise
            raise NeighbourFailed(
                "it has no /is_sleeping: start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode", failed.status
            ) from None
        requests = _counted(self._http.get("/metrics").decode(errors="replace"))
        if requests == 1:
            return "1 request runs or waits"
        return f"{requests:g} requests run or wait" if requests else ""

    def free(self) -> str:
        """As in Neighbour."""
        self._http.post("/sleep?level=1")
        return ""


def _counted(metrics: str) -> float:
    """The sum of the counts of requests of all its engines. Raises NeighbourFailed if one is not there."""
    # Imported here, as in web/metrics_server.py: prometheus_client also imports an HTTP server.
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[float]] = {name: [] for name in _COUNTED}
    for line in metrics.splitlines():
        if line.startswith(_COUNTED):
            try:
                samples = [each for family in text_string_to_metric_families(line) for each in family.samples]
            except ValueError:
                samples = []
            for name, count in [(each.name, each.value) for each in samples] or [(_COUNTED[0], nan)]:
                if name not in found:
                    continue
                if not 0 <= count < inf:
                    raise NeighbourFailed(f"/metrics has {line!r}, which is no count")
                found[name].append(count)
    for name, counts in found.items():
        # Each engine has a line of each name.
        if len(counts) < max(1, *map(len, found.values())):
            raise NeighbourFailed(f"/metrics lacks {name}, so whether it is idle is unknown")
    return sum(map(sum, found.values()))
