"""Replacement policies over the store's columns: which rows are evicted next.

    from .replacement import Facts; POLICIES["hazard"](Facts.of(table.column))

May import numpy; nothing of the store. Owns the policies by name, and what each has learned. Does not own entries, nor
when one is evicted (daemon/room).
"""

from __future__ import annotations

from typing import Final

from .hazard import Hazard
from .known import Explained, Facts, Turn
from .lru import LRU
from .replacement import Replacement

__all__ = ["POLICIES", "Explained", "Facts", "Replacement", "Turn"]

POLICIES: Final[dict[str, type[Replacement]]] = {policy.name: policy for policy in (Hazard, LRU)}
