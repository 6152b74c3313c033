"""Reads one source in a thread of its own, so that a driver that hangs delays no other source.

Owns: the thread, the reading under way, and the pause before an absent source is tried again. Does not own the calls of
the source, nor the meaning of an answer (`chain`).

It is a daemon thread: a call that never returns does not keep the process from ending.

Invariants: one call of the source is under way at most. An answer is taken once. A failure of the source, of any kind,
never ends its thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from .reading import GaugeAbsent, GaugeFailed, Result, Source, SourceAnswer, one_line

DEADLINE_S: Final = 3.0
"""Seconds that a reading may take. After that the source hangs, and its gauges are stale until it answers."""
ABSENT_S: Final = 60.0
"""Seconds after which an absent source is tried again: a driver may be loaded after the daemon has started."""
THREAD_NAME: Final = "tensord-gauge-"


class SourceThread:
    """A source, and the thread that reads it. The thread starts with the first reading.

    `began_at`: when the reading under way began; None if none is.

    Args:
        answered: called in that thread after each reading. Must not block.
    """

    def __init__(self, source: Source, answered: Callable[[], object]) -> None:
        self.name = source.name
        self.began_at: float | None = None
        self._source = source
        self._answered = answered
        self._orders: SimpleQueue[float | None] = SimpleQueue()
        self._answers: deque[SourceAnswer] = deque(maxlen=1)
        self._absent: SourceAnswer | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def has_answer(self) -> bool:
        """Whether `take` would return an answer."""
        return bool(self._answers)

    def begin(self, now: float) -> None:
        """Begins a reading, unless one is under way. An absent source is asked again after ABSENT_S only."""
        if self.began_at is not None or self._closing:
            return
        if self._absent is not None and now - self._absent.began_at < ABSENT_S:
            self._answers.append(self._absent._replace(began_at=now))
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=THREAD_NAME + self.name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The process may have no more threads (TasksMax, ulimit -u).
                failed = GaugeFailed(f"it has no thread to be read in: {error}")
                self._answers.append(SourceAnswer(failed, now))
                return
            self._thread = thread
        self.began_at = now
        self._orders.put(now)

    def take(self) -> SourceAnswer | None:
        """The answer of the last reading, once; None if there is none, or no new one."""
        return self._answers.pop() if self._answers else None

    def hanging_since(self, now: float) -> float | None:
        """When the reading under way began if it has taken longer than DEADLINE_S; else None."""
        began_at = self.began_at
        return began_at if began_at is not None and now - began_at > DEADLINE_S else None

    def stop(self) -> None:
        """Has the thread close the source and end, as soon as the reading under way returns. Never waits."""
        self._closing = True
        self._orders.put(None)
        if self._thread is None:
            self._source.close()

    def join(self, timeout_s: float) -> bool:
        """Waits until the thread has ended, after `stop`. False if it has not within `timeout_s`."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (now := self._orders.get()) is not None:
            answer = SourceAnswer(self._read(now), now)
            self._absent = answer if isinstance(answer.result, GaugeAbsent) else None
            self._answers.append(answer)
            self.began_at = None
            self._answered()
        self._source.close()

    def _read(self, now: float) -> Result | GaugeFailed:
        try:
            return self._source.read(now)
        except GaugeFailed as failed:
            return failed
        except BaseException as error:
            # An error in a source is a failure of that source, logged like any other. Sampling goes on, also after a
            # SystemExit of a library, which would end this thread.
            return GaugeFailed(one_line(error))
