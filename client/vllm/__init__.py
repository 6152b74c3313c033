"""tensord in vLLM: encoder outputs and processor outputs shared by all engines of a host.

The names are looked up when they are asked for: what vLLM imports as a plugin, in each of its processes, stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import TensordECConnector as TensordECConnector
    from .encoder_cache import TensordEncoderCacheManager as TensordEncoderCacheManager

_PLACES = {"TensordEncoderCacheManager": ".encoder_cache", "TensordECConnector": ".connector"}

__all__ = list(_PLACES)


if not TYPE_CHECKING:  # a type checker that sees it takes any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PLACES[name], __name__), name)
