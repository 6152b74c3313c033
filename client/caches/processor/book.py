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
from typing import Final

from ...arguments.checks import check_count, check_seconds
from ...reading.lease import Lease

UNREAD_S_MAX: Final = 600.0


class LeaseBook:
    """The kept leases. Thread-safe.

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
        self.promised_bytes = self.lent_bytes = 0
        """Bytes of the payloads of all promises, and of all loans."""
        self._numbers = count(1)
        self.after_fork_in_child()

    # ---- promises

    def promise(self, key: bytes, lease: Lease) -> bool:
        """Keeps `lease` for the calling thread, in place of an earlier one under `key`.

        Returns:
            False if it is not kept: promised leases leave no room, or the lease is a copy, which keeps no entry from
            eviction.
        """
        at = threading.get_ident(), key
        with self._lock:
            if lease.handle() is None:
                return at in self._promised
            before = self._promised.get(at)
            entries = len(self._promised) + (before is None)
            size_bytes = self.promised_bytes + lease.payload_bytes - (before[0].payload_bytes if before else 0)
            if entries > self.entries_max or size_bytes > self.bytes_max:
                return False
            self._promised[at] = lease, time.monotonic()
            self.promised_bytes = size_bytes
            return True

    def promised(self, key: bytes) -> Lease | None:
        """The lease that is promised to the calling thread under `key`, or None."""
        found = self._promised.get((threading.get_ident(), key))
        return found[0] if found is not None else None

    def release(self, keys: Iterable[bytes] | None = None) -> None:
        """Ends the promises of these keys to the calling thread; by default all."""
        ident = threading.get_ident()
        with self._lock:
            for key in [key for of, key in self._promised if of == ident] if keys is None else keys:
                self._break((ident, key))

    def _break(self, at: tuple[int, bytes]) -> None:
        found = self._promised.pop(at, None)
        if found is not None:
            self.promised_bytes -= found[0].payload_bytes

    # ---- loans

    def lend(self, lease: Lease) -> int | None:
        """Keeps `lease` until its loan is done. Returns the loan's number; None if there is no room."""
        with self._lock:
            now = time.monotonic()
            while self._lent and not self._has_room(lease):
                number, (_, since) = next(iter(self._lent.items()))
                if now - since < self.seconds:
                    return None
                self._end(number)
            if not self._has_room(lease):
                return None
            number = next(self._numbers)
            self._lent[number] = lease, now
            self.lent_bytes += lease.payload_bytes
            return number

    def lent(self, number: int) -> Lease | None:
        """The lease of a loan; None if it has ended."""
        found = self._lent.get(number)
        return found[0] if found is not None else None

    def done(self, numbers: Iterable[int]) -> None:
        """Ends these loans."""
        with self._lock:
            for number in numbers:
                self._end(number)

    def _has_room(self, lease: Lease) -> bool:
        return len(self._lent) < self.entries_max and self.lent_bytes + lease.payload_bytes <= self.bytes_max

    def _end(self, number: int) -> None:
        found = self._lent.pop(number, None)
        if found is not None:
            self.lent_bytes -= found[0].payload_bytes

    # ---- both

    def end_old(self) -> None:
        """Ends the promises and loans whose time is over."""
        with self._lock:
            now = time.monotonic()
            for at in [at for at, (_, since) in self._promised.items() if now - since >= self.seconds]:
                self._break(at)
            for number in [number for number, (_, since) in self._lent.items() if now - since >= UNREAD_S_MAX]:
                self._end(number)

    def forget(self) -> None:
        """Ends all promises. Loans stay."""
        with self._lock:
            self._promised.clear()
            self.promised_bytes = 0

    def clear(self) -> None:
        """Ends all promises and loans."""
        with self._lock:
            self._promised.clear()
            self._lent.clear()
            self.promised_bytes = self.lent_bytes = 0

    def after_fork_in_child(self) -> None:
        """The leases belong to the parent, and a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._promised: dict[tuple[int, bytes], tuple[Lease, float]] = {}
        # Ordered by the time of lending.
        self._lent: dict[int, tuple[Lease, float]] = {}
        self.promised_bytes = self.lent_bytes = 0
