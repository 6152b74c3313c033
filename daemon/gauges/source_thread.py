"""Reads one source in a thread of its own, so that a driver that hangs delays no other source.

Owns: the thread, the reading under way, and the pause before an absent source is tried again. Does not own the calls of
the source, nor the meaning of an answer (`chain`).

It is a daemon thread: a call that never returns does not keep the process from ending.

Invariants: one call of the source is under way at most. An answer is taken once. A failure of the source, of any kind,
never ends its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from .reading import GaugeAbsent, GaugeFailed, Result, Source, SourceAnswer, one_line

DEADLINE_S: Final = 3.0
"""Seconds that a reading may take. After that the source hangs, and its gauges are stale until it answers."""
ABSENT_S: Final = 60.0
"""Seconds after which an absent source is tried again: a driver may be loaded after the daemon has started."""
THREAD_NAME: Final = "tensord-gauge-"


class SourceThread:
    """A source, and the thread that reads it. The thread starts with the first reading.

    Args:
        answered: called in that thread after each reading. Must not block.
    """

    def __init__(self, source: Source, answered: Callable[[], object]) -> None:
        self._source = source
        self._answered = answered
        self._changed = threading.Condition()
        self._began_at: float | None = None
        self._answer: SourceAnswer | None = None
        self._absent: tuple[float, GaugeAbsent] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The name of the source."""
        return self._source.name

    @property
    def began_at(self) -> float | None:
        """When the reading under way began; None if none is."""
        return self._began_at

    @property
    def has_answer(self) -> bool:
        """Whether `take` would return an answer."""
        return self._answer is not None

    def begin(self, now: float) -> None:
        """Begins a reading, unless one is under way. An absent source is asked again after ABSENT_S only."""
        with self._changed:
            if self._began_at is not None or self._closing:
                return
            if self._absent is not None and now - self._absent[0] < ABSENT_S:
                self._answer = SourceAnswer(self._absent[1], now)
                return
            try:
                self._started()
            except RuntimeError as error:
                # The process may have no more threads (TasksMax, ulimit -u).
                self._answer = SourceAnswer(GaugeFailed(f"it has no thread to be read in: {error}"), now)
                return
            self._began_at = now
            self._changed.notify()

    def take(self) -> SourceAnswer | None:
        """The answer of the last reading, once; None if there is none, or no new one."""
        with self._changed:
            answer, self._answer = self._answer, None
            return answer

    def hanging_since(self, now: float) -> float | None:
        """When the reading under way began if it has taken longer than DEADLINE_S; else None."""
        began_at = self._began_at
        return began_at if began_at is not None and now - began_at > DEADLINE_S else None

    def stop(self) -> None:
        """Has the thread close the source and end, as soon as the reading under way returns. Never waits."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            self._source.close()

    def join(self, timeout_s: float) -> bool:
        """Waits until the thread has ended, after `stop`. False if it has not within `timeout_s`."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _started(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=THREAD_NAME + self.name, daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (now := self._next()) is not None:
            result = self._read(now)
            with self._changed:
                self._absent = (now, result) if isinstance(result, GaugeAbsent) else None
                self._answer = SourceAnswer(result, now)
                self._began_at = None
            self._answered()
        self._source.close()

    def _next(self) -> float | None:
        """Waits for the time of the next reading. None: the source is to be closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._began_at is not None)
            return None if self._closing else self._began_at

    def _read(self, now: float) -> Result | GaugeFailed:
        try:
            return self._source.read(now)
        except GaugeFailed as failed:
            return failed
        except BaseException as error:
            # An error in a source is a failure of that source, logged like any other. Sampling goes on, also after a
            # SystemExit of a library, which would end this thread.
            return GaugeFailed(one_line(error))
