"""Replacement policies over the store's columns: which rows are evicted next.

    from .replacement import Facts; POLICIES["hazard"](Facts.of(table.column))

May import numpy; nothing of the store. Owns the policies by name, and what each has learned. Does not own entries, nor
when one is evicted (daemon/room).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from .known import Explained, Facts, Turn
from .replacement import Replacement

__all__ = ["POLICIES", "Explained", "Facts", "Replacement", "Turn"]

# A policy is there by its module and its name, also if it derives from another policy.
_modules = [import_module(f".{module.name}", __name__) for module in iter_modules(__path__)]
_classes = {each for module in _modules for each in vars(module).values() if isinstance(each, type)}
_named = [each for each in _classes if issubclass(each, Replacement) and "name" in vars(each)]

POLICIES: Final[dict[str, type[Replacement]]] = {
    policy.name: policy for policy in sorted(_named, key=lambda policy: policy.name)
}
