"""Leases that a sender keeps for receivers: entries that it has referred to, and that another process will read.

A lease is *promised* to the thread that asked for the entry, until that thread releases it. It is *lent* once a
reference to it was sent. If room is needed, the oldest leases that are only lent are dropped: usually they were read
long ago, and a late receiver reports the loss. A promised lease is never dropped for room; the new lease is refused
instead.

Owns: how many leases of how many bytes are kept, and for how long. Does not own: where the leases come from.
Invariants: at most `entries_max` leases and `bytes_max` bytes of payloads. No lease is kept for longer than `seconds`
after it was last promised or lent; a timer ends it without further calls. The leases are ordered by their expiry.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

from ...arguments.checks import check_count, check_seconds
from ...reading.lease import Lease
from ...threads import forks
from ...threads.aside import aside


@dataclass(slots=True)
class _Held:
    lease: Lease
    handle: bytes
    ends_at: float = 0.0
    lent: bool = False
    promised_to: set[int] = field(default_factory=set)


class HeldLeases:
    """Keeps leases for receivers. Thread-safe. The child of a fork holds nothing.

    Args:
        entries_max: limit of leases.
        bytes_max: limit of their payloads' bytes, tree headers and padding included.
        seconds: how long a lease is kept after it was last promised or lent.

    Raises:
        UsageError: a limit is out of its range.
    """

    def __init__(self, entries_max: int, bytes_max: int, seconds: float) -> None:
        self.entries_max = check_count("entries_max", entries_max, sys.maxsize, 1)
        self.bytes_max = check_count("bytes_max", bytes_max, sys.maxsize, 1)
        self.seconds = check_seconds("seconds", seconds, above_0=True)
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._bytes = 0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        forks.follow(self, forks.Place.HELD_LEASES)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes of the payloads of all leases."""
        return self._bytes

    def get(self, key: bytes) -> Lease | None:
        """The lease that is kept under `key`, or None."""
        held = self._held.get(key)
        return held.lease if held is not None else None

    def promise(self, key: bytes, lease: Lease) -> bool:
        """Keeps `lease` for the calling thread. A lease that is already kept under `key` stays, unless the entry was
        stored anew since then: the kept lease is the one that receivers find.

        Returns:
            False if it is not kept: the promised leases leave no room, the lease is a copy (which keeps no entry from
                eviction), or no timer thread can be started. Without a timer thread all leases are dropped; otherwise
                those that were kept before stay.
        """
        with self._lock:
            held = before = self._held.get(key)
            handle = lease.handle()
            if held is None or handle not in (None, held.handle):
                if handle is None or not self._make_room(lease.payload_bytes, before):
                    return False
                held = _Held(lease, handle)
                if before is not None:
                    self._drop(key)
                    held.lent, held.promised_to = before.lent, before.promised_to
                self._held[key] = held
                self._bytes += lease.payload_bytes
            held.promised_to.add(threading.get_ident())
            return self._renew(key, held)

    def lend(self, key: bytes) -> bool:
        """Turns the calling thread's promise of `key` into a lent lease. Returns False if nothing is
        kept under `key`.
        """
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return False
            held.lent = True
            held.promised_to.discard(threading.get_ident())
            return self._renew(key, held)

    def release(self) -> None:
        """Ends all promises to the calling thread. Lent leases stay until they expire."""
        ident = threading.get_ident()
        with self._lock:
            for key in [key for key, held in self._held.items() if ident in held.promised_to]:
                held = self._held[key]
                held.promised_to.discard(ident)
                if not held.promised_to and not held.lent:
                    self._drop(key)

    def recall(self, key: bytes) -> None:
        """Ends the loan of `key`. Only threads that it is promised to keep the lease."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                held.lent = False
                if not held.promised_to:
                    self._drop(key)

    def clear(self) -> None:
        """Drops all leases."""
        with self._lock:
            self._held.clear()
            self._bytes = 0
            self._stop_timer()

    def after_fork_in_child(self) -> None:
        """The leases belong to the parent, and a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._timer = None
        self._held = OrderedDict()
        self._bytes = 0

    # ---- internal

    def _make_room(self, payload_bytes: int, before: _Held | None) -> bool:
        """Whether another lease of `payload_bytes` fits, or one in place of `before`, which stays until then. Drops
        leases that are only lent.
        """
        more_entries = 1 if before is None else 0
        more_bytes = payload_bytes - (0 if before is None else before.lease.payload_bytes)
        if self._has_room(more_entries, more_bytes):
            return True
        others = [(key, held) for key, held in self._held.items() if held is not before]
        promised = [held.lease.payload_bytes for _, held in others if held.promised_to]
        if len(promised) >= self.entries_max or sum(promised) + payload_bytes > self.bytes_max:
            return False
        for key in [key for key, held in others if not held.promised_to]:
            self._drop(key)
            if self._has_room(more_entries, more_bytes):
                break
        return True

    def _has_room(self, more_entries: int, more_bytes: int) -> bool:
        return len(self._held) + more_entries <= self.entries_max and self._bytes + more_bytes <= self.bytes_max

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._held.pop(key).lease.payload_bytes

    def _renew(self, key: bytes, held: _Held) -> bool:
        held.ends_at = time.monotonic() + self.seconds
        self._held.move_to_end(key)
        return self._timer is not None or self._start_timer()

    def _start_timer(self) -> bool:
        """Starts the timer. If no thread can be started, drops all leases and returns False."""
        first = next(iter(self._held.values()))
        # The timer refers weakly to this object, so that it can be collected.
        timer = threading.Timer(max(0.0, first.ends_at - time.monotonic()), _expire, [weakref.ref(self)])
        timer.name, timer.daemon = "tensord-holds", True
        try:
            aside(timer.start)
        except (RuntimeError, MemoryError):
            self._held.clear()
            self._bytes = 0
            return False
        self._timer = timer
        return True

    def _stop_timer(self) -> None:
        if self._timer is not None:
            aside(self._timer.cancel)
            self._timer = None

    def _end_expired(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._timer is not threading.current_thread():
                # The timer fired before it was cancelled.
                return
            self._timer = None
            while self._held and next(iter(self._held.values())).ends_at <= now:
                self._drop(next(iter(self._held)))
            if self._held:
                self._start_timer()


def _expire(reference: weakref.ref[HeldLeases]) -> None:
    holds = reference()
    if holds is not None:
        holds._end_expired()
