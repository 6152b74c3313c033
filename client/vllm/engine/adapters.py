"""The LoRA adapters that a worker of vLLM holds, identified by digests of the loaded weights.

Owns: the hooks where vLLM loads an adapter and where its engine core changes adapters; the digests of held adapters;
which adapters all ranks hold with the same weights.
Does not own: the names derived from the digests.

vLLM keeps a loaded adapter even if its folder changes, and may load it again after other adapters replaced it. So each
load computes the digest from the weights in memory; files are not read.

Invariants: an adapter has a digest only if it is the digest of the weights that vLLM encodes with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

from ...identity.adapters import adapter_digest
from .hooks import hook

_DIGEST: Final = "_tensord_digest"
_managers: Final[WeakSet[Any]] = WeakSet()
_log = logging.getLogger("tensord")


class RankAdapters:
    """The adapters that `ranks` workers hold, as far as the scheduler was told."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.held: dict[int, dict[int, str]] = {}
        """By rank: the digests of the held adapters, by vLLM's number of the adapter."""

    def of(self, lora_request: Any) -> tuple[int, str] | None:
        """The adapter's number and the digest of its weights, if all ranks hold the same weights; else None."""
        if lora_request.load_inplace:
            # vLLM loads the adapter anew in each step, so its weights in that step are not known yet.
            return None
        number = lora_request.lora_int_id
        digest = self.held.get(0, {}).get(number)
        return (number, digest) if digest is not None and self.hold(number, digest) else None

    def hold(self, number: int, digest: str) -> bool:
        """Whether all ranks hold the adapter with these weights."""
        return all(self.held.get(rank, {}).get(number) == digest for rank in range(self._ranks))


def install() -> None:
    """Hooks vLLM so that each adapter loaded in this process from now on gets a digest. Idempotent."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    hook(WorkerLoRAManager, "_load_adapter", _load_and_digest)


def install_engine() -> None:
    """Hooks the engine core so that the connector learns the workers' adapters after each call that may change them.
    Idempotent."""
    from vllm.v1.engine.core import EngineCore

    for name in ("add_lora", "remove_lora"):
        hook(EngineCore, name, _change_and_tell)


def tell_engine(core: Any) -> None:
    """Asks the workers of an engine core which adapters they hold, and passes the answers to its connectors."""
    scheduler = getattr(core, "scheduler", None)
    connectors = [getattr(scheduler, name, None) for name in ("ec_connector", "connector")]
    takers = [take for each in connectors if (take := getattr(each, "adapters_changed", None)) is not None]
    if not takers:
        return
    try:
        reported = core.model_executor.collective_rpc(held_by)
    except Exception:
        _log.debug("tensord: the workers' adapters could not be queried", exc_info=True)
        reported = []
    for take in takers:
        take(dict(enumerate(reported)))


def held_by(worker: object) -> dict[int, str]:
    """`held`, in the form that vLLM calls in a worker."""
    return held()


def held() -> dict[int, str]:
    """The digests of the adapters that this process holds, by vLLM's number of the adapter.

    Adapters without a digest are omitted, and numbers that stand for several different adapters.
    """
    found: dict[int, str] = {}
    unclear: set[int] = set()
    for manager in list(_managers):
        for number, adapter in manager._adapter_manager.list_adapters().items():
            digest = getattr(adapter, _DIGEST, None)
            if digest is None or found.setdefault(number, digest) != digest:
                unclear.add(number)
    return {number: digest for number, digest in found.items() if number not in unclear}


def _change_and_tell(change: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return change(core, *args, **kwargs)
    finally:
        tell_engine(core)


def _load_and_digest(load: Callable[..., Any], manager: Any, lora_request: Any) -> Any:
    adapter = load(manager, lora_request)
    try:
        # Computed now, since vLLM changes the tensors in place when it puts the adapter into its layers.
        setattr(adapter, _DIGEST, adapter_digest(adapter))
    except Exception as error:
        _log.warning(
            "tensord: the adapter %r has no digest, so no output encoded with it is shared: %s",
            *(lora_request.lora_name, error),
        )
    _managers.add(manager)
    return adapter
