"""Names what a torch module's output follows from beside its input and weights: configuration, arguments, machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import torch
import transformers

from ...errors import UnsupportedLeaf

_UNSAID: Final = frozenset(
    {"_name_or_path", "architectures", "dtype", "text_config", "torch_dtype", "transformers_version"}
)
"""Of a configuration: what makes no difference to an encoder's output, or stands elsewhere in the key."""


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


def settings(module: Any, parts: Iterable[Any]) -> list[str]:
    """The configurations that the output follows, also those that are changed on a living model."""
    found = []
    for each in (module, *parts):
        config = getattr(each, "config", None)
        if config is not None:
            said = {name: value for name, value in config.to_dict().items() if name not in _UNSAID}
            found += [json.dumps(said, sort_keys=True, default=str), str(getattr(config, "_attn_implementation", None))]
    return found


def machine(device: torch.device) -> list[Any]:
    """What else changes the bits of a result from one process of a host to another."""
    kind = device.type
    said: list[Any] = [
        torch.__version__,
        transformers.__version__,
        kind,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
    ]
    if kind == "cpu":
        backends = torch.backends
        said += [torch.get_num_threads(), backends.cpu.get_cpu_capability(), backends.mkldnn.enabled]
    elif kind == "cuda":
        cuda: Any = torch.backends.cuda
        said += [
            torch.cuda.get_device_name(device),
            cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()],
        ]
    return said
