"""The servers that can be asked for their card's memory: ComfyUI, Ollama and vLLM, a function each.

A function has the server give the memory of its card back, if it is idle. What was freed, and when, only the card's
gauge shows. It raises NeighbourBusy, or NeighbourFailed.
"""

from __future__ import annotations

import re
from math import inf
from typing import Any, Final

from msgspec import Struct

from .http import Http, NeighbourBusy, NeighbourFailed

_NOT_FOUND: Final = 404
_COUNT: Final = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{.*\})? (\S+)", re.MULTILINE)


class ComfyQueue(Struct):
    """The answer of ComfyUI's /queue."""

    queue_running: list[Any]
    queue_pending: list[Any]


class OllamaModel(Struct):
    """A loaded model. `size_vram`: its bytes on cards."""

    name: str
    size_vram: int = 0


class OllamaModels(Struct):
    """The answer of Ollama's /api/ps."""

    models: list[OllamaModel] | None = None


class Sleeping(Struct):
    """The answer of vLLM's /is_sleeping."""

    is_sleeping: bool


def free_comfyui(http: Http) -> None:
    """Unloads the models and drops the cache. ComfyUI frees after it has answered, and loads for the next prompt."""
    queue = http.get_as("/queue", ComfyQueue)
    prompts = len(queue.queue_running) + len(queue.queue_pending)
    if prompts:
        raise NeighbourBusy(f"{prompts} prompts run or wait" if prompts > 1 else "1 prompt runs or waits")
    http.post("/free", {"unload_models": True, "free_memory": True})


def free_ollama(http: Http) -> None:
    """Unloads the models, which Ollama loads again at their next request. It does not tell whether a model is in use.
    It finishes what it generates before it unloads, so nothing is cut off."""
    names = [model.name for model in http.get_as("/api/ps", OllamaModels).models or [] if model.size_vram > 0]
    if not names:
        raise NeighbourBusy("it has no model on a card")
    for name in names:
        http.post("/api/generate", {"model": name, "keep_alive": 0, "stream": False})


def free_vllm(http: Http) -> None:
    """Puts vLLM to sleep at level 1, which copies its weights to the host's memory. It is busy by the requests that its
    metrics count as running or waiting. Nobody wakes it: that would end it while its memory is taken."""
    try:
        if http.get_as("/is_sleeping", Sleeping).is_sleeping:
            raise NeighbourBusy("it sleeps already")
    except NeighbourFailed as failed:
        if failed.status != _NOT_FOUND:
            raise
        raise NeighbourFailed(
            "it has no /is_sleeping: start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode", failed.status
        ) from None
    found: dict[str, list[float]] = {"running": [], "waiting": []}
    for name, count in _COUNT.findall(http.get("/metrics").decode(errors="replace")):
        found[name].append(float(count))
    running, waiting = found.values()
    # Each engine has a line of each name.
    if not len(running) == len(waiting) > 0 or not all(0 <= count < inf for count in running + waiting):
        raise NeighbourFailed("/metrics does not count running and waiting requests: whether it is idle is unknown")
    requests = sum(running + waiting)
    if requests:
        raise NeighbourBusy(f"{requests:g} requests run or wait" if requests > 1 else "1 request runs or waits")
    http.post("/sleep?level=1")
