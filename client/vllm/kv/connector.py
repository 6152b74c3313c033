"""The KV connector that vLLM's scheduler and workers call: vLLM's offloading connector with tensord as the place.

Owns: which engines share KV, what two of them must have in common, and the way of failed loads back to vLLM. Does not
own: which blocks are loaded and stored, and when, which vLLM's OffloadingConnector decides; where they lie
(scheduler.py, worker.py).

Invariants: no method raises because of the daemon's state, and none waits for the daemon. A load that fails is computed
again by its engine.

    --kv-transfer-config '{"kv_connector": "TensordKVConnector", "kv_role": "kv_both"}'
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch
import vllm
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec

from ....errors import BadConfiguration
from ...gpu.torch_blocks import TorchBlocks
from ...identity.engine import Nameless, kv_namespace
from ..engine import sleeping, weights
from ..engine.hooks import hook
from ..engine.presence import does, engine_client_name
from ..engine.settings import KVSettings
from ..plugin import log_with_vllm, why_untested
from .copying.copies import Copies
from .copying.host_memory import HostBlocks
from .jobs import WorkerReport, with_theirs
from .keys import Chunks
from .scheduler import KVManager
from .worker import KVWorker

GROUPS: Final = (FullAttentionSpec, SlidingWindowSpec)
"""Kinds of KV cache groups that are covered. Subclasses, as for latent attention, are not among them."""
DEVICES: Final = ("cpu", "cuda")
"""Engines were run on "cpu" only; on a GPU only the worker's copies, without an engine."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
FORM: Final = 1
"""Version of the stored form. Raise it whenever a block with the same name is stored in another form."""
_FREES_KV: Final = ("sleep", "discard", "checkpoint_prepare")
"""Methods of vLLM's workers after which the KV cache may be lost."""
_ANSWERS: Final[dict[str, Callable[[], Any]]] = {
    "get_num_new_matched_tokens": lambda: (0, False),
    "get_external_cache_hit_sources": dict,
    "build_connector_meta": lambda: OffloadingConnectorMetadata(load_jobs={}, store_jobs={}),
    "has_pending_push_work": lambda: False,
    "request_finished": lambda: (False, None),
    "take_events": tuple,
    "get_finished": lambda: (set(), set()),
}
"""The answers of `Idle` other than None."""
_log = logging.getLogger("tensord")


class Idle:
    """Either side of an engine that is not covered, in the place of vLLM's: nothing is looked up, loaded or stored."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        answer = _ANSWERS.get(name, lambda: None)
        return lambda *args, **kwargs: answer()


class TensordOffloadingSpec(OffloadingSpec):  # type: ignore[misc, unused-ignore]
    """What vLLM's offloading connector asks: on the scheduler's side for its manager, on a worker's for its worker."""

    def __init__(self, config: Any, make: Callable[..., Any]) -> None:
        super().__init__(config)
        self._make = make

    def get_manager(self) -> Any:
        return self._make()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        return self._make(kv_caches)


