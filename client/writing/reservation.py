"""Reservations: arrays in which a caller produces a payload, before the payload is put.

Owns: the arrays, until they are put or forgotten. Does not own: the put (puts.py).
Invariants: the memory is this process's alone; a commit copies it. A reservation is committed at most once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ...errors import NotEnoughMemory
from ...shm.payloads.packing import Whole, pack_spec
from ...shm.payloads.recipe import recipe
from ..arguments.put_options import PutOptions
from .outcomes import Put
from .put import PutPayload, too_large

Commit = Callable[[bytes, PutPayload, PutOptions, bool, float | None], Put]
"""Puts a payload: key, payload, options, whether to wait, time limit in seconds."""


class Reservation:
    """Arrays to be filled in place and then committed.

    `tree` has writable numpy arrays for leaves. Write them until `commit`; what is written later reaches no entry.

    Example:
        >>> reserved = cache.reserve({"hidden": tensord.Spec((576, 64), "float32")})
        >>> reserved.tree["hidden"][:] = 1.0
        >>> reserved.commit(key, tokens=576, wait=True).state
        'stored'
    """

    __slots__ = ("__weakref__", "_commit", "_payload", "tree")

    def __init__(self, spec: Any, depth_max: int, object_bytes_max: int, commit: Commit) -> None:
        """
        Raises:
            UnsupportedLeaf: a leaf of `spec` is of a type that `Client.put` does not take.
            ObjectTooLarge, NotEnoughMemory: the payload is too large.
        """
        packed = pack_spec(spec, depth_max)
        if packed.payload_bytes > object_bytes_max:
            raise too_large(packed.payload_bytes, object_bytes_max)
        try:
            memory = np.empty(packed.payload_bytes, np.uint8)
        except MemoryError:
            raise NotEnoughMemory(f"this process has no memory for a payload of {packed.payload_bytes} bytes") from None
        packed.write(memory.data, 0)
        self.tree = recipe(packed.header).view(memory)
        self._payload: Whole | None = Whole(packed.header, memory)
        self._commit = commit

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
        timeout_s: float | None = None,
    ) -> Put:
        """Puts the arrays as the payload of `key`. Arguments, result and errors as for `Client.put`.

        Raises:
            ValueError: the reservation was committed or abandoned before.
        """
        payload, self._payload, self.tree = self._payload, None, None
        if payload is None:
            raise ValueError("this reservation was committed or abandoned before; call reserve again")
        options = PutOptions(tokens, ttl_s, cost_ms=cost_ms, agent=agent, parent=parent)
        return self._commit(key, payload, options, wait, timeout_s)

    def abandon(self) -> None:
        """Forgets the arrays."""
        self._payload = self.tree = None
