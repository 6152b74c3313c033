"""What a `PrefixCached` has in one process: the thread that puts, the fingerprint of the weights, the prefix cache.

Owns: the thread and its queue. Does not own: what is put. Invariants: `submit` never waits. At most WAITING_MAX jobs
wait. The thread ends its jobs before the interpreter ends.
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
from ...identity.modules import Fingerprint
from ...prefix.cache import PrefixCache
from ...prefix.put import PrefixPut

__all__ = ["ProcessState"]

WAITING_MAX: Final = 16
"""Calls whose blocks wait for the thread. They hold their caches in memory."""


class ProcessState:
    """The thread that puts, and what else must not be inherited by a fork: locks may be held by threads that the child
    does not have. Thread-safe."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.fingerprint = Fingerprint()
        self.prefixes: PrefixCache | None = None
        self._thread = ThreadPoolExecutor(1, "tensord-prefixes")
        self._lock = threading.Lock()
        self._jobs: list[Future[PrefixPut | None]] = []

    def submit(self, job: Any, *args: Any) -> bool:
        """Queues a job. False if too many wait."""
        with self._lock:
            self._jobs = [each for each in self._jobs if not _is_settled(each)]
            if sum(not each.done() for each in self._jobs) >= WAITING_MAX:
                return False
            with suppress(RuntimeError):  # the interpreter is ending
                self._jobs.append(self._thread.submit(job, *args))
                return True
            return False

    def flush(self, timeout_s: float) -> bool:
        """Waits until all jobs have run, and their puts are settled. False if that took longer."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            jobs = list(self._jobs)
        if wait_for(jobs, timeout_s).not_done:
            return False
        for job in jobs:
            put = job.result()
            if put is not None:
                try:
                    put.wait(max(0.0, deadline - time.monotonic()))
                except TensordError:
                    return False
        return True


def _is_settled(job: Future[PrefixPut | None]) -> bool:
    if not job.done():
        return False
    put = job.result()
    return put is None or put.state != "sent"
