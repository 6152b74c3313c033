"""What an encoder's output follows from, beside its items; and whether that is known at all.

Owns: when a call goes through untouched for what is in the model or its arguments, and what of settings and machine
stands in a key. Does not own the weights' name (weights).

Invariant: what is not known to leave the output alone is either in the key, or the call is untouchable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import torch
import torch.nn.modules.module as _modules
import transformers

from .weights import tensors_of

_EVERYWHERE: Final = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
"""Hooks that run with each module there is. torch changes these, and never replaces them."""
_UNSAID: Final = frozenset(
    {"_name_or_path", "architectures", "dtype", "text_config", "torch_dtype", "transformers_version"}
)
"""Of a configuration: what makes no difference to an encoder's output, or stands elsewhere in the key."""


class Untouchable(Exception):
    """The call has to go through as it is."""


def plain_tensor(tensor: Any) -> torch.Tensor:
    """The tensor, which is one with rows in plain memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.ndim == 0 or tensor.layout is not torch.strided:
        raise Untouchable
    plain: torch.Tensor = tensor
    return plain


def check_still(items: Any, parts: Iterable[Any]) -> None:
    """That encoding is a function of the input and the weights: no gradients wanted, no dropout, all on one device, and
    nobody else's code in it."""
    if any(_EVERYWHERE):
        raise Untouchable
    gradients = torch.is_grad_enabled()
    if gradients and items.requires_grad:
        raise Untouchable
    for part in parts:
        if any(each.training or not _is_known(each) for each in part.modules()):
            raise Untouchable
        for tensor in tensors_of(part):
            if (gradients and tensor.requires_grad) or tensor.device != items.device:
                raise Untouchable


def _is_known(module: Any) -> bool:
    """Whether what a module does follows from its class, and that is one of torch's or transformers'.

    An adapter can be switched off, and a hook changes what it likes, without a weight being changed.
    """
    inside = vars(module)
    kind = type(module)
    if "forward" in inside:
        # accelerate's hooks move tensors between devices, and change no value; they call what was there before.
        before = inside.get("_old_forward")
        if "_hf_hook" not in inside or getattr(before, "__func__", None) is not kind.forward:
            return False
    return (
        _is_theirs(kind)
        and is_theirs_inside(kind.__dict__.get("_tensord_plain", kind).forward)
        and all(map(_is_theirs, inside["_forward_hooks"].values()))
        and all(map(_is_theirs, inside["_forward_pre_hooks"].values()))
    )


def _is_theirs(code: Any) -> bool:
    # transformers has hooks of its own, for outputs that are asked for by name.
    return str(getattr(code, "__module__", "")).startswith(("torch.", "transformers."))


@lru_cache(4096)
def is_theirs_inside(method: Any) -> bool:
    """Whether a function, and each that it wraps, was written in one of their files: a patch often takes the module's
    name over from what it replaces.
    """
    while method is not None:
        if not str(getattr(method, "__globals__", {}).get("__name__", "")).startswith(("torch.", "transformers.")):
            return False
        method = getattr(method, "__wrapped__", None)
    return True


def described(value: Any) -> Any:
    """A value as a key can hold it, type and all: True is not 1."""
    if value is None or type(value) in (bool, int, float, str):
        return [type(value).__name__, value]
    if type(value) in (list, tuple):
        return ["list", [described(each) for each in value]]
    if type(value) is dict and all(type(name) is str for name in value):
        return ["dict", [[name, described(value[name])] for name in sorted(value)]]
    raise Untouchable


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
