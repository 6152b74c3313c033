"""The copies of a worker's jobs, which a thread begins, from their submission until vLLM hears that they are over.

    submit ─→ queued: its copies wait for their mark ─→ ended: the mark is reached, or the copies have failed ─→ taken

Owns: the thread, and these states. Does not own: the copies, and what the end of a job means (worker.py).

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
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from vllm.v1.kv_offload.base import TransferResult

from ....gpu.interface import Mark
from ....threads.aside import aside
from .host_memory import DONE

_log = logging.getLogger("tensord")


@dataclass(slots=True, eq=False)
class Transfer:
    """One job.

    `after`: the work that its copies wait for. `failed`: whether it has failed before its copies were complete.
    `mark`: reached once its copies are complete. `end(whole)`: called when they are complete, or have failed. `queued`:
    set once these are final.
    """

    job_id: int
    after: Mark = DONE
    failed: bool = False
    mark: Mark = DONE
    end: Callable[[bool], None] | None = None
    size_bytes: int = 0
    queued: threading.Event = field(default_factory=threading.Event)
    began_s: float = field(default_factory=time.monotonic)


class BlockCopier:
    """The jobs of one worker. Thread-safe. `name`: the thread's."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, Transfer] = {}
        self._in_flight: list[Transfer] = []
        self._finished: list[TransferResult] = []
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        aside(self._thread.start)

    def submit(self, job_id: int, mark: Callable[[], Mark], begin: Callable[[Transfer], None]) -> None:
        """A new job. The thread calls `begin`, which queues its copies. `mark`: makes the mark that they wait for."""
        transfer = self._pending[job_id] = Transfer(job_id)
        try:
            transfer.after = mark()
        except RuntimeError as error:
            _log.error("tensord: the GPU has failed: %s; no KV blocks are copied", error)
            transfer.failed = True
        self.call(partial(self._begin, begin, transfer))

    def call(self, work: Callable[[], None]) -> None:
        """Has the thread call `work`, after what it was told before."""
        self._work.put(work)

    def end_reached(self) -> None:
        """Ends the jobs whose copies are complete, or have failed. Does not wait."""
        if self._in_flight:
            with self._lock:
                self._in_flight = [transfer for transfer in self._in_flight if not self._ended(transfer)]

    def wait(self, job_ids: Iterable[int] | None = None) -> None:
        """Waits until the copies of these jobs, or of all, are complete, or have failed."""
        for job_id in list(self._pending) if job_ids is None else job_ids:
            transfer = self._pending.get(job_id)
            if transfer is not None:
                transfer.queued.wait()
                with suppress(RuntimeError):  # the job ends as a failed one
                    transfer.mark.wait()
        self.end_reached()

    def take_finished(self) -> list[TransferResult]:
        """The jobs that ended since the last call. All count as successful for vLLM, which ends the engine
        otherwise."""
        self.end_reached()
        if not self._finished:
            return []
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Ends the thread, and waits for all jobs. Idempotent."""
        self._work.put(None)
        self._thread.join()
        self.wait()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                _log.exception("tensord: a copy of KV blocks failed; the blocks are computed, or not stored")
            # The job refers to memory that others have released already.
            del work

    def _begin(self, begin: Callable[[Transfer], None], transfer: Transfer) -> None:
        try:
            begin(transfer)
        except BaseException:
            transfer.failed = True
            raise
        finally:
            with self._lock:
                self._in_flight.append(transfer)
            transfer.queued.set()
            self.end_reached()

    def _ended(self, transfer: Transfer) -> bool:
        whole = not transfer.failed
        try:
            if not transfer.mark.wait(0):
                return False
        except RuntimeError as error:
            _log.error("tensord: copies of KV blocks failed: %s; the blocks are computed, or not stored", error)
            whole = False
        try:
            if transfer.end is not None:
                transfer.end(whole)
        except Exception:
            _log.exception("tensord: the end of a copy of KV blocks failed")
        took_s = time.monotonic() - transfer.began_s
        self._finished.append(TransferResult(transfer.job_id, True, transfer.size_bytes, took_s))
        self._pending.pop(transfer.job_id, None)
        # The job refers to memory that others have released already.
        transfer.end, transfer.mark = None, DONE
        return True
