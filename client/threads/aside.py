"""Runs calls in another thread, so that no exception of a signal handler interrupts them.

Python runs signal handlers in the main thread only, between any two instructions. An exception of a handler (Ctrl-C, a
time limit by SIGALRM) may end any function half-way, with a table half changed or a message half sent. So a call of the
main thread that changes state shared with other threads runs here, and the main thread waits for its end on a lock of
the interpreter. Calls of other threads run in place, and so do calls while the interpreter ends, when no other thread
runs any more. Puts and gets run in place: an exception within one leaves nothing that has to be mended.

Invariants: work that was queued is finished, even if the call that queued it is interrupted.
"""

from __future__ import annotations

import _thread
import os
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any, Final, TypeVar

from ...errors import DaemonUnavailable, ProcessLimit
from .waiting import SimpleQueue, queues_serve

Result = TypeVar("Result")
_IDLE_MAX: Final = 2
"""Limit of idle threads that are kept."""


class _Task:
    """A piece of work and its outcome. `done` is released once there is an outcome."""

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
            done = self.done
            # An error has this frame in its traceback, and must not find itself from there.
            del work, self
            done.release()


_main = threading.main_thread().ident
_tasks: SimpleQueue[_Task] = SimpleQueue()
_waited_for: set[_Task] = set()
_idle = 0
_counting = threading.Lock()


def aside(work: Callable[[], Result]) -> Result:
    """Returns `work()`. An exception of a signal handler cannot interrupt the work."""
    if _thread.get_ident() != _main or sys.is_finalizing():
        return work()
    task = _Task(work)
    del work
    try:
        _waited_for.add(task)
        _tasks.put(task)
        _have_threads()
        task.done.acquire()
    finally:
        # One step: a signal handler runs before or after it.
        _waited_for.discard(task)
    try:
        if task.error is not None:
            raise task.error
        result: Result = task.result
        return result
    finally:
        # An error's traceback refers to this frame: without this there is a cycle, which keeps the caller's payload
        # alive.
        del task


def begin(thread: threading.Thread) -> None:
    """Starts a thread. Raises ProcessLimit if this process can start no more, or its interpreter ends."""
    if sys.is_finalizing():
        # `Thread.start` would wait for ever: no other thread runs any more.
        raise ProcessLimit(f"the interpreter of process {os.getpid()} ends, and starts no thread")
    try:
        aside(thread.start)
    except (RuntimeError, MemoryError):
        raise no_thread() from None


def no_thread() -> ProcessLimit:
    """The error of a process that can start no more threads."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    most = "none" if limit == resource.RLIM_INFINITY else str(limit)
    return ProcessLimit(
        f"process {os.getpid()} can start no thread: its user's limit is {most} (RLIMIT_NPROC), and its cgroup and "
        "its memory have limits too. End threads, or raise the limit (`ulimit -u`, TasksMax of a service)"
    )


def _have_threads() -> None:
    if _tasks.qsize() <= _idle:
        return
    try:
        _thread.start_new_thread(_begin if queues_serve() else _do_all, ())
    except (RuntimeError, MemoryError):
        # The interpreter starts no more threads, for example while it exits.
        _do_all()


def _begin() -> None:
    """Starts the serving thread. `Thread.start` waits for its thread, and no signal may interrupt that wait."""
    try:
        threading.Thread(target=_serve, name="tensord-aside", daemon=True).start()
    except (RuntimeError, MemoryError):
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


def after_fork_in_child() -> None:
    """After a fork: the threads and their work belong to the parent."""
    global _main, _tasks, _idle, _counting
    _main = _thread.get_ident()
    _tasks, _idle, _counting = SimpleQueue(), 0, threading.Lock()
    for task in list(_waited_for):
        # A signal handler forked during the call.
        task.work, task.error = None, DaemonUnavailable("this process was forked during the call; repeat it")
        with suppress(RuntimeError):  # released just before the fork
            task.done.release()
    _waited_for.clear()
