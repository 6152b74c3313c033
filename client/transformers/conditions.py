"""What a model's output depends on beside its input, the checks that it depends on nothing else, and the reasons why
calls ran without sharing.

Owns: the properties of model and arguments for which a call bypasses the cache; the counts of reasons. Does not own:
the names of settings and weights (identity).

Invariants: whatever may change the output is part of the key, or the call bypasses the cache. A reason is logged once
for each object that counts. A reason that is known before the first call is there with 0 calls.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.modules.module as _modules
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import TensordError
from ..identity.modules import Fingerprint, tensors_of
from ..identity.settings import LIBRARIES, configs_of, is_from, is_named, machine, settings

_EVERYWHERE: Final = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
"""Hooks of torch that run with every module. torch changes these dicts, and never replaces them."""
_ACCELERATE: Final = "accelerate.hooks"
_MOVING: Final = frozenset({"ModelHook", "SequentialHook", "AlignDevicesHook", "CpuOffload"})
_HOOKED: Final = ("pre_forward", "post_forward")
_HOOKS_FROM: Final = LIBRARIES | {"accelerate"}
_log = logging.getLogger("tensord")


class NotShared(Exception):
    """The call runs without sharing. The message is the reason, for users."""


class Reasons(Counter[str]):
    """The number of calls for each reason."""

    def add(self, error: Exception, consequence: str) -> None:
        self[self.tell(error, consequence)] += 1

    def tell(self, error: Exception, consequence: str) -> str:
        """Logs the reason with its consequence if it is new. Returns the reason."""
        known = isinstance(error, NotShared | TensordError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        if reason not in self:
            self[reason] = 0
            _log.warning("tensord: %s: %s", consequence, reason, exc_info=None if known else error)
        return reason


def plain_tensor(tensor: Any) -> torch.Tensor:
    """The tensor itself. Raises NotShared unless it is a plain tensor with at least one dimension."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.ndim == 0 or tensor.layout is not torch.strided:
        raise NotShared(f"an argument is a {type(tensor).__name__}; it must be a plain tensor with a dimension")
    plain: torch.Tensor = tensor
    return plain


def state_of(
    parts: Mapping[str, Any], given: torch.Tensor, fingerprint: Fingerprint, around: Iterable[Any] = ()
) -> list[Any]:
    """What the output of modules depends on beside their input, as a JSON value: settings, attention, machine, weights.

    Args:
        parts: the modules that compute, by names of the caller's.
        given: an input, or a tensor on its device.
        fingerprint: of the parts' weights; keeps their hash from call to call.
        around: modules whose own settings count too.

    Raises:
        NotShared: it may depend on more: gradients, dropout, several devices, foreign code in or around the modules.
        UnsupportedLeaf: a setting or a weight has no name.
    """
    modules = [each for part in parts.values() for each in part.modules()]
    gradients = torch.is_grad_enabled()
    if (
        any(_EVERYWHERE)
        or _is_mode_active()
        or (gradients and given.requires_grad)
        or any(each.training or not _is_known(each) for each in modules)
        or any(
            (gradients and tensor.requires_grad) or tensor.device != given.device
            for part in parts.values()
            for tensor in tensors_of(part)
        )
    ):
        names = " or ".join(sorted({type(part).__name__ for part in parts.values()}))
        raise NotShared(
            f"{names} is in training mode, needs gradients, lies on another device than its input, {given.device}, or "
            "has hooks, adapters or other code that is not torch's or transformers'"
        )
    modules = [*around, *modules]
    return [settings(modules), attention_of(modules), machine(given.device), fingerprint.current(parts)]


def attention_of(modules: Iterable[Any]) -> list[str]:
    """The attention functions that the modules' configurations name, as text. Raises NotShared for one that is neither
    torch's nor transformers'."""
    found: list[str] = []
    for name in {getattr(config, "_attn_implementation", None) for config in configs_of(modules)}:
        function = ALL_ATTENTION_FUNCTIONS.get(name)
        if function is not None and not is_named(function):
            raise NotShared(f"the attention function {name!r} was replaced by other code")
        found.append(f"{name} {getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}")
    return sorted(found)


def _is_mode_active() -> bool:
    """Whether a mode may change the behaviour of operators, such as a TorchFunctionMode, or dual numbers are in use."""
    overrides: Any = torch.overrides
    modes = overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    # The default device is a mode too. It is part of the key.
    return (
        any(type(mode) is not DeviceContext for mode in modes)
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def _is_known(module: Any) -> bool:
    """Whether the module's class determines what the module does, and the class is torch's or transformers'. Adapters
    can be switched off, and hooks can change any value, without a change of a weight."""
    inside = vars(module)
    kind = type(module)
    return (
        ("forward" not in inside or _is_placed(module))
        and kind.__module__.startswith(("torch.", "transformers."))
        and _is_method_known(kind.__dict__.get("_tensord_plain", kind).forward)
        # Hooks of transformers itself are allowed. They collect outputs that were asked for by name.
        and all(map(is_from, inside["_forward_hooks"].values()))
        and all(map(is_from, inside["_forward_pre_hooks"].values()))
    )


@lru_cache(4096)
def _is_method_known(method: Any) -> bool:
    """Whether a class's method is the libraries'. Cached, since an encoder has hundreds of modules. Hooks are not
    cached here, since they may hold memory."""
    return is_from(method)


def _is_placed(module: Any) -> bool:
    """Whether an instance's own `forward` is accelerate's wrapper of the class's method, for hooks that move tensors
    between devices and change no value."""
    inside = vars(module)
    around = inside["forward"]
    return (
        type(around) is partial
        and around.args == (module,)
        and not around.keywords
        and isinstance(around.func, FunctionType)
        and around.func.__globals__.get("__name__") == _ACCELERATE
        and getattr(inside.get("_old_forward"), "__func__", None) is type(module).forward
        and _is_moving(inside.get("_hf_hook"))
    )


def _is_moving(hook: Any) -> bool:
    """Whether a hook is one of accelerate's own that only move tensors. Subclasses may do anything, so they are not."""
    kind = type(hook)
    if kind.__module__ != _ACCELERATE or kind.__qualname__ not in _MOVING:
        return False
    if any(not is_from(getattr(kind, name), _HOOKS_FROM) or name in vars(hook) for name in _HOOKED):
        return False
    return kind.__qualname__ != "SequentialHook" or all(map(_is_moving, hook.hooks))
