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

# A policy is there by its module.
for _module in iter_modules(__path__):
    import_module(f".{_module.name}", __name__)

POLICIES: Final[dict[str, type[Replacement]]] = {
    policy.name: policy for policy in sorted(Replacement.__subclasses__(), key=lambda policy: policy.name)
}
