"""vLLM's own encoder cache manager, which also says that the weights have changed.

Owns: who is told of it in this process. What is cached, and for how long, is decided by vLLM's class unchanged, so that
the scheduler sees in every version what it expects; sharing between engines is the connector's.

    ec_manager_config={"encoder_cache_manager_cls": "tensord.client.vllm.TensordEncoderCacheManager"}
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from vllm.v1.core import encoder_cache_manager as theirs

from ...errors import BadConfiguration

_log = logging.getLogger("tensord")

Listener = Callable[[], None]
_listeners: list[weakref.ReferenceType[Listener]] = []


def listen_for_resets(callback: Listener) -> None:
    """Calls `callback` whenever the weights of an engine in this process have changed, or may have.

    That is when its manager is reset (sleep, a pause that clears caches, reset_encoder_cache), and whenever `weights`
    hears of a change. It is called in the scheduler's thread, between two steps, often several times for one change,
    and must not wait. What it raises is logged. It is held weakly: keep what it belongs to, and give no lambda.
    """
    from . import weights

    weights.install()
    reference = weakref.WeakMethod(callback) if hasattr(callback, "__self__") else weakref.ref(callback)
    _listeners[:] = [known for known in _listeners if known() not in (None, callback)]
    _listeners.append(reference)


def tell_listeners() -> None:
    """The weights have changed, or may have."""
    for reference in _listeners.copy():
        callback = reference()
        if callback is None:
            continue
        try:
            callback()
        except Exception:
            _log.exception("whoever shares encoder outputs could not be told that the weights have changed")


class _TellsOfResets:
    """Goes before one of vLLM's managers."""

    def reset(self) -> None:
        """Forgets everything, as vLLM's does, and says so."""
        super().reset()  # type: ignore[misc]
        tell_listeners()


class TensordEncoderDecoderCacheManager(_TellsOfResets, theirs.EncoderDecoderCacheManager):
    """The one for models with an encoder and a decoder, as `create_manager` makes it for them."""


class TensordEncoderCacheManager(_TellsOfResets, theirs.EncoderCacheManager):
    """vLLM's manager, whose `reset` ends what the host's engines share of this model."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> theirs.EncoderCacheManager:
        """As vLLM's scheduler makes its manager.

        Raises:
            BadConfiguration: there are settings, and it takes none.
        """
        given = vllm_config.ec_manager_config.manager_config
        if given:
            raise BadConfiguration(
                f"manager_config is {given!r}, and tensord's encoder cache manager has no settings: leave it out; "
                "the connector's stand in ec_connector_extra_config"
            )
        # vLLM takes a configured class for every model, though those with an encoder and a decoder need another.
        if vllm_config.model_config.is_encoder_decoder:
            return TensordEncoderDecoderCacheManager(cache_size=cache_size)
        return cls(cache_size=cache_size)
