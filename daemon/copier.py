"""The thread that copies from inboxes into the ring, so that the event loop never waits for memory.

Owns: the inboxes' mappings and the checksums of images under way. Copies in the order asked for. Does not own spans:
whoever asks has allocated them, and hears of each copy through `done`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from mmap import MAP_SHARED, PROT_READ, mmap
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import xxhash

from ..errors import BadTree, LimitReached, TensordError
from ..shm.copy import copy_checked
from ..shm.layout import SPAN_HEADER_BYTES, SpanHeader
from ..shm.recipe import recipe
from ..shm.segments import check_inbox

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_STOP: Final = None


@dataclass(frozen=True, slots=True)
class Job:
    """One part to copy. `header` comes with the last: it is written, with the checksum, before the image."""

    client: int
    put_id: int
    inbox_offset: int
    part_bytes: int
    ring_offset: int
    image_offset: int
    header: SpanHeader | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: the checksum with the last part, or the error that made it impossible."""

    client: int
    put_id: int
    checksum: int | None
    error: TensordError | None


class Copier:
    """One worker thread over `ring`, (ring_bytes,) uint8 and writable."""

    def __init__(self, ring: Bytes, *, inboxes_bytes_max: int, done: Callable[[Outcome], None]) -> None:
        """`done` is called in the worker thread."""
        self._ring = ring
        self._inboxes_bytes_max = inboxes_bytes_max
        self._done = done
        self._inboxes: dict[int, Bytes] = {}
        self._checksums: dict[tuple[int, int], xxhash.xxh3_64] = {}
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tensord-copier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread once the jobs asked for so far are done."""
        self._jobs.put(_STOP)
        self._thread.join()

    @property
    def inboxes_bytes(self) -> int:
        return sum(len(inbox) for inbox in self._inboxes.values())

    def open_inbox(self, client: int, fd: int, size_bytes: int) -> None:
        """Maps a client's inbox; `fd` stays the caller's.

        Raises:
            SegmentError: not a sealed memfd of that size.
            LimitReached: the client has one, or all of them together would be too large.
        """
        if client in self._inboxes:
            raise LimitReached("a client has one inbox, and this one's is open already")
        if self.inboxes_bytes + size_bytes > self._inboxes_bytes_max:
            raise LimitReached(
                f"inboxes_bytes_max is {self._inboxes_bytes_max}: {self.inboxes_bytes} bytes of inboxes are open, and "
                f"{size_bytes} more were asked for; raise it, or close clients that no longer put"
            )
        check_inbox(fd, size_bytes)
        self._inboxes[client] = np.frombuffer(mmap(fd, size_bytes, MAP_SHARED, PROT_READ), np.uint8)

    def close_inbox(self, client: int) -> None:
        """Unmaps it; for when no job of the client is under way."""
        self._inboxes.pop(client, None)
        for key in [key for key in self._checksums if key[0] == client]:
            del self._checksums[key]

    def copy(self, job: Job) -> None:
        """Asks for a part; its outcome is told to `done`."""
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not _STOP:
            try:
                outcome = Outcome(job.client, job.put_id, self._carry_out(job), None)
            except TensordError as error:
                self._checksums.pop((job.client, job.put_id), None)
                outcome = Outcome(job.client, job.put_id, None, error)
            self._done(outcome)

    def _carry_out(self, job: Job) -> int | None:
        inbox = self._inboxes.get(job.client)
        if inbox is None:
            raise LimitReached("a part came before its client's inbox: send OpenInbox first")
        end = job.inbox_offset + job.part_bytes
        if end > len(inbox):
            raise LimitReached(f"a part ends at {end}, behind the inbox's {len(inbox)} bytes")
        key = (job.client, job.put_id)
        if job.ring_offset == job.image_offset:
            self._checksums[key] = xxhash.xxh3_64()
        checksum = self._checksums.get(key)
        if checksum is None:
            raise TensordError(f"put {job.put_id} has failed at an earlier part")
        copy_checked(
            self._ring[job.ring_offset : job.ring_offset + job.part_bytes], inbox[job.inbox_offset : end], checksum
        )
        if job.header is None:
            return None
        self._finish(job.image_offset, job.header, checksum.intdigest())
        del self._checksums[key]
        return checksum.intdigest()

    def _finish(self, image_offset: int, header: SpanHeader, checksum: int) -> None:
        # From the ring's copy: whatever the sender does to its inbox now, what was checked is what is published.
        tree = self._ring[image_offset : image_offset + header.tree_bytes].tobytes()
        end_bytes = recipe(tree).end_bytes
        if end_bytes > header.image_bytes:
            raise BadTree(f"the tree describes {end_bytes} bytes, and the image has {header.image_bytes}")
        packed = np.frombuffer(replace(header, checksum=checksum).pack(), np.uint8)
        self._ring[image_offset - SPAN_HEADER_BYTES : image_offset] = packed
