"""The leases that a sender keeps: promised to its threads, and lent to receivers.

A lease is *promised* to the thread that asked for the entry, until that thread releases it. It is *lent* once a
reference to it was sent, until a receiver has read it.

Owns: how many leases of how many bytes are kept, and for how long. Does not own: where leases come from, nor how
receivers say that they have read one (loans.py).
Invariants: at most `entries_max` leases with `bytes_max` bytes of payloads are promised, and as many are lent. A
promise ends after `seconds`. A loan ends once it is done, or after UNREAD_S_MAX; within `seconds` nothing else ends it,
and after that it makes room for a new one. `end_old` ends what is over.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from itertools import count
from typing import Any, Final

from ...arguments.checks import check_count, check_seconds
from ...reading.lease import Lease

UNREAD_S_MAX: Final = 600.0


class Kept:
    """Leases by a name, in the order of their addition, with `size_bytes` of payloads."""

    def __init__(self) -> None:
        self.leases: dict[Any, tuple[Lease, float]] = {}
        self.size_bytes = 0

    def get(self, name: Any) -> Lease | None:
        """The lease of this name, or None."""
        return self.leases.get(name, (None, 0.0))[0]

    def end(self, name: Any) -> None:
        """Ends a lease, if there is one of this name."""
        lease, _ = self.leases.pop(name, (None, 0.0))
        self.size_bytes -= 0 if lease is None else lease.payload_bytes

    def older(self, seconds: float) -> list[Any]:
        """The names of the leases that were added so long ago."""
        until = time.monotonic() - seconds
        return [name for name, (_, since) in self.leases.items() if since <= until]


class LeaseBook:
    """The kept leases: `promises` by thread and key, and `loans` by number. Thread-safe.

    Args:
        entries_max: limit of leases.
        bytes_max: limit of their payloads' bytes, tree headers and padding included.
        seconds: how long a lease is promised, and how long new loans cannot replace a loan.

    Raises:
        UsageError: a limit is out of its range.
    """

    def __init__(self, entries_max: int, bytes_max: int, seconds: float) -> None:
        self.entries_max = check_count("entries_max", entries_max, sys.maxsize, 1)
        self.bytes_max = check_count("bytes_max", bytes_max, sys.maxsize, 1)
        self.seconds = check_seconds("seconds", seconds, above_0=True)
        self._numbers = count(1)
        self.clear_in_child()

    # ---- promises

    def promise(self, key: bytes, lease: Lease) -> bool:
        """Keeps `lease` for the calling thread, in place of an earlier one under `key`. False if it is not kept:
        promised leases leave no room, or the lease is a copy, which keeps no entry from eviction."""
        name = threading.get_ident(), key
        with self._lock:
            if lease.handle() is None:
                return name in self.promises.leases
            self.promises.end(name)
            return self._add(self.promises, name, lease)

    def promised(self, key: bytes) -> Lease | None:
        """The lease that is promised to the calling thread under `key`, or None."""
        return self.promises.get((threading.get_ident(), key))

    def release(self, keys: Iterable[bytes] | None = None) -> None:
        """Ends the promises of these keys to the calling thread; by default all."""
        ident = threading.get_ident()
        with self._lock:
            for key in [key for of, key in self.promises.leases if of == ident] if keys is None else keys:
                self.promises.end((ident, key))

    # ---- loans

    def lend(self, lease: Lease) -> int | None:
        """Keeps `lease` until its loan is done. Returns the loan's number; None if there is no room."""
        with self._lock:
            number, old = next(self._numbers), iter(self.loans.older(self.seconds))
            while not self._add(self.loans, number, lease):
                replaced = next(old, None)
                if replaced is None:
                    return None
                self.loans.end(replaced)
            return number

    def done(self, numbers: Iterable[int]) -> None:
        """Ends these loans."""
        with self._lock:
            for number in numbers:
                self.loans.end(number)

    # ---- both

    def end_old(self) -> None:
        """Ends the promises and loans whose time is over."""
        with self._lock:
            for kept, seconds in ((self.promises, self.seconds), (self.loans, UNREAD_S_MAX)):
                for name in kept.older(seconds):
                    kept.end(name)

    def forget(self) -> None:
        """Ends all promises. Loans stay."""
        with self._lock:
            self.promises = Kept()

    def clear(self) -> None:
        """Ends all promises and loans."""
        with self._lock:
            self.promises, self.loans = Kept(), Kept()

    def clear_in_child(self) -> None:
        """`clear` in the child of a fork: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self.clear()

    def _add(self, kept: Kept, name: Any, lease: Lease) -> bool:
        """Adds a lease, if there is room."""
        size_bytes = kept.size_bytes + lease.payload_bytes
        if len(kept.leases) >= self.entries_max or size_bytes > self.bytes_max:
            return False
        kept.leases[name] = lease, time.monotonic()
        kept.size_bytes = size_bytes
        return True
