"""vLLM's encoder cache manager, extended by a notice of resets, which come with changes of weights.

Owns: the listeners in this process, and whether a reset comes with the weights as they were. Does not own: what is
cached and for how long, which vLLM's class decides unchanged, so that the scheduler sees the behaviour of its version;
nor sharing between engines, which is the connector's.

    ec_manager_config={"encoder_cache_manager_cls": "tensord.client.vllm.TensordEncoderCacheManager"}
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core import encoder_cache_manager as theirs

from ...errors import BadConfiguration

_log = logging.getLogger("tensord")

Listener = Callable[[], None]
_within = threading.local()
_listeners: list[weakref.ReferenceType[Listener]] = []


def listen_for_resets(callback: Listener) -> None:
    """Calls `callback` whenever the caches of an engine in this process were reset, or its weights may have changed.

    These occasions are a reset of the engine's caches (sleep, a pause that clears caches, reset_encoder_cache), and
    each change that `weights` detects. In the call, `weights_are_kept` says whether the weights are as they were. The
    call comes in the scheduler's thread between two steps, often several times
    for one change, and must not wait. Exceptions of the callback are logged. The callback is held weakly: keep its
    object, and pass no lambda.
    """
    from .engine import weights

    weights.install()
    reference = weakref.WeakMethod(callback) if hasattr(callback, "__self__") else weakref.ref(callback)
    _listeners[:] = [known for known in _listeners if known() not in (None, callback)]
    _listeners.append(reference)


def tell_listeners() -> None:
    """Calls all listeners: caches were reset, or the weights may have changed."""
    for reference in _listeners.copy():
        callback = reference()
        if callback is None:
            continue
        try:
            callback()
        except Exception:
            _log.exception("tensord: a listener failed on a change of weights; outputs of old weights may be shared")


@contextmanager
def keeping_weights() -> Iterator[None]:
    """Within it, this thread's resets come with the weights as they were."""
    _within.kept = True
    try:
        yield
    finally:
        _within.kept = False


def weights_are_kept() -> bool:
    """Whether a reset in progress in this thread is known to come with the weights as they were."""
    return getattr(_within, "kept", False)


class TensordEncoderCacheManager(theirs.EncoderCacheManager):
    """vLLM's manager. Its `reset` also ends sharing under the model's present name, unless the engine has proved that
    its weights are as they were."""

    def reset(self) -> None:
        """Resets vLLM's manager, then calls the listeners."""
        super().reset()
        tell_listeners()

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> theirs.EncoderCacheManager:
        """Makes a manager for vLLM's scheduler: vLLM's own for a model with an encoder and a decoder, of which no
        output is shared.

        Raises:
            BadConfiguration: `manager_config` is not empty. This manager has no settings.
        """
        given = vllm_config.ec_manager_config.manager_config
        if given:
            raise BadConfiguration(
                f"manager_config is {given!r}, and tensord's encoder cache manager has no settings: remove it; "
                "the connector's settings are in ec_connector_extra_config"
            )
        # vLLM uses the configured class for every model, but models with an encoder and a decoder need another one.
        if vllm_config.model_config.is_encoder_decoder:
            return theirs.EncoderDecoderCacheManager(cache_size=cache_size)
        return cls(cache_size=cache_size)
