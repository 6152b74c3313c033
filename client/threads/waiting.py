"""A condition, an event and a future that an exception of a signal handler cannot leave locked, and waits under gevent.

`threading.Condition` enters and leaves its lock in Python functions. A signal handler's exception (Ctrl-C) may end such
a function after the lock was taken, or before it is given back; then no thread gets the lock again. `threading.Event`
and the standard library's `Future` stand on a Condition, and have the same fault. The lock here is the interpreter's
own, which `with` enters and leaves in one step each. The event has none. At most a waiter's own lock stays taken.

gevent runs many greenlets in one thread, and replaces what waits in the standard library. Beside `thread=False`
threads are the system's still, but the queue of the standard library serves the greenlets of one thread only. There
`SimpleQueue` is the interpreter's own, and `let_greenlets_run` waits in place of a lock.
"""

from __future__ import annotations

import _queue
import _thread
import queue
import sys
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from ...ipc.messages.schema import DURATION_S_MAX

if TYPE_CHECKING:
    SimpleQueue = queue.SimpleQueue
else:
    # Between threads as they are in this process: the system's, or greenlets if gevent has replaced them too.
    SimpleQueue = (_queue if isinstance(_thread.start_new_thread, BuiltinFunctionType) else queue).SimpleQueue


def queues_serve() -> bool:
    """Whether threads may wait in a SimpleQueue. Not if gevent has replaced them since this module was loaded."""
    return SimpleQueue is not _queue.SimpleQueue or isinstance(_thread.start_new_thread, BuiltinFunctionType)


class Condition(_thread.RLock):  # type: ignore[misc]  # the stub says final, the class does not
    """`threading.Condition` over a reentrant lock. A thread that calls `wait` holds the lock exactly once."""

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


def let_greenlets_run(future: Future[Any], timeout_s: float) -> None:
    """In a greenlet of gevent, waits for the future so that the other greenlets of its thread run: one of them may
    compute what this one waits for. Elsewhere returns at once."""
    hubs: Any = sys.modules.get("gevent._hub_local")
    hub = hubs.get_hub_if_exists() if hubs is not None and not future.done() else None
    if hub is None or hub is import_module("greenlet").getcurrent():
        return
    done = import_module("gevent.event").Event()
    future.add_done_callback(lambda _: done.set())
    done.wait(min(max(0.0, timeout_s), DURATION_S_MAX))
