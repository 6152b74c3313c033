"""tensord in vLLM: encoder outputs, processor outputs and KV blocks shared by all engines of a host.

It may import vLLM, the client and the identity. It owns the modules that vLLM's configuration names: the plugin, the
connectors and the encoder cache manager. Public names are imported on first access, so importing this package as a
plugin, in each of vLLM's processes, is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "TensordEncoderCacheManager": ".encoder_cache",
    "TensordECConnector": ".connector",
    "TensordKVConnector": ".kv.connector",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name], __name__), name)
