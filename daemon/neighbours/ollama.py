"""Ollama as a neighbour: its models are unloaded. It loads them again at their next request.

Owns: the endpoints /api/ps and /api/generate. Ollama does not tell whether a model is in use. It finishes what it
generates before it unloads, so nothing is cut off.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from .http import Http

MODELS_MAX: Final = 64
"""Models that are unloaded for one room. The answer says how many stay."""


class OllamaModel(Struct):
    """A loaded model. `size_vram`: its bytes on cards."""

    name: str
    size_vram: int = 0


class OllamaModels(Struct):
    """The answer of /api/ps."""

    models: list[OllamaModel] | None = None


class OllamaServer:
    """Ollama as a Neighbour."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._names: list[str] = []

    def busy(self) -> str:
        """As in Neighbour."""
        models = self._http.get_as("/api/ps", OllamaModels).models or []
        self._names = [model.name for model in models if model.size_vram > 0]
        return "" if self._names else "it has no model on a card"

    def free(self) -> str:
        """As in Neighbour. Unloads the first MODELS_MAX models that `busy` has found."""
        for name in self._names[:MODELS_MAX]:
            self._http.post("/api/generate", {"model": name, "keep_alive": 0, "stream": False})
        found = len(self._names)
        if found <= MODELS_MAX:
            return ""
        stay = f"{found - MODELS_MAX} of {found} models stay on cards"
        return f"{stay}: at most {MODELS_MAX} are unloaded for one room; ask for room again"
