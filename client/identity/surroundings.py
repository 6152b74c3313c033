"""Names the environment of an engine: versions of packages that compute, plugins, platform, environment variables.

Owns: the lists of packages and of variables that vLLM 0.32 and its models read. Does not own: configuration fields
(vllm_fields).

Invariants: a package that is not installed has the version "none". A variable that vLLM knows is part of all names if
it is set, unless it is in LEFT_OUT.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from ..checkpoints.fingerprint import package_version, vllm_version
from .described import by_name
from .vllm_fields import Side

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
"""Variable → the reason. Only those that engines of one host often have differently."""
_BUT_PROCESSOR: Final = """
NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS VLLM_BATCH_INVARIANT VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND
"""
PROCESSOR: Final = frozenset(_BUT_PROCESSOR.split())
"""Variables that are not part of a processor's name: they choose how the model's layers compute."""

CORES: Final = "VLLM_CPU_OMP_THREADS_BIND"
"""Cores of each rank, as "0-3|4,5". Their number may change the order of sums; their choice does not."""


def surroundings(side: Side) -> dict[str, Any]:
    """The environment on which outputs of the engine's encoder or processor, or its KV, depend."""
    import vllm.envs
    from vllm.platforms import current_platform

    found: dict[str, Any] = {
        "vllm": vllm_version(),
        "versions": {name: package_version(name) or "none" for name in _PACKAGES.split()},
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
        found["device"] = _device(current_platform)
    return found


def _device(platform: Any) -> str:
    """The accelerator's model, since a host may have several; "none" if the platform has no name for it."""
    try:
        return str(platform.get_device_name())
    except Exception:  # some platforms have no names for their devices
        return "none"


def _set_variables(side: Side, known_to_vllm: Iterable[str]) -> Mapping[str, str]:
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
