"""vLLM 0.32's configuration and environment: what is left out of an engine's names, with the reasons.

Owns: these tables, for three names: that of an encoder's outputs, that of a processor's outputs, and that of KV; and
the environment on which they depend. Listed is what engines of one host often have differently. Does not own: the
values of fields.

Invariants: a field that is missing in the table, each field of a class without a table, and each variable that vLLM
knows is part of all names. So with a new version of vLLM, engines share less until the tables are extended, but never
get a wrong output.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from ..checkpoints.fingerprint import package_version, vllm_version
from .described import by_name

Side = Literal["encoder", "processor", "kv"]
"""The outputs that are named: an encoder's, a processor's, or the KV of the language model."""

Reasons = Mapping[str, str]
"""Reason for leaving fields out of a name → the fields."""
_NONE: Final[Reasons] = MappingProxyType({})


class LeftOut(NamedTuple):
    """The fields of one of vLLM's classes that are not part of all three names, each with the reason.

    `everywhere`: part of no name. `but_kv`: part of KV's name only. An encoder's name is part of KV's otherwise: KV is
    made of encoder outputs. `but_processor`: part of a processor's name only. `processor`: of all but a processor's.
    """

    everywhere: Reasons = _NONE
    but_kv: Reasons = _NONE
    but_processor: Reasons = _NONE
    processor: Reasons = _NONE

    def of(self, side: Side) -> frozenset[str]:
        """The fields that are not part of this side's name."""
        reasons = [self.everywhere, self.processor if side == "processor" else self.but_processor]
        out = [*reasons, self.but_kv] if side != "kv" else reasons
        return frozenset(name for each in out for names in each.values() for name in names.split())


_IN_THE_KEY: Final = "affects the processor's output, which is the encoder's input; that content is part of the key"
_CONTENT: Final = "a path; the files there are named by their content"
_KV: Final = "for the KV cache and the language model's attention, which run after the encoder"
_AFTER: Final = "applies to the language model's output"
_OPERATION: Final = "how the engine is run, observed, or ended"
_MEMORY: Final = "where values lie, not what they are"
_BATCHES: Final = "how requests are batched, in steps that each encode whole items"

READS_LENGTH: Final = frozenset(
    {
        *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3"),
        *("NemotronH_Super_Omni_Reasoning_V3", "VoxtralForConditionalGeneration", "VoxtralRealtimeGeneration"),
    }
)
"""Architectures whose encoder or processor reads max_model_len. For these it is part of their names."""

