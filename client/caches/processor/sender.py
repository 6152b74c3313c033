"""The entries that a sender of the processor cache may refer to, and its puts: items are stored before they are
referred to.

Owns: the rule which entries a sender may refer to, puts that are still unanswered, and the reason why an item is not
stored. Does not own: how long entries are held (loans.py).
Invariants: an entry is held from the moment it counts as stored. An item that a receiver missed does not count as
stored for `seconds`. A sender waits for the daemon's answer to a put, which says that the entry is visible. This takes
milliseconds; sending the tree instead would take a copy too. If the answer is late, the tree is sent and the put goes
on. Until it is answered, no other item is put. So a daemon that does not answer costs one such wait, not one for each
item.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ....errors import (
    LimitReached,
    ObjectTooLarge,
    StoreFull,
    TensordError,
    TimedOut,
    Unavailable,
    UnderPressure,
    UnsupportedLeaf,
)
from ....shm.payloads.recipe import Recipe
from ...core.client import Client
from ...reading.lease import Lease
from ...writing.outcomes import Put
from ..measures import array_bytes
from .loans import Loans
from .payload import Hash, item_payload, stored_tree

_ACCEPTED_MAX: Final = 4096
_HELD_SHARE: Final = 4
# Bytes that a daemon copies in a second on a loaded machine, at least. A large tree's answer may take this much longer.
_SLOW_BYTES_PER_S: Final = 1 << 30
_REFUSALS: Final[tuple[tuple[type[TensordError], str], ...]] = (
    (ObjectTooLarge, "too_large"),
    (UnderPressure, "pressure"),
    (StoreFull, "full"),
    (LimitReached, "full"),
    (UnsupportedLeaf, "unsupported"),
    (TimedOut, "late"),
    (Unavailable, "no_daemon"),
    (TensordError, "refused"),
)


class Sender:
    """The entries and puts of one sender. Thread-safe.

    Args:
        loans: keeps the leases. If its bytes have no limit of their own, they are at most a quarter of the ring.
        wait_s, accepts: `put_wait_s` and `accepts` of ProcessorCache.
    """

    def __init__(self, client: Client, loans: Loans, wait_s: float, accepts: Callable[[Any], bool] | None) -> None:
        self.wait_s = wait_s
        self._client = client
        self._loans = loans
        self._follows_ring = loans.bytes_max == sys.maxsize
        self._accepts = accepts
        self._accepted: set[Recipe] = set()
        self._distrusted: dict[bytes, float] = {}
        self._late: list[tuple[Put, float]] = []

    # ---- entries

    def hold(self, key: bytes, *, counts: bool = False) -> Lease | None:
        """Holds a stored entry from now on. None if it is not stored, or cannot be held. `counts`: as a use."""
        if self._is_distrusted(key):
            return None
        lease = self._client.get(key) if counts else self._client.hold(key)
        if lease is None or not self._fits(lease):
            return None
        view = self._client.link.view
        if self._follows_ring and view is not None:
            self._loans.bytes_max = max(1, view.ring_bytes // _HELD_SHARE)
        return lease if self._loans.promise(key, lease) else None

    def distrust(self, keys: Iterable[bytes]) -> None:
        """Records that a receiver missed the items. No lock: each change of the table is one step."""
        now = time.monotonic()
        for key in [key for key, until in list(self._distrusted.items()) if until <= now]:
            self._distrusted.pop(key, None)
        self._distrusted.update(dict.fromkeys(keys, now + self._loans.seconds))

    def forget(self) -> None:
        self._loans.forget()
        self._distrusted.clear()

    def _is_distrusted(self, key: bytes) -> bool:
        return self._distrusted.get(key, 0.0) > time.monotonic()

    def _fits(self, lease: Lease) -> bool:
        if self._accepts is None or lease._recipe in self._accepted:
            return True
        if not self._accepts(stored_tree(lease)):
            return False
        if len(self._accepted) >= _ACCEPTED_MAX:
            self._accepted.clear()
        if not lease._recipe.is_long:
            self._accepted.add(lease._recipe)
        return True

    # ---- puts

    @property
    def owed_s(self) -> float:
        """As of ProcessorCache. A put's request for a place counts too."""
        owed = self._client.link.puts.owed
        self._late = [(put, began) for put, began in self._late if owed(put, began)]
        return max((time.monotonic() - began for _, began in self._late), default=0.0)

    def store(self, trees: Mapping[bytes, tuple[Hash, Any]]) -> dict[bytes, str]:
        """Puts these trees, and waits until they are visible. Returns by key why a tree was not stored."""
        reasons: dict[bytes, str] = {}
        puts: list[Put] = []
        owing = bool(self.owed_s)
        # One time limit for all of them, so that a daemon without room is waited for once.
        wait_s = self.wait_s
        began = time.monotonic()
        for key, (hash, tree) in trees.items():
            is_distrusted = self._is_distrusted(key)
            # Looked up only where it matters: a lookup waits for this client's own put.
            looks = is_distrusted or (self._accepts is not None and not owing)
            stored = self._client.hold(key) if looks else None
            if stored is not None and is_distrusted:
                reasons[key] = "invalidated"
            elif owing:
                reasons[key] = "late"
            elif stored is not None and not self._fits(stored):
                reasons[key] = "mismatch"
            else:
                try:
                    payload = item_payload(hash, tree)
                    wait_s += array_bytes(tree) / _SLOW_BYTES_PER_S
                    put = self._client.put(key, payload, timeout_s=max(0.0, began + wait_s - time.monotonic()))
                    puts.append(put)
                    owing = isinstance(put.error, TimedOut | LimitReached)
                except Exception as error:
                    # An exception of a leaf's own library (a tensor without memory, a lost device) must not fail the
                    # request.
                    reasons[key] = _reason(error)
        # The wait begins here, unless it began with an earlier unanswered put. Copying until here does not count:
        # sending the tree would have cost a copy too.
        deadline = (began if owing else time.monotonic()) + wait_s
        for put in puts:
            try:
                put.wait(max(0.0, deadline - time.monotonic()))
                late = isinstance(put.error, TimedOut)
            except TimedOut:
                late = True
            if late:
                self._late.append((put, began))
            if put.state not in ("stored", "existed"):
                reasons[put.key] = _reason(put.error)
            elif self.hold(put.key) is None:
                reasons[put.key] = "invalidated" if self._is_distrusted(put.key) else "held"
        return reasons


def _reason(error: BaseException | None) -> str:
    """The reason for passing an item through, from the error of its put."""
    if error is None:
        return "late"
    return next((reason for kind, reason in _REFUSALS if isinstance(error, kind)), "unsupported")
