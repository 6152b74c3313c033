"""The package that a function comes from, by the module of its code. Its `__module__` does not tell: a patch often
copies that from the function it replaces (`functools.wraps`).

Owns: this decision. Does not own: what follows from it. Invariants: a Python function counts as a package's only if its
code, and that of every function that it wraps, was written there.
"""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

LIBRARIES: Final = frozenset({"torch", "transformers"})


def is_from(value: Any, packages: frozenset[str] = LIBRARIES) -> bool:
    """Whether a function, and each function that it wraps, was written in one of `packages`.

    For another callable: whether its class was. Built-in functions count as from these packages.
    """
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
        isinstance(function, FunctionType | BuiltinFunctionType | type)
        and (getattr(function, "__closure__", None) is None or hasattr(function, "__wrapped__"))
        and is_from(function)
    )


def _package(value: Any) -> str:
    if isinstance(value, FunctionType):
        name = value.__globals__.get("__name__")
    else:
        name = value.__module__ if isinstance(value, type) else type(value).__module__
    return str(name).split(".", 1)[0]