TABLE: Final[Mapping[str, LeftOut]] = {
    "VllmConfig": LeftOut(
        everywhere={
            _KV: "kv_transfer_config kv_events_config",
            _BATCHES: "scheduler_config",
            _AFTER: "speculative_config structured_outputs_config reasoning_config",
            _MEMORY: "offload_config",
            _OPERATION: "observability_config logging_config profiler_config shutdown_timeout instance_id",
            "how encoder outputs are shared, not what they are": "ec_transfer_config ec_manager_config",
            "made of fields and of files that are named": "quant_config",
            "how new weights come; then nothing is shared under the old name": "weight_transfer_config",
        },
        but_kv={_KV: "cache_config mamba_config engram_config"},
    ),
    "CacheConfig": LeftOut(
        everywhere={
            "the layout that came of it is named": (
                "block_size user_specified_block_size kv_cache_layout mamba_page_size_padded skip_page_size_padded "
                "mamba_block_size effective_attention_block_size hash_block_size is_attention_free sliding_window"
            ),
            "which blocks an engine keeps, and which it looks for": (
                "enable_prefix_caching prefix_match_unit prefix_cache_retention_interval cache_hit_alignment_tokens"
            ),
            _MEMORY: (
                "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_size_tokens "
                "kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend"
            ),
            _OPERATION: "_block_size_resolved",
        },
    ),
    "ModelConfig": LeftOut(
        everywhere={
            _CONTENT: "model model_weights revision code_revision hf_config_path tokenizer tokenizer_revision",
            "what came of it stands in hf_config": "hf_overrides",
            "part of hf_config": "hf_text_config",
            "of sampling, and of random weights, which have no name": "seed",
            "of the sequence; processors that read it are READS_LENGTH": "spec_target_max_model_len",
            "limits requests": "allowed_local_media_path allowed_media_domains hf_token io_processor_plugin",
            _AFTER: (
                "max_logprobs logprobs_mode generation_config override_generation_config logits_processors "
                "pooler_config"
            ),
            _MEMORY: "enable_sleep_mode enable_cumem_allocator",
            _OPERATION: "served_model_name renderer_num_workers",
        },
        but_kv={
            _KV: "disable_sliding_window disable_cascade_attn",
            "some rotary embeddings are chosen by it; processors that read it are READS_LENGTH": "max_model_len",
        },
        but_processor={_IN_THE_KEY: "tokenizer_mode skip_tokenizer_init"},
        processor={
            "settings of the running model; a processor is made from the model's configuration and its own": (
                "quantization quantization_config enforce_eager is_submodel_config"
            )
        },
    ),
    "MultiModalConfig": LeftOut(
        everywhere={
            "of a run that shares nothing": (
                "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
            ),
            "leaves the language model out": "mm_encoder_only",
            "of vLLM's own caches, and of how items travel": (
                "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc "
                "mm_ipc_gpu_memory_gb"
            ),
            _OPERATION: "skip_mm_profiling",
        },
        but_processor={
            _IN_THE_KEY: "limit_per_prompt enable_mm_embeds media_io_kwargs interleave_mm_strings "
            "allow_missing_mm_embeddings"
        },
        processor={"after the processor": "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_tp_mode"},
    ),
    "LoRAConfig": LeftOut(
        everywhere={
            _MEMORY: "max_loras max_cpu_loras",
            "which adapter a request has; that adapter's content is in the key": "default_mm_loras",
        },
    ),
    "ParallelConfig": LeftOut(
        everywhere={
            "engines with more than one stage share nothing": "pipeline_parallel_size",
            "each of its engines encodes whole items": (
                "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
                "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port data_parallel_backend "
                "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index "
                "_data_parallel_master_port_list dp_sync_interval disable_nccl_for_dp_synchronization"
            ),
            _BATCHES: "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold",
            "which process runs what; the work of each follows from tensor_parallel_size": (
                "world_size rank node_rank nnodes master_addr master_port distributed_executor_backend "
                "max_parallel_loading_workers ray_runtime_env placement_group assigned_physical_gpu_ids "
                "_coord_store_port _api_process_count _api_process_rank"
            ),
            _MEMORY: "enable_shm_tensor_arena numa_bind numa_bind_nodes numa_bind_cpus",
        },
        but_kv={
            "for the language model's experts": (
                "enable_expert_parallel enable_eplb eplb_config all2all_backend elastic_ep_max_dp_size"
            ),
        },
    ),
    "CompilationConfig": LeftOut(
        everywhere={
            "sizes and graphs of the language model's batches": (
                "splitting_ops cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
                "decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints cudagraph_mode "
                "cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
                "max_cudagraph_capture_size"
            ),
            "where compiled code is kept; what it is compiled of is named": (
                "cache_dir compile_cache_save_format local_cache_dir debug_dump_path"
            ),
            "written while the engine runs": (
                "enabled_custom_ops disabled_custom_ops traced_files compilation_time encoder_compilation_time "
                "static_forward_context"
            ),
        },
    ),
    "LoadConfig": LeftOut(
        everywhere={
            _CONTENT: "download_dir",
        },
    ),
    "DeviceConfig": LeftOut(
        everywhere={"which of a kind; the kind is device_type, and its model is named": "device"},
    ),
}
"""The table of each of vLLM's classes, by class name."""

# ---- the environment

