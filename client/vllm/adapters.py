"""Which LoRA adapters a worker of vLLM holds, by the weights that it loaded.

vLLM keeps an adapter that it has loaded, whatever becomes of the adapter's folder, and may load it again after others
took its place. So the digest is taken of the weights in memory, at each load; files are not looked at.

Owns: the hooks where vLLM loads an adapter, and where its engine core is told to; the digests of what is held.
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


def install_engine() -> None:
    """Has the scheduler's connector told what the workers hold after each call that may change it. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    for name in ("add_lora", "remove_lora"):
        original = getattr(EngineCore, name)
        if not hasattr(original, _OURS):
            setattr(EngineCore, name, _telling(original))


def tell_engine(core: Any) -> None:
    """Asks an engine core's workers what they hold, and tells its connector."""
    connector = getattr(getattr(core, "scheduler", None), "ec_connector", None)
    take = getattr(connector, "adapters_changed", None)
    if take is None:
        return
    try:
        reported = core.model_executor.collective_rpc(held_by)
    except Exception:
        _log.debug("the workers' adapters cannot be looked at", exc_info=True)
        reported = []
    take(dict(enumerate(reported)))


def held_by(worker: object) -> dict[int, str]:
    """`held`, as it is called in a worker."""
    return held()


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


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            tell_engine(self)

    setattr(around, _OURS, True)
    return around


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
