"""Has another thread do what no exception of a signal handler may cut short.

Python runs signal handlers in the main thread alone, between any two instructions of it. An exception that one raises
(Ctrl-C, a time limit by SIGALRM) may so end any function half-way, with a table half changed or a message half sent.
Calls of the main thread that change what a client shares with its other threads are therefore carried out here, and the
main thread waits for their end on a lock of the interpreter's. Calls of other threads are carried out where they are,
and so are puts, which are too frequent: one that is cut short ends the connection (puts.py).

Owns: the threads that do it, started as they are needed. Does not own what they do.

Invariant: work that was handed over is done to its end, whatever becomes of the call that handed it over.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from ...errors import DaemonUnavailable

Result = TypeVar("Result")
_IDLE_MAX: Final = 2
"""Threads that are kept though nothing is to be done."""


class _Task:
    """Work with its outcome. `done` is released when there is one."""

    __slots__ = ("done", "error", "result", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = _thread.allocate_lock()
        self.done.acquire()

    def carry_out(self) -> None:
        work, self.work = self.work, None
        assert work is not None
        try:
            self.result = work()
        except BaseException as error:
            self.error = error
        finally:
            del work
            self.done.release()


_main = threading.main_thread().ident
_tasks: SimpleQueue[_Task] = SimpleQueue()
_waited_for: set[_Task] = set()
_idle = 0
_counting = threading.Lock()


def aside(work: Callable[[], Result]) -> Result:
    """`work()`, which an exception of a signal handler cannot end."""
    if _thread.get_ident() != _main:
        return work()
    task = _Task(work)
    del work
    try:
        _waited_for.add(task)
        _tasks.put(task)
        _have_threads()
        with task.done:
            pass
    finally:
        # One step: a signal is looked for after it.
        _waited_for.discard(task)
    try:
        if task.error is not None:
            raise task.error
        result: Result = task.result
        return result
    finally:
        # An error's traceback has this frame: a cycle, which would keep the caller's payload.
        del task


def _have_threads() -> None:
    if _tasks.qsize() <= _idle:
        return
    try:
        _thread.start_new_thread(_begin, ())
    except RuntimeError:
        # No more threads are to be had, as at the interpreter's end.
        _do_all()


def _begin() -> None:
    """In the new thread, which gets another started: `Thread.start` waits for it, and no signal may end that either."""
    try:
        threading.Thread(target=_serve, name="tensord-aside", daemon=True).start()
    except RuntimeError:
        _do_all()


def _serve() -> None:
    global _idle
    process = os.getpid()
    while True:
        with _counting:
            if _idle >= _IDLE_MAX:
                return
            _idle += 1
        task = _tasks.get()
        if os.getpid() != process:
            return
        with _counting:
            _idle -= 1
        task.carry_out()
        del task


def _do_all() -> None:
    try:
        while True:
            _tasks.get_nowait().carry_out()
    except Empty:
        return


def _in_child() -> None:
    """After a fork: the threads are the parent's, and so is what they were doing."""
    global _main, _tasks, _idle, _counting
    _main = _thread.get_ident()
    _tasks, _idle, _counting = SimpleQueue(), 0, threading.Lock()
    for task in list(_waited_for):
        # A signal handler forked within the call.
        task.work, task.error = None, DaemonUnavailable("this process was forked off while the call was under way")
        with suppress(RuntimeError):  # it was done just before
            task.done.release()
    _waited_for.clear()


os.register_at_fork(after_in_child=_in_child)
