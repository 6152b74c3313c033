"""ComfyUI as a neighbour: its models are unloaded, and its cache is dropped. It loads them for the next prompt.

Owns: the endpoints /queue and /free. ComfyUI frees after it has answered.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from .http import Http, NeighbourBusy


class ComfyQueue(Struct):
    """The answer of /queue."""

    queue_running: list[Any]
    queue_pending: list[Any]


def free_comfyui(http: Http) -> str:
    """As `registry.Free`."""
    queue = http.get_as("/queue", ComfyQueue)
    prompts = len(queue.queue_running) + len(queue.queue_pending)
    if prompts:
        raise NeighbourBusy(f"{prompts} prompts run or wait" if prompts > 1 else "1 prompt runs or waits")
    http.post("/free", {"unload_models": True, "free_memory": True})
    return ""
