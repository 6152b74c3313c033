"""Puts an object of tensord's in front of a method of one instance, by the instance's class.

Owns: the class that does so. Does not own: the object. Invariants: copies and pickles of the instance are of the plain
class.
"""

from __future__ import annotations

from functools import cache as remembered
from functools import update_wrapper
from typing import Any

import torch


def plain_class(module: Any) -> type:
    """The instance's class without the wrapper."""
    kind = type(module)
    plain: type = kind.__dict__.get("_tensord_plain", kind)
    return plain


def wrap(instance: Any, method_name: str, ours: object) -> None:
    """Has calls of the instance's method go to `ours`, with the instance and the arguments."""
    instance.__class__ = _wrapped_class(plain_class(instance), method_name)
    vars(instance)["_tensord"] = ours


def unwrap(instance: Any) -> None:
    """Undoes `wrap`, if it was done."""
    instance.__class__ = plain_class(instance)
    vars(instance).pop("_tensord", None)


@remembered
def _wrapped_class(plain: type, method_name: str) -> type:
    """A subclass of the same name, by which transformers and diffusers know their classes. Its method calls the object
    `_tensord` of the instance. A copied attribute of an instance would still call the module it was made for."""
    original: Any = getattr(plain, method_name)
    jit: Any = torch.jit

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = vars(self).get("_tensord")
        if ours is None or torch.compiler.is_compiling() or jit.is_tracing():
            return getattr(plain, method_name)(self, *args, **kwargs)
        return ours(self, args, kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        # Copies and pickles are of the plain model: a client cannot be copied, and this class cannot be imported.
        state = {name: value for name, value in vars(self).items() if name != "_tensord"}
        return _empty, (plain,), state

    # Keeps the signature and the documentation of the original.
    update_wrapper(method, original)
    body = {
        method_name: method,
        "__reduce_ex__": reduced,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_tensord_plain": plain,
    }
    return type(plain.__name__, (plain,), body)


def _empty(plain: type) -> Any:
    """An instance of `plain` without state."""
    return object.__new__(plain)
