"""The EC connector that vLLM's scheduler and workers call. It delegates to its side: scheduler or worker.

Owns: the choice of the side. Does not own: the sides' logic.

Invariants: no method raises because of the daemon's state, and none waits for the daemon. vLLM's base
class answers calls that are not defined here.

    ec_transfer_config={"ec_connector": "TensordECConnector", "ec_role": "ec_both"}
    # without plugins: "ec_connector_module_path": "tensord.client.vllm.connector"
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import vllm
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

from ..checkpoints.loading import loading_begins
from .encoder.scheduler import SchedulerSide
from .encoder.stats import TensordECStats, TensordPromMetrics
from .encoder.steps import NOTHING, Report, StepMetadata
from .encoder.worker import WorkerSide
from .engine import sleeping, weights
from .engine.settings import Settings
from .plugin import log_with_vllm, why_untested

_log = logging.getLogger("tensord")


class TensordECConnector(ECConnectorBase):  # type: ignore[misc, unused-ignore]
    """Encoder outputs shared by all engines of the host that have the same weights.

    Settings are the keys of `ec_connector_extra_config`, see `Settings`.

    Raises:
        BadConfiguration: a setting is unknown or has an invalid value.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        # Without vLLM's plugins, no earlier call has set this up.
        log_with_vllm()
        settings = Settings.read(vllm_config.ec_transfer_config.ec_connector_extra_config)
        if role == ECConnectorRole.SCHEDULER:
            sleeping.install(settings)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if why_not := why_untested(vllm.__version__):
            _log.warning("tensord: this engine shares no encoder outputs: %s", why_not)
        elif vllm_config.model_config.is_encoder_decoder:
            # vLLM caches no encoder outputs for these models, and would not load any.
            _log.warning("tensord: models with an encoder and a decoder share no encoder outputs")
        elif vllm_config.parallel_config.pipeline_parallel_size > 1:
            # vLLM forwards only the reports of the last stage's workers, and the encoder runs in the first stage.
            _log.warning("tensord: engines with pipeline_parallel_size over 1 share no encoder outputs")
        elif role == ECConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, settings)
            weights.listen_for_resets(self._scheduler.caches_reset)
        else:
            # vLLM makes a worker's connector before it loads the weights, and the scheduler's connector afterwards.
            loading_begins(vllm_config.model_config.model)
            self._worker = WorkerSide(vllm_config, settings)

    def shutdown(self) -> None:
        """Ends the side's thread. The client is closed with its last user. Idempotent."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # ---- the scheduler's side, as of vLLM's base class

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._scheduler is None or self._scheduler.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler is not None and self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return NOTHING if self._scheduler is None else self._scheduler.metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.ec_connector_worker_meta
        if self._scheduler is not None and isinstance(report, Report):
            self._scheduler.take_in(report)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def take_unavailable_requests(self) -> set[str]:
        return self._scheduler.take_unavailable() if self._scheduler is not None else set()

    def get_ec_connector_stats(self) -> TensordECStats | None:
        return self._scheduler.stats() if self._scheduler is not None else None

    # ---- a worker's side, as of vLLM's base class

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.bound(connector_metadata)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        if self._worker is not None and isinstance(self._connector_metadata, StepMetadata):
            self._worker.load(self._connector_metadata, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        # vLLM calls it for consumers too.
        if self._worker is not None and isinstance(self._connector_metadata, StepMetadata):
            self._worker.save(self._connector_metadata, encoder_cache, mm_hash)

    def build_connector_worker_meta(self) -> Report | None:
        return self._worker.report() if self._worker is not None else None

    # ---- metrics

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> TensordECStats:
        return TensordECStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *about: Any) -> TensordPromMetrics:
        return TensordPromMetrics(*about)
