"""Changes of weights that vLLM does not tell its encoder cache manager of.

vLLM 0.32 leaves it to the caller to reset the encoder cache after an update of the weights (update_weights and its
session, reload_weights, reset_weights, an extension's own way). All of those reach the workers through the engine
core's `collective_rpc`, in the scheduler's process and between two steps; that is where they are heard.

Owns: the hooks. Invariant: what may have changed the weights counts as a change, and before the next step is scheduled:
a needless one costs encoding again, a missed one would serve another model's outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from .encoder_cache import tell_listeners

# What vLLM's workers offer that leaves the weights alone. Whatever is not named here may change them.
LEAVES_WEIGHTS: Final = frozenset(
    {
        "check_health",
        "compute_weight_checksums",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
    }
)


def install() -> None:
    """Hooks the engine core of this process, once. `listen_for_resets` calls it: no other process needs it."""
    from vllm.v1.engine.core import EngineCore

    _hook(EngineCore, "collective_rpc", _told_of_calls)
    _hook(EngineCore, "set_weight_version", _told_of_versions)


def _hook(owner: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_tensord_hook"):
        return
    hooked = around(original)
    hooked._tensord_hook = True  # type: ignore[attr-defined]
    setattr(owner, name, hooked)


def _told_of_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, method, *args, **kwargs)
        finally:
            # Also where it failed: some of the workers may have got through, or half way.
            if not isinstance(method, str) or method not in LEAVES_WEIGHTS:
                tell_listeners()

    return collective_rpc


def _told_of_versions(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def set_weight_version(self: Any, weight_version: str) -> Any:
        known = getattr(self, "_weight_version", None)
        try:
            return original(self, weight_version)
        finally:
            if known != weight_version:
                tell_listeners()

    return set_weight_version
