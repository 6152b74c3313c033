"""tensord in SGLang: KV pages of the HiCache host pool, shared by all engines of the host.

It may import SGLang, the client and the identity. It owns the storage that SGLang calls, the names of pages and their
addresses in the host pool. Public names are imported on first access, because importing the storage imports SGLang.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .storage import TensordHiCacheStorage as TensordHiCacheStorage

_PLACES = {"TensordHiCacheStorage": ".storage"}

__all__ = list(_PLACES)


if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any name in this module

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PLACES[name], __name__), name)
