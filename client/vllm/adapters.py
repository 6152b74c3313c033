"""Which LoRA adapters a worker of vLLM holds, by the weights that it loaded.

vLLM keeps an adapter that it has loaded, whatever becomes of the adapter's folder, and may load it again after others
took its place. So the digest is taken of the weights in memory, at each load; files are not looked at.

Owns: the hook where vLLM loads an adapter, and the digests of the adapters that are held.
Invariant: an adapter has a digest only if it is the digest of the weights that vLLM encodes with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Final
from weakref import WeakSet

from ..identity.adapters import adapter_digest

_DIGEST: Final = "_tensord_digest"
_OURS: Final = "_tensord"
_managers: Final[WeakSet[Any]] = WeakSet()
_log = logging.getLogger("tensord")


def install() -> None:
    """Has the digest taken of each adapter that is loaded in this process from now on. Idempotent."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    if not hasattr(WorkerLoRAManager._load_adapter, _OURS):
        WorkerLoRAManager._load_adapter = _digesting(WorkerLoRAManager._load_adapter)


def held() -> dict[int, str]:
    """The digests of the adapters that this process holds, by vLLM's number of the adapter.

    An adapter without a digest is left out, and one whose number stands for several adapters.
    """
    found: dict[int, str] = {}
    unclear: set[int] = set()
    for manager in list(_managers):
        for number, adapter in manager._adapter_manager.list_adapters().items():
            digest = getattr(adapter, _DIGEST, None)
            if digest is None or found.setdefault(number, digest) != digest:
                unclear.add(number)
    return {number: digest for number, digest in found.items() if number not in unclear}


def _digesting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        adapter = original(self, lora_request)
        try:
            # Now: vLLM changes the tensors in place when it puts the adapter into its layers.
            setattr(adapter, _DIGEST, adapter_digest(adapter))
        except Exception as error:
            _log.warning(
                "tensord: the adapter %r has no name, so nothing encoded with it is shared: %s",
                *(lora_request.lora_name, error),
            )
        _managers.add(self)
        return adapter

    setattr(_load_adapter, _OURS, True)
    return _load_adapter
