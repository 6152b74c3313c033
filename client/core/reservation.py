"""Arrays in the inbox, for a payload that is produced where the daemon will copy it from.

Owns: handing the region over exactly once, whether by commit, by abandoning it, or by being forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .aside import aside
from .inbox import Region
from .put_options import PutOptions
from .puts import Put

Commit = Callable[[Region, bytes, PutOptions, float], tuple[Put, float]]
"""Has the put of a region begin, under a key and terms, within so many seconds: the put, and when that time ends."""


class Reservation:
    """Arrays in the inbox, to be filled in place and committed without another copy on this side.

    `tree` has writable numpy arrays for leaves. They may be written until `commit`, and again once the put has
    ended: that reaches nobody. What is written in between may reach this entry.

    Example:
        >>> reserved = cache.reserve({"hidden": tensord.Spec((576, 64), "float32")})
        >>> reserved.tree["hidden"][:] = 1.0                       # written in shared memory
        >>> reserved.commit(key, tokens=576, wait=True).state
        'stored'
    """

    __slots__ = ("__weakref__", "_call_off", "_commit", "_region", "tree")

    def __init__(self, tree: Any, region: Region, commit: Commit) -> None:
        self.tree = tree
        self._region: Region | None = region
        self._call_off = region.let_go_with(self)
        self._commit = commit

    def commit(
        self,
        key: bytes,
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        agent: str = "",
        wait: bool = False,
        timeout_s: float = 5.0,
    ) -> Put:
        """Hands the arrays over as the payload of `key`. See `Client.put`.

        Raises:
            ValueError: it was committed or abandoned before.
        """
        options = PutOptions(tokens, ttl_s, cost_ms=cost_ms, agent=agent)
        put, deadline = aside(partial(self._hand_over, key, options, timeout_s))
        return put.wait(max(0.0, deadline - time.monotonic())) if wait else put

    def _hand_over(self, key: bytes, options: PutOptions, timeout_s: float) -> tuple[Put, float]:
        region, self._region, self.tree = self._region, None, None
        if region is None:
            raise ValueError("this reservation was committed or abandoned before; reserve again")
        self._call_off()
        return self._commit(region, key, options, timeout_s)

    def abandon(self) -> None:
        """Gives the memory back once no array of it lives."""
        aside(self._give_back)

    def _give_back(self) -> None:
        region, self._region, self.tree = self._region, None, None
        if region is not None:
            self._call_off()
            region.release()
