"""Names the inputs of a torch module's output other than data and weights: configuration, arguments, machine.

Owns: the list of these inputs. Does not own: attributes of modules (attributes.py). Invariants: values of different
scalar types have different descriptions, also if they are equal, like True and 1.
"""

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
    "_name_or_path": "a path; the files there are named by their content",
    "architectures": "the encoder's class is part of the key",
    "dtype": "the dtype of the weights is part of their fingerprint",
    "torch_dtype": "the dtype of the weights is part of their fingerprint",
    "text_config": "for the language model, which runs after the encoder",
    "transformers_version": "the version that wrote the file; the running version is part of the key",
}
"""Field of a configuration → the reason for leaving it out of a key."""


def described(value: Any) -> Any:
    """A value with its type, in a form that a key can contain: True is not 1.

    Raises:
        UnsupportedLeaf: a value of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return [type(value).__name__, value]
    if type(value) in (list, tuple):
        return ["list", [described(each) for each in value]]
    if type(value) is dict and all(type(name) is str for name in value):
        return ["dict", [[name, described(value[name])] for name in sorted(value)]]
    raise UnsupportedLeaf(f"an argument is a {type(value).__qualname__}, which cannot be part of a name")


def configs_of(modules: Iterable[Any]) -> list[Any]:
    """The modules' configurations, without duplicates."""
    return list({id(config): config for each in modules if (config := vars(each).get("config")) is not None}.values())


def settings(modules: Collection[Any]) -> list[str]:
    """The present settings of a model, including changes on the living model: configurations, and the modules' classes
    and plain attributes.

    Raises:
        UnsupportedLeaf: an attribute has no text form.
    """
    found = [attributes_digest(modules)]
    for config in configs_of(modules):
        said = {name: value for name, value in config.to_dict().items() if name not in UNSAID}
        found += [json.dumps(said, sort_keys=True, default=str), str(getattr(config, "_attn_implementation", None))]
    return found


_attention_chosen = False


def _choose_attention(device: torch.device) -> None:
    """Has torch choose in which order it tries the kernels of attention. It does so at the first attention of a process
    on a GPU, whatever the order was set to before, so the first call would have another name than all later ones."""
    global _attention_chosen
    if not _attention_chosen:
        states = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
        torch._fused_sdp_choice(states, states, states)
        _attention_chosen = True


def machine(device: torch.device) -> list[Any]:
    """Other settings that may change the bits of a result between processes of a host: versions, modes, device."""
    kind = device.type
    if kind == "cuda":
        _choose_attention(device)
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
        # The kernels that scaled_dot_product_attention may use. They apply to all devices, despite the name cuda.
        [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()],
        cuda.fp16_bf16_reduction_math_sdp_allowed() if hasattr(cuda, "fp16_bf16_reduction_math_sdp_allowed") else None,
        torch._C._get_sdp_priority_order() if hasattr(torch._C, "_get_sdp_priority_order") else None,
        # False while this thread flushes denormal numbers to zero (torch.set_flush_denormal).
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
