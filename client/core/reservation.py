"""Reservations: arrays in the inbox in which a caller produces a payload.

Owns: handing a region over exactly once: by commit, by abandon, or when the reservation is collected. Does not own: the
region's memory (inbox.py), nor the put (puts.py).
Invariants: a reservation is committed at most once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from . import nested
from .aside import aside, hand_over
from .fields import check_flag, check_key
from .inbox import Region
from .put_options import PutOptions
from .puts import Put

Commit = Callable[[Region, bytes, PutOptions, float], tuple[Put, float]]
"""Begins the put of a region, with a key, options and a time limit in seconds. Returns the put, and the deadline."""


class Reservation:
    """Arrays in the inbox, to be filled in place and committed without another copy in this process.

    `tree` has writable numpy arrays for leaves. Write them until `commit`. A write between `commit` and the end of the
    put may reach the entry; a write after the end of the put reaches no entry.

    Example:
        >>> reserved = cache.reserve({"hidden": tensord.Spec((576, 64), "float32")})
        >>> reserved.tree["hidden"][:] = 1.0                       # written in shared memory
        >>> reserved.commit(key, tokens=576, wait=True).state
        'stored'
    """

    __slots__ = ("__weakref__", "_call_off", "_commit", "_region", "_sender", "tree")

    def __init__(self, tree: Any, region: Region, commit: Commit, sender: object) -> None:
        """`sender`: see nested.py."""
        self.tree = tree
        self._region: Region | None = region
        self._call_off = region.let_go_with(self)
        self._commit = commit
        self._sender = sender

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a reservation is memory of this process, so it cannot be pickled or copied: commit it here; another "
            "process reads the entry by its key"
        )

    def commit(
        self,
        key: bytes,
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        agent: str = "",
        parent: bytes | None = None,
        wait: bool = False,
        timeout_s: float = 5.0,
    ) -> Put:
        """Commits the arrays as the payload of `key`. Arguments, result and errors as for `Client.put`. In a signal
        handler that has interrupted a put of the client it is refused, and the reservation stays.

        Raises:
            ValueError: the reservation was committed or abandoned before.
        """
        wait = check_flag("wait", wait)
        options = PutOptions(tokens, ttl_s, cost_ms=cost_ms, agent=agent, parent=parent)
        if nested.within(self._sender):
            put = Put(check_key(key))
            put.settle("refused", nested.refusal())
            return put
        put, deadline = aside(partial(self._hand_over, key, options, timeout_s))
        return put.wait(max(0.0, deadline - time.monotonic())) if wait else put

    def _hand_over(self, key: bytes, options: PutOptions, timeout_s: float) -> tuple[Put, float]:
        region, self._region, self.tree = self._region, None, None
        if region is None:
            raise ValueError("this reservation was committed or abandoned before; call reserve again")
        self._call_off()
        return self._commit(region, key, options, timeout_s)

    def abandon(self) -> None:
        """Returns the memory to the inbox once no array over it lives."""
        hand_over(self._give_back)

    def _give_back(self) -> None:
        region, self._region, self.tree = self._region, None, None
        if region is not None:
            self._call_off()
            region.release()
