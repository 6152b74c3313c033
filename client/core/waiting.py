"""A condition, an event and a future that an exception of a signal handler cannot leave locked.

`threading.Condition` enters and leaves its lock in Python functions. A signal handler's exception (Ctrl-C) may end such
a function after the lock was taken, or before it is given back; then no thread gets the lock again. `threading.Event`
and the standard library's `Future` stand on a Condition, and have the same fault. The lock here is the interpreter's
own, which `with` enters and leaves in one step each. The event has none.

Owns: these three classes. Does not own: what they guard.
Invariants: an exception at any point of a wait leaves no lock taken, and at most a waiter's own lock, which no thread
waits for.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any


class Condition(_thread.RLock):  # type: ignore[misc]  # the stub says final, the class does not
    """`threading.Condition` over a reentrant lock, whose `with` no signal can interrupt half-way.

    A thread that calls `wait` holds the lock exactly once.
    """

    def __init__(self) -> None:
        self._waiters: list[_thread.LockType] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Releases the lock until `notify_all`, for at most `timeout` seconds. Returns False after a timeout."""
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        limit = -1 if timeout is None else max(0.0, min(timeout, _thread.TIMEOUT_MAX))
        try:
            # Inside the try: after an exception that follows the release, `finally` takes the lock again.
            self.release()
            notified = waiter.acquire(True, limit)
        finally:
            self.acquire()
        if not notified and waiter in self._waiters:
            self._waiters.remove(waiter)
        return notified

    def wait_for(self, condition: Callable[[], Any], timeout: float | None = None) -> Any:
        """Waits until `condition()` is true, for at most `timeout` seconds. Returns its last value."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (found := condition()):
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify_all(self) -> None:
        """Wakes all waiting threads. The caller holds the lock."""
        while self._waiters:
            self._waiters.pop().release()


class LockEvent:
    """`threading.Event` without a lock: a signal handler may set it, or wait for a thread that does, at any moment."""

    __slots__ = ("_flag", "_waiters")

    def __init__(self) -> None:
        self._flag = False
        self._waiters: list[_thread.LockType] = []

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        while self._waiters:
            with suppress(IndexError):  # another thread sets it too
                self._waiters.pop().release()

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._flag:
            return True
        waiter = _thread.allocate_lock()
        waiter.acquire()
        limit = -1 if timeout is None else max(0.0, min(timeout, _thread.TIMEOUT_MAX))
        try:
            # SYNC POINT: added before the flag is read; `set` sets the flag before it looks for waiters.
            self._waiters.append(waiter)
            return self.is_set() or waiter.acquire(True, limit) or self.is_set()
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)


class LockFuture(Future[Any]):
    """A future on `Condition`."""

    _condition: Any

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()
