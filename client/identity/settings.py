"""Names what a torch module's output follows from beside its input and weights: configuration, arguments, machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch
import transformers

from ...errors import UnsupportedLeaf
from .attributes import attributes_digest

UNSAID: Final[Mapping[str, str]] = {
    "_name_or_path": "a place; what stands there is named by its content",
    "architectures": "the encoder's class is in the key",
    "dtype": "that of the weights is in their fingerprint",
    "torch_dtype": "that of the weights is in their fingerprint",
    "text_config": "of the language model, which comes after the encoder",
    "transformers_version": "which version wrote it; the one that runs is in the key",
}
"""Field of a configuration → why it is not in a key."""


def described(value: Any) -> Any:
    """A value as a key can hold it, type and all: True is not 1.

    Raises:
        UnsupportedLeaf: no key can hold it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return [type(value).__name__, value]
    if type(value) in (list, tuple):
        return ["list", [described(each) for each in value]]
    if type(value) is dict and all(type(name) is str for name in value):
        return ["dict", [[name, described(value[name])] for name in sorted(value)]]
    raise UnsupportedLeaf(f"a {type(value).__qualname__} among the arguments, by which nothing can be named")


def configs_of(modules: Iterable[Any]) -> list[Any]:
    """The modules' configurations, each once."""
    return list({id(config): config for each in modules if (config := vars(each).get("config")) is not None}.values())


def settings(modules: Collection[Any]) -> list[str]:
    """What the output follows, also where it is changed on a living model: configurations, and the modules' classes and
    plain attributes.

    Raises:
        UnsupportedLeaf: an attribute that no key can hold.
    """
    found = [attributes_digest(modules)]
    for config in configs_of(modules):
        said = {name: value for name, value in config.to_dict().items() if name not in UNSAID}
        found += [json.dumps(said, sort_keys=True, default=str), str(getattr(config, "_attn_implementation", None))]
    return found


def machine(device: torch.device) -> list[Any]:
    """What else changes the bits of a result from one process of a host to another."""
    kind = device.type
    backends: Any = torch.backends
    cuda = backends.cuda
    said: list[Any] = [
        torch.__version__,
        transformers.__version__,
        kind,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        # Which kernels scaled_dot_product_attention may take: on all devices, though the names say cuda.
        [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()],
        cuda.fp16_bf16_reduction_math_sdp_allowed() if hasattr(cuda, "fp16_bf16_reduction_math_sdp_allowed") else None,
        torch._C._get_sdp_priority_order() if hasattr(torch._C, "_get_sdp_priority_order") else None,
        # False while this thread takes denormal numbers for zero (torch.set_flush_denormal).
        sys.float_info.min / 2 > 0,
    ]
    if kind == "cpu":
        said += [torch.get_num_threads(), backends.cpu.get_cpu_capability(), backends.mkldnn.enabled]
        said += [getattr(getattr(backends.mkldnn, name, None), "fp32_precision", None) for name in ("conv", "matmul")]
    elif kind == "cuda":
        said += [
            torch.cuda.get_device_name(device),
            cuda.matmul.allow_tf32,
            backends.cudnn.allow_tf32,
            [backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic],
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ]
    return said
