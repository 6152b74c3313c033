"""The stored entries that a sender of the processor cache may refer to.

Owns: the rule which entries a sender may refer to, the record of items that a receiver missed, and the trees that the
sender's processor accepts. Does not own: how long entries are held (book.py).
Invariants: an entry is held from the moment it counts as stored. An item that a receiver missed does not
count as stored until the time that `distrust` names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from ....shm.payloads.recipe import Recipe
from ...core.client import Client
from ...reading.lease import Lease
from .book import LeaseBook
from .loans import Lender
from .payload import stored_tree

_ACCEPTED_MAX: Final = 4096
_HELD_SHARE: Final = 4


class SenderEntries:
    """The entries that one sender may refer to. Thread-safe.

    Args:
        book: keeps the leases.
        lender: ends what is over in the book.
        ring_share: whether the book's bytes follow the ring's size: at most a quarter of the ring.
        accepts: as for ProcessorCache.
    """

    def __init__(
        self,
        client: Client,
        book: LeaseBook,
        lender: Lender,
        *,
        ring_share: bool,
        accepts: Callable[[Any], bool] | None,
    ) -> None:
        self._client = client
        self._book = book
        self._lender = lender
        self._ring_share = ring_share
        self._accepts = accepts
        self._accepted: set[Recipe] = set()
        self._lock = threading.Lock()
        self._distrusted: dict[bytes, float] = {}

    def hold(self, key: bytes) -> bool:
        """Whether the entry is stored. It is held from now on. Counts no use."""
        if self.is_distrusted(key):
            return False
        lease = self._client.hold(key)
        return lease is not None and self._fits(lease) and self._promise(key, lease)

    def use(self, key: bytes) -> Lease | None:
        """Counts a use of a stored entry, and holds it. None if it is not stored."""
        if self.is_distrusted(key):
            return None
        lease = self._client.get(key)
        return lease if lease is not None and self._fits(lease) and self._promise(key, lease) else None

    def is_foreign(self, key: bytes) -> bool:
        """Whether a tree is stored that this sender's processor does not accept."""
        found = self._client.hold(key) if self._accepts is not None else None
        return found is not None and not self._fits(found)

    def distrust(self, key: bytes, until: float) -> None:
        """Records that a receiver missed the item. `until`: by time.monotonic."""
        with self._lock:
            self._distrusted.pop(key, None)
            self._distrusted[key] = until

    def is_distrusted(self, key: bytes) -> bool:
        """Whether a receiver missed the item recently."""
        distrusted = self._distrusted
        if not distrusted:
            return False
        now = time.monotonic()
        with self._lock:
            while distrusted and next(iter(distrusted.values())) <= now:
                del distrusted[next(iter(distrusted))]
            return key in distrusted

    def forget(self) -> None:
        """Ends all promises, and trusts all items again."""
        self._book.forget()
        with self._lock:
            self._distrusted.clear()

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()

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

    def _promise(self, key: bytes, lease: Lease) -> bool:
        view = self._client.link.view
        if self._ring_share and view is not None:
            self._book.bytes_max = max(1, view.ring_bytes // _HELD_SHARE)
        return self._lender.start() and self._book.promise(key, lease)
