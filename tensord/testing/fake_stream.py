"""Streams of a fake card: work that is done in order, by a thread of its own, later than it was asked for.

Owns: the order of the work, and when it is done. Does not own what the work is: fake_vram.py's.

Invariant: what is enqueued is done after all that was enqueued before it on the same stream, and in no order at all
with what other streams do.
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


class _Belt:
    """What a stream's thread knows of the stream: not the stream itself, so that it ends with it."""

    def __init__(self) -> None:
        # A SimpleQueue, as finalizers put work on it too, wherever they happen to run.
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
                # As on a real card: what went wrong is told to whoever waits next, and to everybody after.
                self.error = self.error or error


class FakeMark:
    """A point that a stream was told to reach."""

    __slots__ = ("_belt", "_reached")

    def __init__(self, belt: _Belt, reached: threading.Event) -> None:
        self._belt = belt
        self._reached = reached

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the stream has reached it; False if it has not within `timeout_s`.

        Raises:
            RuntimeError: something that the stream did before has failed.
        """
        if not self._reached.wait(timeout_s):
            return False
        if self._belt.error is not None:
            raise RuntimeError("what the stream was told to do has failed") from self._belt.error
        return True


class Hold:
    """Keeps a stream where it is until `release`, or the end of the `with` block."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def release(self) -> None:
        """Lets the stream go on."""
        self._over.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class FakeStream:
    """A stream. Attribute `delay_s`: how long it takes before each piece of work, from now on."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._belt = _Belt()
        threading.Thread(target=self._belt.run, name="tensord fake stream", daemon=True).start()
        weakref.finalize(self, self._belt.works.put, None)

    @property
    def delay_s(self) -> float:
        """Seconds before each piece of work."""
        return self._belt.delay_s

    @delay_s.setter
    def delay_s(self, delay_s: float) -> None:
        self._belt.delay_s = delay_s

    def enqueue(self, work: Work) -> None:
        """Has `work` done after all that was enqueued before.

        Raises:
            UsageError: in a forked child, where nobody would ever do it.
        """
        if os.getpid() != self._pid:
            raise UsageError("this stream was made before a fork, and its thread is the parent's; make another device")
        self.enqueue_from_finalizer(work)

    def enqueue_from_finalizer(self, work: Work) -> None:
        """The same, where nothing may be raised."""
        self._belt.works.put(work)

    def mark(self) -> FakeMark:
        """The point behind all that was enqueued so far."""
        reached = threading.Event()
        self.enqueue(reached.set)
        return FakeMark(self._belt, reached)

    def hold(self) -> Hold:
        """From here on the stream does nothing until the Hold is released."""
        hold = Hold()
        self.enqueue(hold._over.wait)
        return hold
