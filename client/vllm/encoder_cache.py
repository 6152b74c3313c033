"""vLLM's encoder cache manager, extended by a notice of resets, which come with changes of weights.

Owns: the notice. Does not own: what is cached (vLLM's class decides it unchanged), nor who hears of a reset
(engine/weights.py).

    ec_manager_config={"encoder_cache_manager_cls": "tensord.client.vllm.TensordEncoderCacheManager"}
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core import encoder_cache_manager as theirs

from ...errors import BadConfiguration
from .engine.weights import tell_listeners


class TensordEncoderCacheManager(theirs.EncoderCacheManager):
    """vLLM's manager. Its `reset` also ends sharing under the model's present name, unless the engine has proved that
    its weights are as they were."""

    def reset(self) -> None:
        super().reset()
        tell_listeners()

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> theirs.EncoderCacheManager:
        """Makes a manager for vLLM's scheduler. Raises BadConfiguration if `manager_config` is not empty."""
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
