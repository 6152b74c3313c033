"""A worker's side: copies chunks from the ring into the KV cache, and stores chunks of the KV cache.

Owns: two threads. The copier begins copies between KV cache, ring and private memory, and never touches the daemon, so
a step that waits for a copy does not wait for the daemon. The background thread puts the private copies. Does not own:
the copies (copies.py for host memory, device_copies.py for a GPU), nor decisions, which come with the jobs.

    submit ─→ copier: checks chunks, queues copies ─→ in flight ─→ mark reached: ended by the thread that sees it first,
                                                                   a step, the copier or the background thread

Invariants
- A load is complete, or its failure is reported: no chunk is used whose key, form or checksum is wrong.
- The ring is read only before the load's ticket is reported as done. Copies of a GPU are complete by then.
- A store that was waited for reads the KV cache no more.
- Copies that wait to be put take at most STORE_BYTES_MAX. Chunks beyond that are not stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from ....errors import Corrupt
from ....shm.ring.layout import SPAN_HEADER_BYTES
from ...core.client import Client
from ...reading.lease import Lease
from ...reading.ring_mapping import check_span
from ...threads.aside import aside
from ..engine.background import IDLE_S, Background
from ..engine.rings import MappedRings
from .copying.copies import Copies, Group, Saved
from .copying.transfers import Transfer, Transfers
from .jobs import DAMAGED_MAX, LoadChunks, StoreChunks, WorkerReport

STORE_BYTES_MAX: Final = 512 << 20
PUT_BYTES: Final = 32 << 20
"""Bytes that one job of the background thread puts. It must not take longer than LATE_S."""

Place = tuple[int, int, list[int]]
"""A chunk of a job: its position among the job's chunks, the first of its blocks that is copied, the blocks' numbers in
the KV cache."""
_log = logging.getLogger("tensord")


class KVWorker(OffloadingWorker):  # type: ignore[misc, unused-ignore]
    """The worker's side.

    Args:
        rank: this worker's number.
        copies: the copies of the worker's KV cache.
    """

    def __init__(
        self,
        socket: str | None,
        client_name: str,
        *,
        rank: int,
        copies: Copies,
    ) -> None:
        self._rank = rank
        self._copies = copies
        self._lock = threading.Lock()
        self._transfers = Transfers()
        self._failed_jobs: set[int] = set()
        self._news = WorkerReport()
        self._damaged: set[bytes] = set()
        self._storing_bytes = 0
        self._tidy_at_s = 0.0
        self._rings = MappedRings()
        self._client: Client | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._background = Background(socket, client_name, "tensord-vllm-kv-put", self._tick)
        self._background.start()
        self._copier = threading.Thread(target=self._copy, name="tensord-vllm-kv-copy", daemon=True)
        aside(self._copier.start)

    # ---- the step's thread

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: StoreChunks) -> bool:
        return self._submit(job_id, partial(self._store, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: LoadChunks, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, partial(self._load, src_spec, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        """The jobs that are over. All count as successful; `take_failed` tells which loads failed."""
        return self._transfers.take_finished()

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
            if not (self._news.done or self._news.failed or self._news.damaged):
                return None
            news, self._news = self._news, WorkerReport()
        return news

    def wait(self, job_ids: set[int]) -> None:
        """Waits until these jobs' copies are done. They need no daemon."""
        self._transfers.wait(job_ids)

    def settle(self) -> None:
        """Waits until no copy reads or writes the KV cache. They need no daemon."""
        self._transfers.wait_all()

    def shutdown(self) -> None:
        """Ends both threads once queued copies are made, and put or given up. Idempotent."""
        self._jobs.put(None)
        self._copier.join()
        self._transfers.wait_all()
        self._background.close()
        self._copies.close()
        self._rings.clear()

    def _submit(self, job_id: int, job: Callable[[Transfer], None]) -> bool:
        transfer = self._transfers.begin(job_id, self._copies.mark)
        self._jobs.put(partial(self._queue, job, transfer))
        return True

    # ---- the copier thread

    def _copy(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("tensord: a copy of KV blocks failed; the blocks are computed, or not stored")
            # The job refers to memory that others have released already.
            del job

    def _queue(self, job: Callable[[Transfer], None], transfer: Transfer) -> None:
        try:
            job(transfer)
        except BaseException:
            transfer.failed = True
            raise
        finally:
            self._transfers.queued(transfer)

    def _load(self, chunks: LoadChunks, blocks: GPULoadStoreSpec, transfer: Transfer) -> None:
        handles = chunks.handles[self._rank]
        failed: set[int] = set()
        damaged: set[bytes] = set()
        leases: list[Lease] = []
        transfer.end = partial(self._loaded, chunks, transfer.job_id, leases, failed, damaged)
        if transfer.failed:
            return
        try:
            for group, (position, first, numbers) in self._places(chunks.counts, blocks):
                failed.add(position)
                self._rings.look(self._client)
                lease = self._rings.borrow(handles[position])
                if lease is None:
                    return
                if not _is_sound(lease, group.shape):
                    damaged.add(handles[position][-32:])
                    return
                leases.append(lease)
                group.load(lease.tree, first, numbers, transfer.after)
                transfer.size_bytes += lease.payload_bytes
                failed.discard(position)
        finally:
            # Also after a failure: the copies before it read the ring.
            transfer.mark = self._copies.loaded()

    def _loaded(
        self,
        chunks: LoadChunks,
        job_id: int,
        leases: list[Lease],
        failed: set[int],
        damaged: set[bytes],
        whole: bool,
    ) -> None:
        """Ends a load, whose chunks are not read any more."""
        leases.clear()
        if not whole:
            # What was copied is not known.
            failed.update(range(len(chunks.handles[self._rank])))
        with self._lock:
            self._news.done[chunks.ticket] += 1
            if failed:
                self._failed_jobs.add(job_id)
                self._news.failed[chunks.ticket] = failed
                self._news.damaged |= damaged
        if damaged:
            self._damaged = (self._damaged if len(self._damaged) < DAMAGED_MAX else set()) | damaged
            self._background.post(lambda client: client.link.puts.evict(list(damaged)))

    def _store(self, blocks: GPULoadStoreSpec, chunks: StoreChunks, transfer: Transfer) -> None:
        client = self._client
        able = client is not None and client.connected and not self._background.late
        if transfer.failed or not able:
            return
        saved: list[tuple[int, Saved]] = []
        transfer.end = partial(self._saved, chunks, saved)
        try:
            for group, (position, first, numbers) in self._places(chunks.counts, blocks):
                if first or len(numbers) < group.shape[0]:
                    # A part of the chunk lies outside of a sliding window.
                    continue
                size_bytes = group.shape[0] * group.shape[1]
                if self._storing_bytes + size_bytes > STORE_BYTES_MAX:
                    break
                taken = group.save(numbers, transfer.after)
                if taken is None:
                    break
                self._stored(-size_bytes)
                saved.append((position, taken))
                transfer.size_bytes += size_bytes
        finally:
            transfer.mark = self._copies.saved()

    def _saved(self, chunks: StoreChunks, saved: list[tuple[int, Saved]], whole: bool) -> None:
        """Ends a store: its chunks are to be put, if they were saved."""
        if saved:
            per_job = max(1, PUT_BYTES // saved[0][1].chunk.nbytes)
            for first in range(0, len(saved), per_job):
                together = saved[first : first + per_job]
                if not whole or not self._background.post(partial(self._put, chunks, together)):
                    self._give_back(together)

    def _places(self, counts: Sequence[int], blocks: GPULoadStoreSpec) -> Iterator[tuple[Group, Place]]:
        """The chunks of a job with their groups.

        Raises:
            ValueError: the blocks do not fit the chunks.
        """
        at = position = 0
        for group, count, size, index in zip(
            self._copies.groups, counts, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            per_chunk = group.shape[0]
            first = index % per_chunk
            if count != (-(-(first + size) // per_chunk) if size else 0):
                raise ValueError(f"{size} blocks from block {index} on are not {count} chunks of {per_chunk}")
            end = at + size
            for number in range(count):
                taken = min(per_chunk - first, end - at)
                yield group, (position + number, first, blocks.block_ids[at : at + taken].tolist())
                at += taken
                first = 0
            position += count

    # ---- both threads

    def _stored(self, size_bytes: int) -> None:
        with self._lock:
            self._storing_bytes -= size_bytes

    # ---- the background thread

    def _tick(self, client: Client) -> float:
        self._client = client
        self._rings.look(client)
        self._transfers.end_reached()
        if (now := time.monotonic()) >= self._tidy_at_s:
            self._tidy_at_s = now + IDLE_S
            self._jobs.put(lambda: self._copies.tidy(self._rings.mappings))
        return IDLE_S

    def _put(self, chunks: StoreChunks, saved: Sequence[tuple[int, Saved]], client: Client) -> None:
        try:
            keys, parents = chunks.keys[self._rank], chunks.parents[self._rank]
            new = [(position, taken.chunk) for position, taken in saved if self._is_new(keys[position], client)]
            if client.connected:
                # A chunk is refused if its parent is gone: no lookup would reach it.
                client.put_many(
                    [(keys[position], chunk) for position, chunk in new],
                    agent=chunks.agent,
                    parents=[parents[position] or None for position, _ in new],
                )
        finally:
            self._give_back(saved)

    def _is_new(self, key: bytes, client: Client) -> bool:
        """Whether a chunk has to be put: it is not stored, or was found damaged. The daemon may not have evicted a
        damaged entry yet, but does so before the put, which comes after the request on the same connection."""
        damaged = key in self._damaged
        self._damaged.discard(key)
        return damaged or not client.contains(key)

    def _give_back(self, saved: Sequence[tuple[int, Saved]]) -> None:
        for _, taken in saved:
            self._stored(taken.chunk.nbytes)
            taken.give_back()


def _is_sound(lease: Lease, shape: tuple[int, int]) -> bool:
    """Whether a borrowed entry is what was stored, in the form of `shape`. An entry whose checksum nobody has taken yet
    is."""
    span, chunk = lease.span(), lease.tree
    if span is None or type(chunk) is not np.ndarray or chunk.dtype != np.uint8 or chunk.shape != shape:
        return False
    try:
        check_span(span[:SPAN_HEADER_BYTES].tobytes(), span[SPAN_HEADER_BYTES:])
    except Corrupt:
        return False
    return True
