"""Names the inputs of a torch module's output other than data and weights: configuration, attributes, machine.

Owns: the lists of what is left out, with reasons; and which package a function comes from. Does not own: weights
(modules.py).

Invariants: an attribute such as `layer_norm.eps` that is neither listed in UNSAID_ATTRIBUTES nor has a form
(described.py) makes the module unnameable, and its calls bypass the cache. A Python function counts as a package's only
if its code, and that of every function that it wraps, was written there. Its `__module__` does not tell: a patch often
copies that from the function it replaces (`functools.wraps`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any, Final

import torch
import transformers

from ...errors import UnsupportedLeaf
from .described import by_name, described, refused

LIBRARIES: Final = frozenset({"torch", "transformers"})
UNSAID_FIELDS: Final[Mapping[str, str]] = by_name(
    {
        "a path; the files there are named by their content": "_name_or_path",
        "the encoder's class is part of the key": "architectures",
        "the dtype of the weights is part of their fingerprint": "dtype torch_dtype",
        "for the language model, which runs after the encoder": "text_config",
        "the version that wrote the file; the running version is part of the key": "transformers_version",
    }
)
"""Field of a configuration → the reason for leaving it out of a key."""
UNSAID_ATTRIBUTES: Final[Mapping[str, str]] = by_name(
    {
        "part of the key by other means": "_parameters _buffers _modules config",
        "checked: with functions other than torch's and transformers', the call bypasses the cache": (
            "forward _old_forward _hf_hook _backward_hooks _backward_pre_hooks _forward_hooks "
            "_forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs"
        ),
        "for loading, saving and placing weights; the weights are named by their bytes": (
            "_ep_plan _fsdp_plan _is_hf_initialized _keep_in_fp32_modules _keep_in_fp32_modules_strict "
            "_keys_to_ignore_on_load_missing _keys_to_ignore_on_load_unexpected _keys_to_ignore_on_save "
            "_load_state_dict_post_hooks _load_state_dict_pre_hooks _no_split_modules _non_persistent_buffers_set "
            "_pp_plan _skip_keys_device_placement _state_dict_hooks _state_dict_pre_hooks _tp_plan "
            "all_tied_weights_keys name_or_path"
        ),
        "for training; a call in training mode, or with gradients, bypasses the cache": (
            "training _is_full_backward_hook gradient_checkpointing loss_type"
        ),
        "hooks of transformers, which change no value": "_output_capturing_hooks_installed",
        "a record of the last static cache": "_previous_max_cache_length",
        "for the language model's output": "generation_config",
        "a record of past warnings": "warnings_issued",
        "an attribute of this cache": "_tensord",
    }
)
"""Attribute → the reason for leaving it out of a key."""
_PLAIN: Final = frozenset({bool, int, float, str, NoneType})
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, type)


def is_from(value: Any, packages: frozenset[str] = LIBRARIES) -> bool:
    """Whether a function, and each function that it wraps, was written in one of `packages`. For another callable:
    whether its class was. Built-in functions count as from these packages."""
    while value is not None:
        if isinstance(value, partial):
            value = value.func
        elif isinstance(value, MethodType):
            value = value.__func__
        elif isinstance(value, BuiltinFunctionType) or _package(value) in packages:
            value = getattr(value, "__wrapped__", None)
        else:
            return False
    return True


def is_named(function: Any) -> bool:
    """Whether a function of the libraries is identified by its name: it has no bound arguments, and no closure other
    than the function that it wraps."""
    return (
        isinstance(function, _FUNCTIONS)
        and (getattr(function, "__closure__", None) is None or hasattr(function, "__wrapped__"))
        and is_from(function)
    )


def _package(value: Any) -> str:
    if isinstance(value, FunctionType):
        name = value.__globals__.get("__name__")
    else:
        name = value.__module__ if isinstance(value, type) else type(value).__module__
    return str(name).split(".", 1)[0]


def configs_of(modules: Iterable[Any]) -> list[Any]:
    return list({id(config): config for each in modules if (config := vars(each).get("config")) is not None}.values())


def settings(modules: Collection[Any]) -> list[str]:
    """The present settings of a model, including changes on the living model: configurations, and the modules' classes
    and plain attributes. Raises UnsupportedLeaf if an attribute has no text form."""
    found = [attributes_digest(modules)]
    for config in configs_of(modules):
        said = {name: value for name, value in config.to_dict().items() if name not in UNSAID_FIELDS}
        found += [json.dumps(said, sort_keys=True, default=str), str(getattr(config, "_attn_implementation", None))]
    return found


def attributes_digest(modules: Iterable[Any]) -> str:
    """SHA-256, as hex text, over the modules' classes and attributes, in the given order of modules. Raises
    UnsupportedLeaf if an attribute has no form."""
    found: list[Any] = []
    for module in modules:
        kind = type(module)
        # The wrapped class of a module has the name of its plain class.
        found.append(f"{kind.__module__}.{kind.__qualname__}")
        for name, value in module.__dict__.items():
            if name not in UNSAID_ATTRIBUTES:
                try:
                    found += (name, value if type(value) in _PLAIN else described(value, _part))
                except UnsupportedLeaf as error:
                    raise UnsupportedLeaf(f"a module's attribute {name}: {error}") from None
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _part(value: Any) -> Any:
    """An attribute, or a part of one, that is a function of the libraries, perhaps with arguments."""
    if type(value) is partial:
        return ["partial", *(described(each, _part) for each in (value.func, value.args, value.keywords))]
    # The result of torch.compile has the same name for every backend.
    if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
        raise UnsupportedLeaf("it was compiled, and its name does not contain the backend")
    is_theirs = isinstance(value, _FUNCTIONS) and str(value.__module__).startswith(("torch.", "transformers."))
    if is_theirs and is_named(value):
        return {"function": f"{value.__module__}.{value.__qualname__}"}
    return refused(value)


@cache
def _choose_attention(device: torch.device) -> None:
    """Has torch choose in which order it tries the kernels of attention. It does so at the first attention of a process
    on a GPU, whatever the order was set to before, so the first call would have another name than all later ones."""
    states = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(states, states, states)


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
