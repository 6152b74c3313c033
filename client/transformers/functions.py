"""Which functions an encoder's code calls, and whether they are still those that transformers and torch bring.

Owns: finding these functions by the names in the code of the modules' classes, and what each was when it was first seen
in this process. Does not own hooks, or what an instance was given (conditions).

Seen is another function in a modelling file, in torch.nn.functional or in torch, another method in a class, and another
function under a name in transformers' registries (`AttentionInterface`). Not seen are methods of torch.Tensor that were
replaced, functions whose code or defaults were written in place, and what a function calls by other ways than its name.
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
"""Packages whose functions modelling files call under names of their own."""
_TORCH: Final[tuple[dict[str, Any], ...]] = (vars(torch.nn.functional), vars(torch))
_FOLLOWED: Final = ("transformers.", "torch.nn.functional", "torch.nn.modules.")
_MISSING: Final = object()


class Replaced(Exception):
    """A function is not the one that the library brings."""


@dataclass(slots=True)
class _Calls:
    """What some code calls: functions, by where they are looked up, and the registries where it looks for others."""

    functions: dict[tuple[Any, str], tuple[Mapping[str, Any], str, Any]] = field(default_factory=dict)
    registries: dict[int, Any] = field(default_factory=dict)


_first: dict[tuple[Any, str], tuple[Mapping[str, Any], str, Any]] = {}
"""Class, or id of a module's namespace, and name → the function that was there when it was first looked for."""


def functions_called(kinds: Iterable[type], implementations: Iterable[Any]) -> list[str]:
    """The functions that the code of these classes finds in transformers' registries, as text. All functions that it
    calls are the libraries' own, and are those that were there when they were first looked for.

    Args:
        implementations: names in the registries.

    Raises:
        Replaced: a function is another.
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
    """A function that is looked up by a name, and what it calls.

    Raises:
        Replaced: it was written somewhere else, or is not the one that was there first.
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
