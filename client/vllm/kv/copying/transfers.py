"""The jobs of a worker, from their submission until vLLM hears that they are over.

    begin ─→ queued: its copies wait for their mark ─→ ended: the mark is reached, or the copies have failed ─→ taken

Owns: these states. Does not own: the copies, and what the end of a job means (worker.py).

Invariants
- A job ends once, in whichever thread first sees that its mark is reached.
- A job's end comes after all of its copies, also if it has failed. Only if no mark can be made, because the GPU has
  failed, nothing is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from vllm.v1.kv_offload.base import TransferResult

from ....gpu.interface import Mark

_log = logging.getLogger("tensord")


class Transfer:
    """One job.

    `after`: the work that its copies wait for. `failed`: whether it has failed before its copies were complete.
    `mark`: reached once its copies are complete; None if they are. `end(whole)`: called when they are complete, or have
    failed. `queued`: set once these are final.
    """

    __slots__ = ("after", "began_s", "end", "failed", "job_id", "mark", "queued", "size_bytes")

    def __init__(self, job_id: int) -> None:
        self.job_id = job_id
        self.after: Mark | None = None
        self.failed = False
        self.mark: Mark | None = None
        self.end: Callable[[bool], None] = _nothing
        self.size_bytes = 0
        self.queued = threading.Event()
        self.began_s = time.monotonic()


class Transfers:
    """The jobs of one worker. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, Transfer] = {}
        self._in_flight: list[Transfer] = []
        self._finished: list[TransferResult] = []

    def begin(self, job_id: int, mark: Callable[[], Mark | None]) -> Transfer:
        """A new job. `mark`: makes the mark that its copies wait for."""
        transfer = self._pending[job_id] = Transfer(job_id)
        try:
            transfer.after = mark()
        except RuntimeError as error:
            _log.error("tensord: the GPU has failed: %s; no KV blocks are copied", error)
            transfer.failed = True
        return transfer

    def queued(self, transfer: Transfer) -> None:
        """The copies of a job are queued, or it has failed."""
        with self._lock:
            self._in_flight.append(transfer)
        transfer.queued.set()
        self.end_reached()

    def end_reached(self) -> None:
        """Ends the jobs whose copies are complete, or have failed. Does not wait."""
        if not self._in_flight:
            return
        with self._lock:
            self._in_flight = [transfer for transfer in self._in_flight if not self._ended(transfer)]

    def wait(self, job_ids: Iterable[int]) -> None:
        """Waits until the copies of these jobs are complete, or have failed."""
        for job_id in job_ids:
            transfer = self._pending.get(job_id)
            if transfer is not None:
                transfer.queued.wait()
                if transfer.mark is not None:
                    with suppress(RuntimeError):  # the job ends as a failed one
                        transfer.mark.wait()
        self.end_reached()

    def wait_all(self) -> None:
        """Waits for all jobs."""
        self.wait(list(self._pending))

    def take_finished(self) -> list[TransferResult]:
        """The jobs that ended since the last call. All count as successful for vLLM, which ends the engine
        otherwise."""
        self.end_reached()
        if not self._finished:
            return []
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def _ended(self, transfer: Transfer) -> bool:
        whole = not transfer.failed
        try:
            if transfer.mark is not None and not transfer.mark.wait(0):
                return False
        except RuntimeError as error:
            _log.error("tensord: copies of KV blocks failed: %s; the blocks are computed, or not stored", error)
            whole = False
        try:
            transfer.end(whole)
        except Exception:
            _log.exception("tensord: the end of a copy of KV blocks failed")
        took_s = time.monotonic() - transfer.began_s
        self._finished.append(TransferResult(transfer.job_id, True, transfer.size_bytes, took_s))
        self._pending.pop(transfer.job_id, None)
        # The job refers to memory that others have released already.
        transfer.end, transfer.mark = _nothing, None
        return True


def _nothing(whole: bool) -> None:
    pass
