"""Environment variables that vLLM 0.32 and its models read, as far as they are part of an engine's names.

Owns: the list of those that are left out, and the variables' present values. Does not own: configuration fields
(vllm_fields).

Invariants: a variable that vLLM knows is part of all names if it is set, unless it is in the list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final

from .vllm_fields import Side, each

BESIDE_VLLM: Final = frozenset(
    {
        "AITER_BF16_FP8_MOE_BOUND",
        "ATEN_CPU_CAPABILITY",
        "CUBLASLT_WORKSPACE_SIZE",
        "CUBLAS_WORKSPACE_CONFIG",
        "DNNL_MAX_CPU_ISA",
        "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS",
        "NCCL_LAUNCH_MODE",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "ONEDNN_MAX_CPU_ISA",
        "TORCHDYNAMO_DISABLE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_COMPILE_DISABLE",
        "USE_FLAGOS",
        "VLLM_CUSTOM_ALLREDUCE_ALGO",
    }
)
"""Variables that models and libraries read by themselves, and that are part of names as those that vLLM knows."""

LEFT_OUT: Final = each(
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
"""Variable → the reason. Only those that engines of one host often have differently."""
PROCESSOR: Final = frozenset(
    {
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "VLLM_BATCH_INVARIANT",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "VLLM_CPU_OMP_THREADS_BIND",
    }
)
"""Variables that are not part of a processor's name: they choose how the model's layers compute."""

CORES: Final = "VLLM_CPU_OMP_THREADS_BIND"
"""Cores of each rank, as "0-3|4,5". Their number may change the order of sums; their choice does not."""


def set_variables(side: Side, known_to_vllm: Iterable[str]) -> Mapping[str, str]:
    """The values of the variables in a side's name, if they are set."""
    names = (BESIDE_VLLM | set(known_to_vllm)) - LEFT_OUT.keys()
    names = names - PROCESSOR if side == "processor" else names
    found = {name: os.environ[name] for name in sorted(names) if name in os.environ}
    if CORES in found:
        found[CORES] = _counted(found[CORES])
    return found


def _counted(bound: str) -> str:
    """The number of cores of each rank, as text; the value itself if it does not list cores."""
    try:
        return "|".join(str(sum(_length(part) for part in rank.split(","))) for rank in bound.split("|"))
    except ValueError:
        return bound


def _length(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1
