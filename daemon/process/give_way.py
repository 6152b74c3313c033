"""Threads that give way to programs: nobody waits for what they do, and programs may need the processors.

Owns: the priority of such a thread, and its pauses. Does not own what it does.

A lower priority alone is not enough: what a thread asks of other processes and of the memory costs programs as much as
at any priority. So a thread that had to wait for a processor rests afterwards, for a multiple of the time it worked.
The kernel counts that wait for each thread. Where it does not, only the priority is lowered.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

NICENESS: Final = 10
BUSY_SHARE: Final = 0.02
"""The processors are busy if a thread waited for one for more than this share of the time it worked."""
REST_TIMES: Final = 4.0
"""How long a thread rests while the processors are busy, in times of what it worked."""
REST_S_MOST: Final = 0.2
_COUNTED: Final = Path("/proc/thread-self/schedstat")


class GivesWay:
    """The rests of threads. `ending` ends all of them."""

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._rests_until = threading.local()

    @staticmethod
    def lower_priority() -> None:
        """Lowers the priority of this thread, and of no other. Never raises it."""
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))

    @contextmanager
    def working(self, *, hurried: bool) -> Iterator[None]:
        """The thread works within. First it rests for what it worked before, unless the work is `hurried`."""
        rests_s = getattr(self._rests_until, "at", 0.0) - time.monotonic()
        if rests_s > 0 and not hurried:
            self._ending.wait(rests_s)
        began, waited_s = time.monotonic(), _waited_s()
        try:
            yield
        finally:
            ended = time.monotonic()
            if _waited_s() - waited_s > BUSY_SHARE * (ended - began):
                self._rests_until.at = ended + min(REST_TIMES * (ended - began), REST_S_MOST)


def _waited_s() -> float:
    """The seconds for which this thread was ready to run and had no processor; 0 if the kernel does not say."""
    try:
        return int(_COUNTED.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
