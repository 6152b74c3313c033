"""Leases that are kept for others: what this process has named, and another one is going to read.

Owns: how many leases, of how many bytes, are kept, and for how long. Does not own where they come from.

A lease is *promised* to the thread that asked for the entry, until that thread has done with it, and *lent* to whoever
was told of it. Where room is wanted, the oldest that are only lent go: as a rule they were read long ago, and who comes
later finds out. What is promised never goes for that; the new lease is refused instead.

Invariants: never more than `entries_max` leases, nor more than `bytes_max` bytes of payloads. None is kept for longer
than `seconds` after it was last promised or lent, even if nobody calls any more: a timer sees to it. They stand in
the order in which they end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

from ..core.aside import aside
from ..core.fields import check_count, check_seconds
from ..core.lease import Lease


@dataclass(slots=True)
class _Held:
    lease: Lease
    handle: bytes
    ends_at: float = 0.0
    lent: bool = False
    promised_to: set[int] = field(default_factory=set)


class HeldLeases:
    """See the module. Safe to use from several threads; the child of a fork holds nothing.

    Args:
        entries_max: leases.
        bytes_max: bytes of their payloads, tree headers and padding included.
        seconds: for how long.

    Raises:
        UsageError: a limit that is out of its range.
    """

    def __init__(self, entries_max: int, bytes_max: int, seconds: float) -> None:
        self.entries_max = check_count("entries_max", entries_max, sys.maxsize, 1)
        self.bytes_max = check_count("bytes_max", bytes_max, sys.maxsize, 1)
        self.seconds = check_seconds("seconds", seconds, above_0=True)
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._bytes = 0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        _everywhere.add(self)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes of the payloads of all leases."""
        return self._bytes

    def get(self, key: bytes) -> Lease | None:
        """The lease kept under `key`."""
        held = self._held.get(key)
        return held.lease if held is not None else None

    def promise(self, key: bytes, lease: Lease) -> bool:
        """Keeps `lease` for the calling thread. Where there is one of that key already, that one is kept on, unless the
        entry was removed and stored anew since then: what is held is what others find.

        Returns:
            False where it is not kept: the rest is promised and leaves no room, or the lease is a copy of its own,
            which keeps no entry from being evicted, or there is no thread to end it. What was kept before stays.
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
        """What the calling thread was promised under `key` is kept for others from now on. False if nothing is kept."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return False
            held.lent = True
            held.promised_to.discard(threading.get_ident())
            return self._renew(key, held)

    def release(self) -> None:
        """The calling thread has done with all that it was promised. What is lent stays for its time."""
        ident = threading.get_ident()
        with self._lock:
            for key in [key for key, held in self._held.items() if ident in held.promised_to]:
                held = self._held[key]
                held.promised_to.discard(ident)
                if not held.promised_to and not held.lent:
                    self._drop(key)

    def recall(self, key: bytes) -> None:
        """What was lent under `key` is not: only what it was promised to keeps it."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                held.lent = False
                if not held.promised_to:
                    self._drop(key)

    def clear(self) -> None:
        """Keeps nothing."""
        with self._lock:
            self._held.clear()
            self._bytes = 0
            self._stop_timer()

    def after_fork_in_child(self) -> None:
        """What is held is the parent's to hold; its lock may be taken by a thread that is not here."""
        self._lock = threading.Lock()
        self._timer = None
        self._held = OrderedDict()
        self._bytes = 0

    # ---- inside

    def _make_room(self, payload_bytes: int, before: _Held | None) -> bool:
        """Whether one more, of so many bytes, fits; or one in place of `before`, which stays until then."""
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
        """Without a thread that ends them nothing is kept."""
        first = next(iter(self._held.values()))
        # The timer's thread must not keep alive what nobody else uses any more.
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

    def _end_what_is_over(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._timer is not threading.current_thread():
                # It had fired already when it was stopped.
                return
            self._timer = None
            while self._held and next(iter(self._held.values())).ends_at <= now:
                self._drop(next(iter(self._held)))
            if self._held:
                self._start_timer()


_everywhere: weakref.WeakSet[HeldLeases] = weakref.WeakSet()


def _expire(of: weakref.ref[HeldLeases]) -> None:
    holds = of()
    if holds is not None:
        holds._end_what_is_over()


def _in_child() -> None:
    for holds in list(_everywhere):
        holds.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
