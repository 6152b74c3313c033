"""A ring that is mapped here, for whoever is handed the name of bytes that another process pins.

Owns: turning a handle into a lease. Does not own the mapping (ringmap.py), nor the pin, which is the lender's.

    scheduler:  lease = client.get(key); send(lease.handle())          # and keep `lease` until the worker is done
    worker:     lease = client.ring().borrow(received)                 # no index, no message: it cannot be evicted
"""

from __future__ import annotations

from typing import Final

from ..errors import BadTree
from ..shm.recipe import Recipe, recipe
from .lease import Lease, lease_over
from .ringmap import RingMap

_RECIPES_MAX: Final = 4096


class Ring:
    """One ring's memory. It goes on working when its client is attached elsewhere, closed, or without a daemon."""

    __slots__ = ("_map", "_recipes")

    def __init__(self, mapped: RingMap, recipes: dict[bytes, Recipe]) -> None:
        """`recipes` by their tree headers; shared with whoever reads the same ring."""
        self._map = mapped
        self._recipes = recipes

    @property
    def identity(self) -> bytes:
        """16 bytes: which ring it is. Every process of the host sees the same, daemons' restarts change nothing."""
        return self._map.identity

    def borrow(self, handle: bytes) -> Lease | None:
        """A lease on what another process pins, without a pin of one's own: no lookup, and no use is counted.

        It is right for as long as the lender keeps the lease that gave the handle, or a view of it; after that its
        bytes may become another entry's, so the lender must know when the borrower is done.

        Returns:
            The lease; None if the handle is another ring's, or the span there is not (or no more) what it names, or
            the bytes are no handle.
        """
        named = self._map.named(handle)
        if named is None:
            return None
        start, span = named
        header = self._map.copied(start, span.tree_bytes).tobytes()
        try:
            known = self._recipes.get(header) or learned(self._recipes, header)
        except BadTree:
            return None
        if known.end_bytes > span.image_bytes:
            return None
        return lease_over(self._map, start, span.image_bytes, known)


def learned(recipes: dict[bytes, Recipe], header: bytes) -> Recipe:
    """The recipe of a tree header, kept in `recipes` from now on.

    Raises:
        BadTree: the bytes are no tree header.
    """
    if len(recipes) >= _RECIPES_MAX:
        recipes.clear()
    known = recipes[header] = recipe(header)
    return known
