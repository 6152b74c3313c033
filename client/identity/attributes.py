"""Names what the modules of an encoder are beside their weights: their classes, and numbers such as `layer_norm.eps`.

Owns: which attributes of a module are named, and why the others are not. Invariant: an attribute that is neither listed
here nor of a kind that has a text is none that a key can hold, and the call goes through untouched.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from ...errors import UnsupportedLeaf

_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device})
_SEQUENCES: Final = frozenset({tuple, list, torch.Size})
_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, type)

_NAMED_ELSEWHERE: Final = "in the key by itself"
_CHECKED: Final = "a call with any but torch's and transformers' own goes through untouched"
_LOADING: Final = "of loading, saving and placing weights; the weights are named by their bytes"
_TRAINING: Final = "of training; a call in training mode, or with gradients, goes through untouched"
UNSAID: Final[Mapping[str, str]] = {
    **dict.fromkeys(("_parameters", "_buffers", "_modules", "config"), _NAMED_ELSEWHERE),
    **dict.fromkeys(
        (
            "forward",
            "_old_forward",
            "_hf_hook",
            "_backward_hooks",
            "_backward_pre_hooks",
            "_forward_hooks",
            "_forward_hooks_always_called",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks",
            "_forward_pre_hooks_with_kwargs",
        ),
        _CHECKED,
    ),
    **dict.fromkeys(
        (
            "_ep_plan",
            "_fsdp_plan",
            "_is_hf_initialized",
            "_keep_in_fp32_modules",
            "_keep_in_fp32_modules_strict",
            "_keys_to_ignore_on_load_missing",
            "_keys_to_ignore_on_load_unexpected",
            "_keys_to_ignore_on_save",
            "_load_state_dict_post_hooks",
            "_load_state_dict_pre_hooks",
            "_no_split_modules",
            "_non_persistent_buffers_set",
            "_pp_plan",
            "_skip_keys_device_placement",
            "_state_dict_hooks",
            "_state_dict_pre_hooks",
            "_tp_plan",
            "all_tied_weights_keys",
            "name_or_path",
        ),
        _LOADING,
    ),
    **dict.fromkeys(("training", "_is_full_backward_hook", "gradient_checkpointing", "loss_type"), _TRAINING),
    "_output_capturing_hooks_installed": "transformers' own hooks, which change no value",
    "generation_config": "of what the language model says",
    "warnings_issued": "what was warned of already",
    "_tensord": "the cache's own",
}
"""Attribute → why it is not in a key."""


def attributes_digest(modules: Iterable[Any]) -> str:
    """SHA-256 over the modules' classes and plain attributes, in the order in which they are given, as hex text.

    Raises:
        UnsupportedLeaf: an attribute that no key can hold.
    """
    found: list[Any] = []
    for module in modules:
        kind = type(module)
        # A wrapped module's class has its plain one's name.
        found.append(f"{kind.__module__}.{kind.__qualname__}")
        for name, value in module.__dict__.items():
            if name not in UNSAID:
                found += (name, value if type(value) in _PLAIN else _told(name, value))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _told(name: str, value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _SEQUENCES:
        return [kind.__name__, *(_told(name, each) for each in value)]
    if kind in (set, frozenset):
        return ["set", *sorted(repr(_told(name, each)) for each in value)]
    if kind is dict:
        return ["dict", *sorted(repr((key, _told(name, each))) for key, each in value.items())]
    if kind is functools.partial:
        return ["partial", _told(name, value.func), _told(name, value.args), _told(name, value.keywords)]
    if isinstance(value, _FUNCTIONS) and str(value.__module__).startswith(("torch.", "transformers.")):
        return f"{value.__module__}.{value.__qualname__}"
    raise UnsupportedLeaf(f"a module's attribute {name} is a {kind.__qualname__}, by which nothing can be named")
