"""Returns pages of the ring to the kernel and allocates them again, in a thread.

Owns: the thread, and the outcome of each effect on pages. Does not own: which pages (`core.residency`), nor how the
kernel is asked (`segments`).

Invariant: every effect has an outcome, even if the kernel refuses it, until `close`. There is one thread, since the
kernel has one lock for all changes to the pages of a file.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...errors import TensordError
from ..config.sections import MemorySection
from ..forms import effects, events
from ..process.logs import logger
from .segments import Segments

_log = logger("store")


class Pages:
    """Carries out effects on the pages of `memory`. `report` takes each outcome; the thread calls it."""

    def __init__(self, memory: Segments, report: Callable[[events.Punched | events.Allocated], object]) -> None:
        self._memory = memory
        self._report = report
        self._thread = ThreadPoolExecutor(1, "tensord-pages")

    def submit(self, effect: effects.Punch | effects.Allocate, config: MemorySection) -> None:
        """Queues an effect. `config` says how pages are allocated."""
        self._thread.submit(lambda: self._report(self._outcome(effect, config)))

    def close(self) -> None:
        """Drops the effects that are queued, and waits for the current one. The next daemon finds the pages as they
        are."""
        self._thread.shutdown(cancel_futures=True)

    def _outcome(
        self, effect: effects.Punch | effects.Allocate, config: MemorySection
    ) -> events.Punched | events.Allocated:
        if isinstance(effect, effects.Punch):
            try:
                self._memory.punch(effect.offset, effect.size_bytes)
            except OSError as error:
                # The core gets Punched all the same, so that no span is placed in these pages. The reported resident
                # bytes are too low then.
                _log.error(
                    "cannot return pages of the ring to the kernel; they stay allocated and unused",
                    size_bytes=effect.size_bytes,
                    why=str(error),
                )
            return events.Punched(effect.offset)
        try:
            self._memory.allocate(
                effect.offset, effect.size_bytes, prefault=config.prefault, huge_pages=config.huge_pages
            )
        except TensordError as error:
            return events.Allocated(effect.offset, error)
        except Exception as error:
            return events.Allocated(effect.offset, TensordError(f"the pages cannot be allocated: {error!r}"))
        return events.Allocated(effect.offset)
