"""Checks that the functions called by an encoder's code are still those of transformers and torch.

Owns: finding these functions by the names in the code of the modules' classes, and the record of each function when
first seen in this process. Does not own: hooks, and attributes of instances (conditions).

Detected replacements: a function in a modelling file, in torch.nn.functional or in torch, a method of a class, and a
function in transformers' registries (`AttentionInterface`). Not detected: replaced methods of torch.Tensor, functions
whose code or defaults were changed in place, and functions that are called other than by name.

Invariants: while a detected replacement is in place, every call of `functions_called` raises Replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from transformers.utils.generic import GeneralInterface

from ..identity.origin import LIBRARIES, is_from, is_named

_EXPECTED: Final = LIBRARIES | frozenset(sys.stdlib_module_names) | {"numpy"}
"""Packages whose functions a modelling file may call."""
_TORCH: Final[tuple[dict[str, Any], ...]] = (vars(torch.nn.functional), vars(torch))
_FOLLOWED: Final = ("transformers.", "torch.nn.functional", "torch.nn.modules.")
_MISSING: Final = object()


class Replaced(Exception):
    """A function is not the library's own."""


@dataclass(slots=True)
class _Calls:
    """The functions that some code calls, by the place of the lookup, and the registries in which the code looks up
    others."""

    functions: dict[tuple[Any, str], tuple[Mapping[str, Any], str, Any]] = field(default_factory=dict)
    registries: dict[int, Any] = field(default_factory=dict)


_first: dict[tuple[Any, str], tuple[Mapping[str, Any], str, Any]] = {}
"""(class, or id of a module's namespace; name) → the function that was there when first looked up."""


def functions_called(kinds: Iterable[type], implementations: Iterable[Any]) -> list[str]:
    """The functions that the code of these classes finds in transformers' registries, as text. Checks that all
    functions that the code calls are the libraries' own, and unchanged since they were first looked up.

    Args:
        implementations: names in the registries.

    Raises:
        Replaced: a function was replaced.
    """
    calls = _calls_of(frozenset(kinds))
    _check(calls)
    found = set()
    for name in implementations:
        for registry in calls.registries.values():
            function = registry.get(name)
            if function is not None:
                if not is_named(function):
                    raise Replaced(f"{name} in transformers' registries")
                _check(_calls_within(function))
            found.add(f"{name} {getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}")
    return sorted(found)


def _check(calls: _Calls) -> None:
    for namespace, name, function in calls.functions.values():
        if namespace.get(name, _MISSING) is not function:
            raise Replaced(name)


@lru_cache(256)
def _calls_of(kinds: frozenset[type]) -> _Calls:
    calls = _Calls()
    for kind in kinds:
        for base in kind.__mro__:
            if "forward" not in vars(base) or base is torch.nn.Module or "_tensord_plain" in vars(base):
                continue
            for name, method in list(vars(base).items()):
                if isinstance(method, FunctionType) and not name.startswith("__"):
                    _add(calls, vars(base), name, base)
    return calls


@lru_cache(256)
def _calls_within(function: Any) -> _Calls:
    calls = _Calls()
    _follow(calls, function)
    return calls


def _add(calls: _Calls, namespace: Mapping[str, Any], name: str, owner: Any) -> None:
    """Adds a function that is looked up by name, and the functions that it calls.

    Raises:
        Replaced: the function is from another package, or not the first one seen under the name.
    """
    at = (owner, name)
    if at in calls.functions:
        return
    function = namespace[name]
    if not is_from(function, _EXPECTED):
        raise Replaced(name)
    entry = _first.setdefault(at, (namespace, name, function))
    if entry[2] is not function:
        raise Replaced(name)
    calls.functions[at] = entry
    _follow(calls, function)


def _follow(calls: _Calls, function: Any) -> None:
    while isinstance(function, FunctionType):
        around = function.__globals__
        if not str(around.get("__name__")).startswith(_FOLLOWED):
            return
        for name in _names_in(function.__code__):
            value = around.get(name)
            if isinstance(value, GeneralInterface):
                calls.registries[id(value)] = value
            elif callable(value):
                _add(calls, around, name, id(around))
            for namespace in _TORCH:
                if callable(namespace.get(name)):
                    _add(calls, namespace, name, id(namespace))
        function = getattr(function, "__wrapped__", None)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
