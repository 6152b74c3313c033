"""Names the modules of an encoder beyond their weights: classes, and attributes such as `layer_norm.eps`.

Owns: the list of attributes that are left out of a name, with reasons. Does not own: the weights (modules.py).

Invariants: an attribute that is neither listed in UNSAID nor of a type with a text form makes the module unnameable,
and calls of the encoder bypass the cache.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from ...errors import UnsupportedLeaf
from .origin import is_named

_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device})
_SEQUENCES: Final = frozenset({tuple, list, torch.Size})
_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, type)

_NAMED_ELSEWHERE: Final = "part of the key by other means"
_CHECKED: Final = "checked: with functions other than torch's and transformers', the call bypasses the cache"
_LOADING: Final = "for loading, saving and placing weights; the weights are named by their bytes"
_TRAINING: Final = "for training; a call in training mode, or with gradients, bypasses the cache"
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
    "_output_capturing_hooks_installed": "hooks of transformers, which change no value",
    "_previous_max_cache_length": "a record of the last static cache",
    "generation_config": "for the language model's output",
    "warnings_issued": "a record of past warnings",
    "_tensord": "an attribute of this cache",
}
"""Attribute → the reason for leaving it out of a key."""


def attributes_digest(modules: Iterable[Any]) -> str:
    """SHA-256, as hex text, over the modules' classes and plain attributes, in the given order of modules.

    Raises:
        UnsupportedLeaf: an attribute has no text form.
    """
    found: list[Any] = []
    for module in modules:
        kind = type(module)
        # The wrapped class of a module has the name of its plain class.
        found.append(f"{kind.__module__}.{kind.__qualname__}")
        for name, value in module.__dict__.items():
            if name not in UNSAID:
                found += (name, value if type(value) in _PLAIN else _text_form(name, value))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _text_form(name: str, value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _SEQUENCES:
        return [kind.__name__, *(_text_form(name, each) for each in value)]
    if kind in (set, frozenset):
        return ["set", *sorted(repr(_text_form(name, each)) for each in value)]
    if kind is dict:
        return ["dict", *sorted(repr((key, _text_form(name, each))) for key, each in value.items())]
    if kind is functools.partial:
        return ["partial", _text_form(name, value.func), _text_form(name, value.args), _text_form(name, value.keywords)]
    # The result of torch.compile has the same name for every backend.
    if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
        raise UnsupportedLeaf(f"a module's attribute {name} was compiled, and its name does not contain the backend")
    is_theirs = isinstance(value, _FUNCTIONS) and str(value.__module__).startswith(("torch.", "transformers."))
    if is_theirs and is_named(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise UnsupportedLeaf(f"a module's attribute {name} is a {kind.__qualname__}, which cannot be part of a name")
