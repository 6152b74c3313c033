"""Names the environment of an engine: versions of packages that compute, plugins, platform, environment variables.

Owns: the list of packages. Does not own: the list of variables (vllm_environment). Invariants: a package that is not
installed has the version "none".
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Final

from ..checkpoints.fingerprint import package_version, vllm_version
from .vllm_environment import set_variables
from .vllm_fields import Side

PACKAGES: Final = (
    *("torch", "torchvision", "torchaudio", "torchcodec", "transformers", "tokenizers", "mistral-common", "tiktoken"),
    *("sentencepiece", "numpy", "scipy", "pillow", "opencv-python", "opencv-python-headless", "av", "decord"),
    *("librosa", "soundfile", "soxr", "timm", "einops", "xformers", "flash-attn", "flashinfer-python", "triton"),
    *("torchao", "bitsandbytes", "compressed-tensors", "kernels", "terratorch", "fastokens"),
)
"""Packages that decode, resize, cut or compute. vLLM's version is added separately."""
_PLUGINS: Final = ("vllm.general_plugins", "vllm.platform_plugins")


def surroundings(side: Side) -> dict[str, Any]:
    """The environment on which outputs of the engine's encoder or processor, or its KV, depend."""
    import vllm.envs
    from vllm.platforms import current_platform

    found: dict[str, Any] = {
        "vllm": vllm_version(),
        "versions": {name: package_version(name) or "none" for name in PACKAGES},
        "plugins": sorted(
            f"{plugin.value} {plugin.dist.version if plugin.dist else None}"
            for group in _PLUGINS
            for plugin in entry_points(group=group)
            if not plugin.value.startswith("tensord.")
        ),
        "platform": f"{type(current_platform).__qualname__} {current_platform.device_type}",
        "environment": set_variables(side, vllm.envs.environment_variables),
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
