"""All gauges of the daemon: reads each source in a thread of its own, so that a driver that hangs delays no other.

The choice between readings is `chain`'s, the times of samples are the pressure actor's. The threads are daemon threads:
a call that never returns does not keep the process from ending.

Invariants: nothing but `close` waits, and that for CLOSE_S at most. One call of a source is under way at most. An
answer is taken once. A source that fails or hangs ends no thread, and changes no gauge of another source.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from ...ipc.messages.modes import Tier
from ..governor.forms.events import Sample, Sampled, SourceState
from . import sources
from .chain import STALE_S, Chain
from .reading import GaugeAbsent, GaugeFailed, Result, Source, SourceAnswer, failure_of
from .sources.owners import OwnersSource

DEADLINE_S: Final = 3.0
"""Seconds that a reading may take. After that the source is shown as hanging."""
ABSENT_S: Final = 60.0
"""Seconds after which an absent source is tried again: a driver may be loaded after the daemon has started."""
THREAD_NAME: Final = "tensord-gauge-"
READINGS_MAX: Final = 3
"""Intervals after which a reading is too old to be used, if they are longer than STALE_S."""
CLOSE_S: Final = 1.0
"""Seconds that closing waits for sources. A source that hangs is left behind: its thread ends with the process."""


class SourceThread:
    """A source, and the thread that reads it. The thread starts with the first reading, and calls `answered` after
    each, which must not block. `began_at`: when the reading under way began; None if none is."""

    def __init__(self, source: Source, answered: Callable[[], object]) -> None:
        self.name = source.name
        self.began_at: float | None = None
        self._source = source
        self._answered = answered
        self._orders: SimpleQueue[float | None] = SimpleQueue()
        self.answers: deque[SourceAnswer] = deque(maxlen=1)
        """That of the last reading, if nobody has taken it yet."""
        self._absent_until = -math.inf
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self, now: float) -> None:
        """Begins a reading, unless one is under way. An absent source is asked again after ABSENT_S only."""
        if self.began_at is not None or self._closing or now < self._absent_until:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=THREAD_NAME + self.name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The process may have no more threads (TasksMax, ulimit -u).
                failed = GaugeFailed(f"it has no thread to be read in: {error}")
                self.answers.append(SourceAnswer(failed, now))
                return
            self._thread = thread
        self.began_at = now
        self._orders.put(now)

    def hanging_since(self, now: float) -> float | None:
        """When the reading under way began if it has taken longer than DEADLINE_S; else None."""
        began_at = self.began_at
        return began_at if began_at is not None and now - began_at > DEADLINE_S else None

    def stop(self) -> None:
        """Has the thread close the source and end, as soon as the reading under way returns."""
        self._closing = True
        self._orders.put(None)
        if self._thread is None:
            self._source.close()

    def join(self, timeout_s: float) -> bool:
        """Waits until the thread has ended, after `stop`. False if it has not within `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while (now := self._orders.get()) is not None:
            result: Result | GaugeFailed
            try:
                result = self._source.read(now)
            except BaseException as error:
                # An error in a source is a failure of that source, logged like any other. Sampling goes on, also after
                # a SystemExit of a library, which would end this thread.
                result = failure_of(error)
            self._absent_until = now + ABSENT_S if isinstance(result, GaugeAbsent) else -math.inf
            self.answers.append(SourceAnswer(result, now))
            self.began_at = None
            self._answered()
        self._source.close()


if TYPE_CHECKING:
    # The settings read the choices of sources.
    from ..config import sections


class Gauges:
    """The sources of all tiers, each tier with its chain. `tiers`: the sources of each tier, best first; `report`
    passes readings to the OwnersSource among them."""

    def __init__(self, tiers: Sequence[tuple[Tier, Sequence[Source]]], log: Any) -> None:
        self.answered: Callable[[], object] = lambda: None
        """Called after each answer of a source, in the thread of that source. Must not block."""
        self._tiers = [
            (
                Chain(tier, [each.name for each in sources]),
                [SourceThread(each, lambda: self.answered()) for each in sources],
            )
            for tier, sources in tiers
        ]
        self._threads = [each for _, threads in self._tiers for each in threads]
        self._owners = next((each for _, sources in tiers for each in sources if isinstance(each, OwnersSource)), None)
        self._log = log

    def begin(self, now: float) -> None:
        for each in self._threads:
            each.begin(now)

    def has_news(self, now: float) -> bool:
        """Whether `take` has something to tell: an answer, or a source that hangs."""
        return any(each.answers or each.hanging_since(now) is not None for each in self._threads)

    def take(self, now: float, every_s: float = 0.0) -> Sampled:
        """The last readings of all gauges, with the answers that have come. `every_s`: the interval of samples."""
        stale_s = max(STALE_S, READINGS_MAX * every_s)
        samples: list[Sample] = []
        states: list[SourceState] = []
        for chain, threads in self._tiers:
            # Whether a source hangs is asked first: an answer that comes meanwhile ends it.
            hanging = {each.name: since for each in threads if (since := each.hanging_since(now)) is not None}
            answers = {each.name: each.answers.pop() for each in threads if each.answers}
            taken, does, lines = chain.take(answers, hanging, now, stale_s)
            samples += taken
            states += does
            for line in lines:
                getattr(self._log, line.level)(line.event, **line.fields)
        return Sampled(tuple(samples), tuple(states))

    def report(self, device: str, used_bytes: int, total_bytes: int, read_at: float) -> None:
        """Takes a client's reading of `device`, which began at `read_at`, if a source uses it. May be called from any
        thread."""
        if self._owners is not None:
            self._owners.report(device, used_bytes, total_bytes, read_at)

    def close(self) -> None:
        """Has every source closed in its thread, and waits for them, for CLOSE_S in all. Nothing is read after this."""
        for each in self._threads:
            each.stop()
        until = time.monotonic() + CLOSE_S
        left = [each.name for each in self._threads if not each.join(max(0.0, until - time.monotonic()))]
        if left:
            self._log.warning("gauge sources hang, and are left behind", sources=left)


def open_gauges(config: sections.GaugesSection, log: Any, *, root: Path = Path("/")) -> Gauges:
    """The gauges of a validated configuration. No source is opened or loaded before the first reading. `root`: the
    folder that has /sys and /dev."""
    tiers = ((Tier.HOST, config.host), (Tier.DEVICE, config.device))
    return Gauges([(tier, sources.opened(tier, choice, root, config.file)) for tier, choice in tiers], log)
