"""What threads wait on, so that an exception of a signal handler cannot leave it locked.

`threading.Condition` enters and leaves its lock by functions in Python. A signal handler's exception (Ctrl-C) may end
those after the lock was taken, or before it is given back, and then nobody ever has it again. What stands on a
Condition has the same fault: `threading.Event`, and the standard library's `Future`. The lock here is the interpreter's
own, which `with` enters and leaves in one step each.

Invariant: an exception at any point of a wait leaves no lock taken, and at most a waiter's lock that nobody waits for.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Condition(_thread.RLock):  # type: ignore[misc]  # the stub says final, the class does not
    """`threading.Condition` over a reentrant lock, of which a `with` cannot be cut in two.

    To be held once, and not again, by whoever calls `wait`.
    """

    def __init__(self) -> None:
        self._waiters: list[_thread.LockType] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Gives the lock up until `notify_all`, for `timeout` seconds at most; False if that did not come."""
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        limit = -1 if timeout is None else max(0.0, min(timeout, _thread.TIMEOUT_MAX))
        try:
            # Within: what is raised after the release finds the lock taken again below.
            self.release()
            told = waiter.acquire(True, limit)
        finally:
            self.acquire()
        if not told and waiter in self._waiters:
            self._waiters.remove(waiter)
        return told

    def wait_for(self, condition: Callable[[], Any], timeout: float | None = None) -> Any:
        """Waits until `condition()` is true, for `timeout` seconds at most. Its last value."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (found := condition()):
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify_all(self) -> None:
        """Wakes all who wait. The lock is held."""
        while self._waiters:
            self._waiters.pop().release()


class LockEvent:
    """`threading.Event`, over such a lock."""

    __slots__ = ("_changed", "_flag")

    def __init__(self) -> None:
        self._changed = Condition()
        self._flag = False

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        with self._changed:
            self._flag = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._flag:
            with self._changed:
                if not self._flag:
                    self._changed.wait(timeout)
        return self._flag


class LockFuture(Future[Any]):
    """A future that stands on such a lock."""

    _condition: Any

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()
