"""Lines in vLLM's log when the daemon comes and goes, and the names of engines among the daemon's clients.

Owns: those lines and names. Does not own: the warnings that the daemon was never there or does not answer
(client/link/absence.py).
"""

from __future__ import annotations

import logging
from typing import Any, Final

from ...core.client import Client
from ...link.answers import Connected, ListenerMessage

ATTACH_S: Final = 0.4
"""Seconds that making a client may delay an engine's start, at most twice. After that it attaches in the background."""

_log = logging.getLogger("tensord")


def client_name(vllm_config: Any, part: str) -> str:
    """The name of a part of an engine in `tensorctl clients`, for example "vllm-1a2b3 worker 0"."""
    return f"vllm-{vllm_config.instance_id} {part}"[:128]


def engine_client_name(vllm_config: Any, part: str) -> str:
    """`client_name` of the scheduler's or a worker's client. Both share one client if they run in one process."""
    one_process = vllm_config.parallel_config.distributed_executor_backend == "uni"
    return client_name(vllm_config, "engine" if one_process else part)


def does(stores: bool, finds: bool) -> str:
    """What an engine does with shared tensors, for its log."""
    return " and ".join([*["found"] * finds, *["stored"] * stores])


class Presence:
    """Logs each connection of a client, and its end. Keep it for as long as the client."""

    def __init__(self, client: Client) -> None:
        self._link = client.link
        self._link.listeners.add(self)

    def attached(self, connected: Connected) -> None:
        link = self._link
        _log.info(
            "tensord: connected to the daemon at %s (instance %s, version %s) as %r",
            *(link.path, link.instance, link.version, link.name),
        )

    def detached(self) -> None:
        if not self._link.closed:
            _log.warning(
                "tensord: the daemon at %s is away. Until it is back, this process computes by itself", self._link.path
            )

    def received(self, message: ListenerMessage, connected: Connected) -> None:
        pass

    def forked(self) -> None:
        pass