class TensordKVConnector(OffloadingConnector):  # type: ignore[misc, unused-ignore]
    """KV blocks shared by all engines of the host that compute the same KV.

    Settings are the keys of `kv_connector_extra_config`, see `KVSettings`; `blocks_per_chunk`, `block_size` and
    `offload_prompt_only` are vLLM's.

    Raises:
        BadConfiguration: a setting is unknown or has an invalid value, or the engine's names of blocks are of no use to
            other engines.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not the constructor of OffloadingConnector: it takes its spec from a registry, without the engine's name.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        log_with_vllm()
        self._canonical_layout = False
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        self._manager: KVManager | None = None
        self._worker: KVWorker | None = None
        transfer = vllm_config.kv_transfer_config
        # A load that fails is no reason to end its request. The scheduler reads this after making the connector.
        transfer.kv_load_failure_policy = "recompute"
        settings = KVSettings.read(transfer.kv_connector_extra_config)
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        if not algorithm.startswith("sha256"):
            raise BadConfiguration(
                f"--prefix-caching-hash-algo {algorithm} gives a block another hash in each process, and different "
                "blocks may have the same: TensordKVConnector needs sha256 or sha256_cbor"
            )
        why_not = why_untested(vllm.__version__) or why_not_covered(vllm_config, kv_cache_config)
        config = build_offloading_config(vllm_config, kv_cache_config) if why_not is None else None
        if role == KVConnectorRole.WORKER:
            self.connector_worker = Idle() if config is None else self._worker_side(config, settings)
            return
        sleeping.install(settings)
        self.connector_scheduler = Idle()
        try:
            if config is not None:
                self.connector_scheduler = self._scheduler_side(config, settings)
        except (Nameless, OSError) as error:
            why_not = str(error)
        if why_not is not None:
            _log.warning("tensord: this engine shares no KV: %s", why_not)

    def _scheduler_side(self, config: Any, settings: KVSettings) -> OffloadingConnectorScheduler:
        """Raises Nameless or OSError if the engine's KV has no name."""
        vllm_config, kv_cache_config = self._vllm_config, self._kv_cache_config
        # What a stored block depends on beside the engine's configuration. The number of blocks is left out.
        layout = [
            FORM,
            config.cache.blocks_per_chunk,
            config.cache.tokens_per_hash,
            config.kv_cache_layout,
            config.parallel.world_size,
            [[group.kv_cache_spec, list(group.layer_names)] for group in kv_cache_config.kv_cache_groups],
        ]
        namespace = kv_namespace(vllm_config, layout, revision=settings.revision, tenant=settings.tenant)
        transfer = vllm_config.kv_transfer_config
        stores, finds = transfer.is_kv_producer, transfer.is_kv_consumer
        tokens = {group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups}
        # vLLM stores only the last chunks of a sliding window, so the chunk before may never be stored.
        specs = kv_cache_config.kv_cache_groups
        chained = [number for number in tokens if type(specs[number].kv_cache_spec) is FullAttentionSpec]
        sizes = " or ".join(map(str, sorted(set(tokens.values()))))
        _log.info(
            "tensord: KV blocks of %s, in chunks of %s tokens, are %s in namespace %s: engines with another namespace "
            "(other weights, settings or chunks) share none of them",
            *(namespace.model, sizes, does(stores, finds), namespace.tag.hex()),
        )
        manager = self._manager = KVManager(
            settings.socket,
            engine_client_name(vllm_config, "scheduler"),
            namespace,
            chunks=Chunks(config.parallel.world_size, tokens, chained, config.cache.tokens_per_hash),
            stores=stores,
            finds=finds,
        )
        weights.listen_for_resets(manager.caches_reset)
        spec = TensordOffloadingSpec(config, lambda: manager)
        return OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)

    def _worker_side(self, config: Any, settings: KVSettings) -> OffloadingConnectorWorker:
        for name in _FREES_KV:
            worker_class = resolve_obj_by_qualname(self._vllm_config.parallel_config.worker_cls)
            hook(worker_class, name, _settle_and_free)

        def make(kv_caches: CanonicalKVCaches) -> KVWorker:
            rank = config.parallel.rank
            (device,) = {cache.tensor.device for cache in kv_caches.tensors}
            copies = Copies(
                HostBlocks() if device.type == "cpu" else TorchBlocks(device.index, ops.swap_blocks_batch),
                kv_caches,
                config.cache.blocks_per_chunk,
                registered_bytes_max=settings.registered_bytes_max,
            )
            name = engine_client_name(self._vllm_config, f"worker {rank}")
            self._worker = KVWorker(settings.socket, name, rank=rank, copies=copies)
            return self._worker

        spec = TensordOffloadingSpec(config, make)
        return OffloadingConnectorWorker(spec, self._vllm_config, self._kv_cache_config)

    # ---- the scheduler's side

    def on_new_request(self, request: Any) -> None:
        if self._manager is not None:
            self._manager.begin(request)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        if self._manager is not None:
            self._manager.scheduled(scheduler_output.num_scheduled_tokens)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._manager is not None and isinstance(report, WorkerReport):
            self._manager.take_in(report)
        super().update_connector_output(connector_output)

    # ---- a worker's side

    def settle(self) -> None:
        """Makes all copies of blocks that the steps so far have asked for. Returns when none uses the KV cache."""
        if self._worker is not None:
            # vLLM hands the stores of a step over in the next one, which may come after the KV cache was lost.
            self.connector_worker.handle_preemptions(OffloadingConnectorMetadata(load_jobs={}, store_jobs={}))
            self._worker.wait()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """vLLM's results, and the requests whose load failed. These compute their blocks."""
        loads = dict(getattr(self.connector_worker, "_load_jobs", ()))
        results = super().get_transfer_results(finished_req_ids)
        for job_id in self._worker.take_failed() if self._worker is not None else ():
            results.failed_recving.add(loads[job_id])
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        theirs = super().build_connector_worker_meta()
        return with_theirs(self._worker.report() if self._worker is not None else None, theirs)


def why_not_covered(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why the engine shares no KV, and what to do; None if it is covered."""
    device = vllm_config.device_config.device_type
    if device not in DEVICES or (device == "cuda" and torch.version.hip):
        kind = "an AMD GPU" if torch.version.hip else f"the device {device!r}"
        return f"KV on {kind} is not supported, only on CPUs and NVIDIA GPUs: leave --kv-transfer-config out"
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(vllm_config.parallel_config, name)) > 1:
            return f"{name}={size} is not supported: set it to 1"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported: leave --speculative-config out"
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, wrong = group.kv_cache_spec, None
        if type(spec) not in GROUPS:
            wrong = f"{type(spec).__name__} is none of {', '.join(kind.__name__ for kind in GROUPS)}"
        elif spec.dtype not in DTYPES or spec.kv_quant_mode != KVQuantMode.NONE:
            quantized = f"kv_cache_dtype {spec.dtype}, quantized as {spec.kv_quant_mode.name}"
            wrong = f"{quantized}; set --kv-cache-dtype auto"
        elif number not in kv_cache_config.prefix_cacheable_group_ids:
            wrong = "its blocks have no names in vLLM's prefix cache"
        if wrong is not None:
            return f"the KV cache group {number} ({', '.join(group.layer_names[:2])}, …) is not supported: {wrong}"
    return None


def _settle_and_free(free: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a worker's method that frees the KV cache once no copy of blocks uses it any more."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    for connector in getattr(group, "_connectors", [group]):
        if isinstance(connector, TensordKVConnector):
            connector.settle()
    return free(*args, **kwargs)