_PACKAGES: Final = """
torch torchvision torchaudio torchcodec transformers tokenizers mistral-common tiktoken sentencepiece numpy scipy pillow
opencv-python opencv-python-headless av decord librosa soundfile soxr timm einops xformers flash-attn flashinfer-python
triton torchao bitsandbytes compressed-tensors kernels terratorch fastokens
"""
"""Packages that decode, resize, cut or compute. vLLM's version is added separately."""
_PLUGINS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
_BESIDE_VLLM: Final = """
AITER_BF16_FP8_MOE_BOUND ATEN_CPU_CAPABILITY CUBLASLT_WORKSPACE_SIZE CUBLAS_WORKSPACE_CONFIG DNNL_MAX_CPU_ISA MKL_CBWR
MKL_ENABLE_INSTRUCTIONS NCCL_LAUNCH_MODE NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS ONEDNN_MAX_CPU_ISA TORCHDYNAMO_DISABLE
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_COMPILE_DISABLE USE_FLAGOS VLLM_CUSTOM_ALLREDUCE_ALGO
"""
BESIDE_VLLM: Final = frozenset(_BESIDE_VLLM.split())
"""Variables that models and libraries read by themselves, and that are part of names as those that vLLM knows."""
LEFT_OUT: Final = by_name(
    {
        "where libraries are looked for; imports change it": "LD_LIBRARY_PATH",
        "a path, an address, or a secret": (
            "VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_LOOPBACK_IP "
            "VLLM_ASSETS_CACHE VLLM_LORA_RESOLVER_CACHE_DIR VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY "
            "S3_ENDPOINT_URL AWS_ENDPOINT_URL RUNAI_STREAMER_S3_ENDPOINT MODELSCOPE_API_TOKEN "
            "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST "
            "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT "
            "VLLM_MOONCAKE_BOOTSTRAP_PORT"
        ),
        "how the engine is run, or observed": (
            "VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HTTP_TIMEOUT_KEEP_ALIVE "
            "VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_CONFIGURE_LOGGING "
            "VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR "
            "NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL VLLM_DISABLE_LOG_LOGO VLLM_SERVER_DEV_MODE "
            "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_PROCESS_NAME_PREFIX "
            "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_ALLOW_RUNTIME_LORA_UPDATING"
        ),
        "which process runs what": (
            "LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP "
            "VLLM_DP_MASTER_PORT VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES"
        ),
        "where values lie, not what they are": "VLLM_CPU_KVCACHE_SPACE",
    }
)
"""Variable → the reason."""
CORES: Final = "VLLM_CPU_OMP_THREADS_BIND"
"""Cores of each rank, as "0-3|4,5". Their number may change the order of sums; their choice does not."""
PROCESSOR: Final = frozenset(
    {"NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "VLLM_BATCH_INVARIANT", "VLLM_CPU_NUM_OF_RESERVED_CPU", CORES}
)
"""Variables that are not part of a processor's name: they choose how the model's layers compute."""


def surroundings(side: Side) -> dict[str, Any]:
    """The environment on which outputs of the engine's encoder or processor, or its KV, depend."""
    import vllm.envs
    from vllm.platforms import current_platform

    found: dict[str, Any] = {
        "vllm": vllm_version(),
        "versions": {name: package_version(name) for name in _PACKAGES.split()},
        "plugins": sorted(
            f"{plugin.value} {plugin.dist.version if plugin.dist else None}"
            for group in _PLUGINS
            for plugin in entry_points(group=group)
            if not plugin.value.startswith("tensord.")
        ),
        "platform": f"{type(current_platform).__qualname__} {current_platform.device_type}",
        "environment": _set_variables(side, vllm.envs.environment_variables),
    }
    if side != "processor":
        # The accelerator's model, since a host may have several. Some platforms have no names for their devices.
        found["device"] = "none"
        with suppress(Exception):
            found["device"] = str(current_platform.get_device_name())
    return found


def _set_variables(side: Side, known_to_vllm: Iterable[str]) -> Mapping[str, str]:
    names = (BESIDE_VLLM | set(known_to_vllm)) - LEFT_OUT.keys()
    names = names - PROCESSOR if side == "processor" else names
    found = {name: os.environ[name] for name in sorted(names) if name in os.environ}
    if CORES in found:
        # A value that does not list cores stays as it is.
        with suppress(ValueError):
            ranks = [sum(map(_length, rank.split(","))) for rank in found[CORES].split("|")]
            found[CORES] = "|".join(map(str, ranks))
    return found


def _length(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1
