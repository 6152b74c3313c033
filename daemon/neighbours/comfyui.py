"""ComfyUI as a neighbour: its models are unloaded, and its cache is dropped. It loads them for the next prompt.

Owns: the endpoints /queue and /free. ComfyUI frees after it has answered.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from .http import Http


class ComfyQueue(Struct):
    """The answer of /queue."""

    queue_running: list[Any]
    queue_pending: list[Any]


class ComfyServer:
    """ComfyUI as a Neighbour."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def busy(self) -> str:
        """As in Neighbour, by its queue of prompts."""
        queue = self._http.get_as("/queue", ComfyQueue)
        prompts = len(queue.queue_running) + len(queue.queue_pending)
        if prompts == 1:
            return "1 prompt runs or waits"
        return f"{prompts} prompts run or wait" if prompts else ""

    def free(self) -> str:
        """As in Neighbour."""
        self._http.post("/free", {"unload_models": True, "free_memory": True})
        return ""
