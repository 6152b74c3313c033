"""Whether an encoder's output follows from what its key has (identity: modules, settings), and from nothing else.

Owns: when a call goes through untouched for what is in the model or its arguments.

Invariant: what is not known to leave the output alone is either in the key, or the call is untouchable.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import torch
import torch.nn.modules.module as _modules

from ..identity.modules import tensors_of

_EVERYWHERE: Final = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
"""Hooks that run with each module there is. torch changes these, and never replaces them."""


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
