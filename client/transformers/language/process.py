"""The thread of a `PrefixCached` that puts.

Owns: the thread and its queue. Does not own: what is put. Invariants: `submit` never waits. At most WAITING_MAX jobs
wait. The thread ends its jobs before the interpreter ends. The child of a fork begins with a thread of its own.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any, Final

from ....errors import TensordError
from ...prefix.put import PrefixPut

WAITING_MAX: Final = 16
"""Calls whose blocks wait for the thread. They hold their caches in memory."""


class PutThread:
    """Carries jobs out that put. Thread-safe."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, "tensord-prefixes")
        self._lock = threading.Lock()
        self._jobs: list[Future[PrefixPut | None]] = []

    def submit(self, job: Any, *args: Any) -> bool:
        """Queues a job. False if too many wait, or the interpreter is ending."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock, suppress(RuntimeError):
            self._jobs = [each for each in self._jobs if not _is_settled(each)]
            if sum(not each.done() for each in self._jobs) < WAITING_MAX:
                self._jobs.append(self._thread.submit(job, *args))
                return True
        return False

    def flush(self, timeout_s: float) -> bool:
        """Waits until all jobs have run, and their puts are settled. False if that took longer."""
        deadline = time.monotonic() + timeout_s
        jobs = list(self._jobs) if self._pid == os.getpid() else []
        if wait_for(jobs, timeout_s).not_done:
            return False
        try:
            for put in filter(None, [job.result() for job in jobs]):
                put.wait(max(0.0, deadline - time.monotonic()))
        except TensordError:
            return False
        return True


def _is_settled(job: Future[PrefixPut | None]) -> bool:
    if not job.done():
        return False
    put = job.result()
    return put is None or put.state != "sent"
