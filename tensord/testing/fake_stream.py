"""Streams of a fake card. A thread of each stream executes queued work in order, later than it was queued.

Owns: the order and the time of execution. Does not own: the work itself (fake_vram.py).

Invariants: work runs after all work queued earlier on the same stream, and in no particular order relative to other
streams.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Self

from ..errors import UsageError

Work = Callable[[], object]


class _WorkQueue:
    """The part of a stream that its thread refers to. The stream itself can be collected, which ends the thread."""

    def __init__(self) -> None:
        # A SimpleQueue, since finalizers put work on it too, in any thread and at any point.
        self.works: Final[SimpleQueue[Work | None]] = SimpleQueue()
        self.delay_s = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        while (work := self.works.get()) is not None:
            if self.delay_s > 0:
                time.sleep(self.delay_s)
            try:
                work()
            except BaseException as error:
                # As on a real card, the first error is raised in every later wait.
                self.error = self.error or error


class FakeMark:
    """A point in the work of a stream, after all work queued when the mark was made."""

    __slots__ = ("_queue", "_reached")

    def __init__(self, belt: _WorkQueue, reached: threading.Event) -> None:
        self._queue = belt
        self._reached = reached

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the stream has reached the mark. False if it has not within `timeout_s` seconds.

        Raises:
            RuntimeError: earlier work of the stream has failed.
        """
        if not self._reached.wait(timeout_s):
            return False
        if self._queue.error is not None:
            raise RuntimeError("what the stream was told to do has failed") from self._queue.error
        return True


class Hold:
    """Stops a stream until `release`, or until the end of the `with` block."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def release(self) -> None:
        """Lets the stream continue."""
        self._over.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class FakeStream:
    """A stream. `delay_s`: seconds that it waits before each piece of work, from now on."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._queue = _WorkQueue()
        threading.Thread(target=self._queue.run, name="tensord fake stream", daemon=True).start()
        weakref.finalize(self, self._queue.works.put, None)

    @property
    def delay_s(self) -> float:
        """Seconds that the stream waits before each piece of work."""
        return self._queue.delay_s

    @delay_s.setter
    def delay_s(self, delay_s: float) -> None:
        self._queue.delay_s = delay_s

    def enqueue(self, work: Work) -> None:
        """Queues `work` after all work queued before.

        Raises:
            UsageError: in a forked child, which has no thread to execute the work.
        """
        if os.getpid() != self._pid:
            raise UsageError("this stream was made before a fork, and its thread is the parent's; make another device")
        self.enqueue_from_finalizer(work)

    def enqueue_from_finalizer(self, work: Work) -> None:
        """`enqueue` without the check, for finalizers, which must not raise."""
        self._queue.works.put(work)

    def mark(self) -> FakeMark:
        """A mark after all work queued so far."""
        reached = threading.Event()
        self.enqueue(reached.set)
        return FakeMark(self._queue, reached)

    def hold(self) -> Hold:
        """Stops the stream after all work queued so far, until the Hold is released."""
        hold = Hold()
        self.enqueue(hold._over.wait)
        return hold
