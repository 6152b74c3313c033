"""Ollama as a neighbour: its models are unloaded. It loads them again at their next request.

Owns: the endpoints /api/ps and /api/generate. Ollama does not tell whether a model is in use. It finishes what it
generates before it unloads, so nothing is cut off.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from .http import Http, NeighbourBusy

MODELS_MAX: Final = 64
"""Models that are unloaded for one room. The answer says how many stay."""


class OllamaModel(Struct):
    """A loaded model. `size_vram`: its bytes on cards."""

    name: str
    size_vram: int = 0


class OllamaModels(Struct):
    """The answer of /api/ps."""

    models: list[OllamaModel] | None = None


def free_ollama(http: Http) -> str:
    """As `registry.Free`."""
    names = [model.name for model in http.get_as("/api/ps", OllamaModels).models or [] if model.size_vram > 0]
    if not names:
        raise NeighbourBusy("it has no model on a card")
    for name in names[:MODELS_MAX]:
        http.post("/api/generate", {"model": name, "keep_alive": 0, "stream": False})
    if len(names) <= MODELS_MAX:
        return ""
    stay = f"{len(names) - MODELS_MAX} of {len(names)} models stay on cards"
    return f"{stay}: at most {MODELS_MAX} are unloaded for one room; ask for room again"
