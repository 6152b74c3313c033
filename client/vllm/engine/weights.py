"""Detects changes of an engine's weights, and tells who listens in this process.

Owns: the hooks, the comparison of the weights at resets, the listeners, and whether a reset in progress comes with the
weights as they were. Does not own: the reaction to a change.

vLLM 0.32 leaves it to the caller to reset the encoder cache after an update of the weights (update_weights and its
session, reload_weights, reset_weights, an extension's own method). All of these reach the workers through the engine
core's `collective_rpc`, in the scheduler's process and between two steps. That method is hooked.

A call of vLLM's that leaves weights alone is no change. Any other call (an update of weights, `apply_model`, an
extension's method, a function) counts as a change, also if it failed.

A reset of caches, a sleep and a wake-up change no weights by themselves, but a caller that changed them around vLLM's
methods resets the caches afterwards. There the weights are compared with those at the last comparison, the first of
which is made when the engine starts. A sleep of level 2 discards the weights, and counts as a change.

Invariants: a call that may have changed the weights is reported before the next step is scheduled. A needless report
costs encoding again; a missing report would serve another model's outputs.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakMethod

import torch

from .hooks import hook

SAMPLES: Final = 256
"""Number of values of each tensor that are compared, evenly spread."""

Listener = Callable[[bool], None]
_log = logging.getLogger("tensord")
_within = threading.local()
_listeners: list[WeakMethod[Listener]] = []

_LEAVES_WEIGHTS: Final = """check_health compute_weight_checksums get_cache_block_size_bytes get_compilation_match_table
get_encoder_timing_stats get_kv_cache_spec get_kv_connector_handshake_metadata get_model_inspection
get_supported_tasks init_weight_transfer_engine list_loras profile reset_encoder_cache reset_mm_cache
save_sharded_state save_tensorized_model shutdown_weight_transfer_engine supports_draft_weight_updates
synchronize_device update_max_model_len"""
LEAVES_WEIGHTS: Final = frozenset(_LEAVES_WEIGHTS.split())
"""Methods of vLLM's workers that leave the weights alone."""
CHANGED: Final = (
    "tensord: the model of this engine was changed in place, or may have been, so other engines cannot know its "
    "present weights. From now on it shares no %s. To share again, restart it from files that have these weights"
)
"""What the log says when sharing ends."""


def listen_for_resets(callback: Listener) -> None:
    """Calls `callback(weights_kept)` whenever the caches of an engine in this process were reset (a sleep, a pause that
    clears caches, reset_encoder_cache), or its weights may have changed.

    The call comes in the scheduler's thread between two steps, often several times for one change, and must not wait.
    Exceptions of the callback are logged. It is a method of an object, which is held weakly: keep the object.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    # No other process than the engine core's needs the hooks.
    hook(EngineCore, "collective_rpc", _call_and_tell)
    # `_reset_caches` resets the KV connector too: for a sleep, and for a pause that clears caches.
    for name in ("reset_encoder_cache", "_reset_caches"):
        hook(EngineCore, name, _compare_and_reset)
    hook(EngineCore, "sleep", _sleep)
    hook(EngineCore, "wake_up", _wake_and_compare)
    # The engine core calls one of these when it starts, after it has made its connectors.
    for name in ("init_ec_output_aggregator", "init_kv_output_aggregator"):
        hook(Executor, name, _start_and_mark)
    _listeners[:] = [known for known in _listeners if known() not in (None, callback)]
    _listeners.append(WeakMethod(callback))


def _tell_listeners() -> None:
    """Calls all listeners: caches were reset, or the weights may have changed."""
    for callback in [reference() for reference in _listeners]:
        try:
            if callback is not None:
                callback(weights_are_kept())
        except Exception:
            _log.exception("tensord: a listener failed on a change of weights; outputs of old weights may be shared")


@contextmanager
def _resetting(kept: bool) -> Iterator[None]:
    """Calls all listeners. Within it, this thread's resets come with the weights as they were if `kept`."""
    _within.kept = kept
    try:
        _tell_listeners()
        yield
    finally:
        _within.kept = False


def weights_are_kept() -> bool:
    """Whether a reset in progress in this thread is known to come with the weights as they were."""
    return getattr(_within, "kept", False)


def _call_and_tell(collective_rpc: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return collective_rpc(core, method, *args, **kwargs)
    finally:
        # Also after an error: some workers may have changed their weights, or a part of them.
        if not isinstance(method, str) or method not in LEAVES_WEIGHTS:
            _tell_listeners()


def weight_marks(worker: Any) -> bytes:
    """A digest of the worker's weights as they are now. Runs in the worker.

    It covers each parameter's and buffer's name, dtype, shape, address, count of in-place operations, and SAMPLES of
    its values. Operations on `tensor.data` are not counted: only the samples show them. Weights that a layer keeps
    packed, as linear layers on the CPU do, are not covered; operations on the parameters of such layers have no effect.
    """
    digest = hashlib.sha256()
    model = worker.get_model()
    samples: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            operations = -1 if tensor.is_inference() else tensor._version
            told = (name, tensor.dtype, tuple(tensor.shape), tensor.data_ptr(), operations)
            digest.update(repr(told).encode())
            if tensor.numel():
                samples[tensor.device].append(_sample(tensor.detach()))
    for found in samples.values():
        # Those of a device are copied at once.
        digest.update(torch.cat(found).cpu().numpy().tobytes())
    return digest.digest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to about SAMPLES of the tensor's values, as (n,) uint8."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        taken = flat[:: max(1, len(flat) // SAMPLES)]
    else:
        each = max(1, round(SAMPLES ** (1 / tensor.ndim)))
        taken = tensor[tuple(slice(None, None, max(1, size // each)) for size in tensor.shape)].reshape(-1)
    return taken.contiguous().view(torch.uint8)


def _compare_and_reset(reset: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    if weights_are_kept():
        return reset(core, *args, **kwargs)
    with _resetting(_are_same(core.model_executor)):
        return reset(core, *args, **kwargs)


def _sleep(sleep: Callable[..., Any], core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    try:
        return sleep(core, level, *args, **kwargs)
    finally:
        if level > 1:
            _tell_listeners()


def _wake_and_compare(wake_up: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return wake_up(core, *args, **kwargs)
    finally:
        if not _are_same(core.model_executor):
            _tell_listeners()


def _start_and_mark(start: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
    _are_same(executor)
    return start(executor, *args, **kwargs)


def _are_same(executor: Any) -> bool:
    """Whether the weights in all workers are as at the last call. False if they cannot be compared.

    The weights of a sleeping engine count as the same: they are compared when it wakes up.
    """
    if "weights" in getattr(executor, "sleeping_tags", ()):
        return True
    known = getattr(executor, "_tensord_marks", None)
    try:
        executor._tensord_marks = executor.collective_rpc(weight_marks)
    except Exception:
        executor._tensord_marks = None
        _log.debug("tensord: the weights could not be compared", exc_info=True)
    return known is not None and executor._tensord_marks == known
