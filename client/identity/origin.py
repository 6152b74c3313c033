"""Who wrote a function, by the file that its code is from: a patch often takes its module's name over from what it
replaces (`functools.wraps`).
"""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

LIBRARIES: Final = frozenset({"torch", "transformers"})


def is_from(value: Any, packages: frozenset[str] = LIBRARIES) -> bool:
    """Whether a function, and each that it wraps, was written in one of these packages.

    Of another callable: whether its class was. A function that is not written in Python counts as theirs.
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
    """Whether a function of the libraries is known by its name: it has no arguments bound, and no values of a closure
    other than what it wraps."""
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
