"""A worker's side: copies chunks from the ring into the KV cache, and stores chunks of the KV cache.

A job's states:

    submit ─→ queued: its copies wait for their mark ─→ ended: the mark is reached, or the copies have failed ─→ taken

Owns: the jobs, and the copier, a thread that begins copies between KV cache, ring and private memory. It never touches
the daemon, so a step that waits for a copy does not wait for the daemon. The background thread puts the private copies.
Does not own: the copies (copying/copies.py), nor decisions, which come with the jobs.

Invariants
- A job ends once, in whichever thread first sees that its mark is reached: a step's, the copier or the background's.
- A job's end comes after all of its copies, also if it has failed. Only if no mark can be made, because the GPU has
  failed, nothing is waited for.
- A load is complete, or its failure is reported: no chunk is used whose key, form or checksum is wrong.
- The ring is read only before the load's ticket is reported as done. Copies of a GPU are complete by then.
- A store that was waited for reads the KV cache no more.
- Copies that wait to be put take at most STORE_BYTES_MAX (host_memory). Chunks beyond that are not stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from ....errors import Corrupt
from ....shm.ring.layout import SPAN_HEADER_BYTES
from ...core.client import Client
from ...gpu.interface import Mark
from ...reading.lease import Lease
from ...reading.ring_mapping import check_span
from ...threads.aside import aside
from ..engine.background import IDLE_S, Background
from ..engine.rings import MappedRings
from .copying.copies import Array, Copies, Group
from .copying.host_memory import DONE
from .jobs import LoadChunks, StoreChunks, WorkerReport

PUT_BYTES: Final = 32 << 20
"""Bytes that one job of the background thread puts. It must not take longer than LATE_S."""
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


class KVWorker(OffloadingWorker):  # type: ignore[misc, unused-ignore]
    """The side of the worker with this rank, whose KV cache `copies` reads and writes."""

    def __init__(self, socket: str | None, client_name: str, *, rank: int, copies: Copies) -> None:
        self._rank = rank
        self._copies = copies
        self._lock = threading.Lock()
        self._pending: dict[int, Transfer] = {}
        self._finished: list[TransferResult] = []
        self._failed_jobs: set[int] = set()
        self._news = WorkerReport()
        self._rings = MappedRings()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """What the copier is to call."""
        self._copier = threading.Thread(target=self._run, name="tensord-vllm-kv-copy", daemon=True)
        aside(self._copier.start)
        self._background = Background(socket, client_name, "tensord-vllm-kv-put", self._tick)
        self._background.start()

    # ---- the step's thread

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: StoreChunks) -> bool:
        return self._submit(job_id, partial(self._store, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: LoadChunks, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, partial(self._load, src_spec, dst_spec))

    def _submit(self, job_id: int, begin: Callable[[Transfer], None]) -> bool:
        """A new job. The copier calls `begin`, which queues its copies."""
        transfer = self._pending[job_id] = Transfer(job_id)
        try:
            transfer.after = self._copies.mark()
        except RuntimeError as error:
            _log.error("tensord: the GPU has failed: %s; no KV blocks are copied", error)
            transfer.failed = True
        self._work.put(partial(self._begin, begin, transfer))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The jobs that ended since the last call. All count as successful for vLLM, which ends the engine otherwise.
        `take_failed` tells which loads failed."""
        self._end_reached()
        if not self._finished:
            return []
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def take_failed(self) -> set[int]:
        """The loads that failed since the last call, of those that `get_finished` has returned or is about to."""
        if not self._failed_jobs:
            return set()
        with self._lock:
            failed, self._failed_jobs = self._failed_jobs, set()
        return failed

    def report(self) -> WorkerReport | None:
        """The news for the manager since the last call; None if there are none."""
        with self._lock:
            if not self._news.done:
                return None
            news, self._news = self._news, WorkerReport()
        return news

    def wait(self, job_ids: set[int] | None = None) -> None:
        """Waits until the copies of these jobs, or of all, neither read nor write the KV cache. Needs no daemon."""
        for job_id in list(self._pending) if job_ids is None else job_ids:
            transfer = self._pending.get(job_id)
            if transfer is not None:
                transfer.queued.wait()
                with suppress(RuntimeError):  # the job ends as a failed one
                    transfer.mark.wait()
        self._end_reached()

    def shutdown(self) -> None:
        """Ends both threads once queued copies are made, and put or given up. Idempotent."""
        self._work.put(None)
        self._copier.join()
        self.wait()
        self._background.close()
        # The driver forgets the ring's memory before it is unmapped.
        self._copies.tidy(())
        self._rings.clear()

    # ---- the end of jobs, in any thread

    def _end_reached(self) -> None:
        """Ends the jobs whose copies are complete, or have failed. Does not wait."""
        if self._pending:
            with self._lock:
                for transfer in list(self._pending.values()):
                    if transfer.queued.is_set():
                        self._end_if_reached(transfer)

    def _end_if_reached(self, transfer: Transfer) -> None:
        whole = not transfer.failed
        try:
            if not transfer.mark.wait(0):
                return
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
        del self._pending[transfer.job_id]
        # The job refers to memory that others have released already.
        transfer.end, transfer.mark = None, DONE

    # ---- the copier

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
            transfer.queued.set()
            self._end_reached()

    def _load(self, chunks: LoadChunks, blocks: GPULoadStoreSpec, transfer: Transfer) -> None:
        handles = chunks.handles[self._rank]
        failed: set[int] = set()
        damaged: set[bytes] = set()
        leases: list[Lease] = []

        def end(whole: bool) -> None:
            """Tells of the load, whose chunks are not read any more. The lock is held."""
            leases.clear()
            if not whole:
                # What was copied is not known.
                failed.update(range(len(handles)))
            self._news.done[chunks.ticket] += 1
            if failed:
                self._failed_jobs.add(transfer.job_id)
                self._news.failed[chunks.ticket] = failed
            if damaged:
                self._news.damaged |= damaged
                # Put again, they are not taken for stored: the background thread waits for the answer.
                self._background.post(lambda client: client.evict(*damaged))

        transfer.end = end
        if transfer.failed:
            return
        try:
            for group, position, first, numbers in self._places(chunks.counts, blocks):
                failed.add(position)
                self._rings.look(self._background.view)
                lease = self._rings.borrow(handles[position])
                if lease is None:
                    return
                if not _is_sound(lease, group.shape):
                    damaged.add(handles[position][-32:])
                    return
                leases.append(lease)
                self._copies.load(group, lease.tree, first, numbers, transfer.after)
                transfer.size_bytes += lease.payload_bytes
                failed.discard(position)
        finally:
            # Also after a failure: the copies before it read the ring.
            transfer.mark = self._copies.loaded()

    def _store(self, blocks: GPULoadStoreSpec, chunks: StoreChunks, transfer: Transfer) -> None:
        if transfer.failed or not self._background.connected or self._background.late:
            return
        saved: list[tuple[int, Array]] = []
        try:
            for group, position, first, numbers in self._places(chunks.counts, blocks):
                if first or len(numbers) < group.shape[0]:
                    # A part of the chunk lies outside of a sliding window.
                    continue
                chunk = self._copies.places.take(group.shape)
                if chunk is None:
                    break
                saved.append((position, chunk))
                self._copies.save(group, chunk, numbers, transfer.after)
                transfer.size_bytes += chunk.nbytes
        finally:
            # Without a mark nobody knows when the places are written, so they are not given back.
            transfer.mark = self._copies.saved()
            transfer.end = partial(self._saved, chunks, saved)

    def _saved(self, chunks: StoreChunks, saved: list[tuple[int, Array]], whole: bool) -> None:
        """Ends a store: its chunks are to be put, if they were saved."""
        per_job = max(1, PUT_BYTES // saved[0][1].nbytes) if saved else 1
        for first in range(0, len(saved), per_job):
            together = saved[first : first + per_job]
            if not whole or not self._background.post(partial(self._put, chunks, together)):
                self._give_back(together)

    def _places(self, counts: Sequence[int], blocks: GPULoadStoreSpec) -> Iterator[tuple[Group, int, int, list[int]]]:
        """The chunks of a job: the group of each, its position among the job's chunks, the first of its blocks that is
        copied, and the blocks' numbers in the KV cache. Raises ValueError if the blocks do not fit the chunks."""
        at = position = 0
        for group, count, size, index in zip(
            self._copies.groups, counts, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            per_chunk = group.shape[0]
            first = index % per_chunk
            if count != (-(-(first + size) // per_chunk) if size else 0):
                raise ValueError(f"{size} blocks from block {index} on are not {count} chunks of {per_chunk}")
            end = at + size
            for number in range(position, position + count):
                taken = min(per_chunk - first, end - at)
                yield group, number, first, blocks.block_ids[at : at + taken].tolist()
                at += taken
                first = 0
            position += count

    # ---- the background thread

    def _tick(self, client: Client) -> float:
        self._rings.look(client.link.view)
        self._end_reached()
        self._work.put(lambda: self._copies.tidy(self._rings.mappings))
        return IDLE_S

    def _put(self, chunks: StoreChunks, saved: Sequence[tuple[int, Array]], client: Client) -> None:
        try:
            keys, parents = chunks.keys[self._rank], chunks.parents[self._rank]
            new = [(position, chunk) for position, chunk in saved if not client.contains(keys[position])]
            if client.connected:
                # A chunk is refused if its parent is gone: no lookup would reach it.
                client.put_many(
                    [(keys[position], chunk) for position, chunk in new],
                    agent=chunks.agent,
                    parents=[parents[position] or None for position, _ in new],
                )
        finally:
            self._give_back(saved)

    def _give_back(self, saved: Sequence[tuple[int, Array]]) -> None:
        for _, chunk in saved:
            self._copies.places.give_back(chunk)


def _is_sound(lease: Lease, shape: tuple[int, int]) -> bool:
    """Whether an entry is what was stored, in this shape. One whose checksum nobody has taken yet is."""
    span, chunk = lease.span(), lease.tree
    if span is None or type(chunk) is not np.ndarray or chunk.dtype != np.uint8 or chunk.shape != shape:
        return False
    try:
        check_span(span[:SPAN_HEADER_BYTES].tobytes(), span[SPAN_HEADER_BYTES:])
    except Corrupt:
        return False
    return True
