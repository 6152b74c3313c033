"""Names what the modules of an encoder are beside their weights: their classes, and numbers such as `layer_norm.eps`.

Owns: which attributes of a module are named, and why the others are not; and how all of a module's attributes are
compared within one process. Invariant: an attribute that is neither listed here nor of a kind that has a text is none
that a key can hold, and the call goes through untouched.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.nn.modules.module as _everywhere

from ...errors import UnsupportedLeaf
from .origin import is_named

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
_WALKED: Final = frozenset({"_parameters", "_buffers", "_modules"})
DEPTH_MAX: Final = 6
"""So deep are attributes of attributes looked at."""


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


def attributes_now(model: Any, kept: list[Any], tensors: list[torch.Tensor]) -> str:
    """SHA-256, as hex text, over what a model's modules are now beside their parameters and buffers: names, classes and
    the classes' methods, hooks (those of all modules too), and every attribute. To be compared within one process.

    What has no text is told by its identity, and its own attributes are looked at. Objects without `__dict__`, and what
    lies DEPTH_MAX deep, are told by their identity alone. What methods call outside the model is not looked at.

    Args:
        kept: gets what was told by its identity. Keep it until the comparison: nothing else has that identity then.
        tensors: gets the tensors among the attributes, whose numbers are not looked at here.
    """
    digest = hashlib.sha256()
    now = _Now(kept, tensors)
    kinds: dict[type, None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kinds.update(dict.fromkeys(type(module).__mro__))
        now.expanded.add(id(module))
        inside = {name: value for name, value in vars(module).items() if name not in _WALKED}
        digest.update(repr((path, now.identity(type(module)), now.told(inside, 0))).encode())
    for kind in kinds:
        digest.update(repr([(name, now.identity(value)) for name, value in vars(kind).items()]).encode())
    hooks = {name: value for name, value in vars(_everywhere).items() if name.startswith("_global_")}
    digest.update(repr(now.told(hooks, 0)).encode())
    return digest.hexdigest()


class _Now:
    """Values as what is equal only if nothing changed, within one process."""

    def __init__(self, kept: list[Any], tensors: list[torch.Tensor]) -> None:
        self.expanded: set[int] = set()
        self._kept = kept
        self._tensors = tensors

    def identity(self, value: Any) -> int:
        self._kept.append(value)
        return id(value)

    def told(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
            operations = -1 if value.is_inference() else value._version
            return "tensor", str(value.dtype), tuple(value.shape), value.data_ptr(), operations
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).digest()
        if depth < DEPTH_MAX:
            if isinstance(value, Mapping):
                return [(self.told(key, depth + 1), self.told(each, depth + 1)) for key, each in value.items()]
            if isinstance(value, list | tuple):
                return [self.told(each, depth + 1) for each in value]
            if isinstance(value, set | frozenset):
                return sorted(repr(self.told(each, depth + 1)) for each in value)
            if isinstance(value, types.FunctionType):
                return self.identity(value), self.identity(value.__code__)
            if not isinstance(value, type | types.ModuleType) and id(value) not in self.expanded:
                inside = getattr(value, "__dict__", None)
                if type(inside) is dict:
                    self.expanded.add(id(value))
                    return self.identity(value), self.identity(kind), self.told(inside, depth + 1)
        return self.identity(value)


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
    # What torch.compile makes of a module has the same name whatever the backend.
    if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
        raise UnsupportedLeaf(f"a module's attribute {name} was compiled, and its name does not say with which backend")
    is_theirs = isinstance(value, _FUNCTIONS) and str(value.__module__).startswith(("torch.", "transformers."))
    if is_theirs and is_named(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise UnsupportedLeaf(f"a module's attribute {name} is a {kind.__qualname__}, by which nothing can be named")
