"""Replacement policies over the store's columns: which rows are evicted next.

    from .replacement import Facts; POLICIES["hazard"](Facts.of(table.column))

May import numpy; nothing of the store. Owns the policies by name, and what each has learned. Does not own entries, nor
when one is evicted (daemon/room).
"""

from __future__ import annotations

from typing import Final

from .hazard import Hazard
from .lru import LRU
from .replacement import Explained, Facts, Replacement, Turn

__all__ = ["LRU", "POLICIES", "Explained", "Facts", "Hazard", "Replacement", "Turn"]

POLICIES: Final[dict[str, type[Replacement]]] = dict(sorted(Replacement.registered.items()))
