"""Hooks of vLLM's classes and modules.

Owns: that a function is hooked once. Does not own: what a hook does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getattr_static
from types import ModuleType
from typing import Any


def hook(owner: type | ModuleType, name: str, instead: Callable[..., Any]) -> None:
    """Has calls of a method or function go to `instead(method, *arguments)`, whose arguments begin with the object, but
    for methods of a class. What is hooked already, or missing, stays as it is."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_tensord_hook"):
        return

    @wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    hooked._tensord_hook = True  # type: ignore[attr-defined]
    is_bound = isinstance(getattr_static(owner, name), staticmethod | classmethod)
    setattr(owner, name, staticmethod(hooked) if is_bound else hooked)
