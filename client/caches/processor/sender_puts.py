"""The puts of a sender of the processor cache: items are stored before they are referred to.

Owns: the wait for the daemon, puts that are still unanswered, and the reason why an item is not stored. Does not own:
which stored entries a sender may refer to (sender_entries.py).
Invariants: a sender waits for the daemon's answer to a put, which says that the entry is visible. This takes
milliseconds; sending the tree instead would take a copy too. If the answer is late, the tree is sent and the put goes
on. Until it is answered, no other item is put. So a daemon that does not answer costs one such wait, not one for each
item.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from ...core.client import Client
from ...writing.outcomes import Put
from ..measures import array_bytes
from .payload import Hash, item_payload
from .sender_entries import SenderEntries

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
)


class SenderPuts:
    """The puts of one sender.

    Args:
        wait_s: seconds to wait until the puts of a call are visible, plus one second for each GiB.
    """

    def __init__(self, client: Client, entries: SenderEntries, wait_s: float) -> None:
        self.wait_s = wait_s
        self._client = client
        self._entries = entries
        self._late: list[tuple[Put, float]] = []

    @property
    def owed_s(self) -> float:
        """For how many seconds the daemon has not answered a put that is not waited for any more, or its request for a
        place; 0 if there is none.
        """
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
            if self._entries.is_distrusted(key) and self._client.contains(key):
                reasons[key] = "invalidated"
                continue
            if owing:
                reasons[key] = "late"
                continue
            if self._entries.is_foreign(key):
                reasons[key] = "mismatch"
                continue
            payload = item_payload(hash, tree)
            try:
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
            except TimedOut:
                self._late.append((put, began))
            if isinstance(put.error, TimedOut):
                self._late.append((put, began))
            if put.state not in ("stored", "existed"):
                reasons[put.key] = _reason(put.error)
            elif not self._entries.hold(put.key):
                reasons[put.key] = "invalidated" if self._entries.is_distrusted(put.key) else "held"
        return reasons


def _reason(error: BaseException | None) -> str:
    """The reason for passing an item through, from the error of its put."""
    if error is None:
        return "late"
    for kind, reason in _REFUSALS:
        if isinstance(error, kind):
            return reason
    return "refused" if isinstance(error, TensordError) else "unsupported"
