"""The thread that copies from inboxes into the ring, so that the event loop never waits for much memory.

Owns: the inboxes' mappings and the checksums of payloads under way. Uids take turns, and so do the clients of each:
TURN_BYTES a turn, each client's copies in the order asked for. Does not own spans: the core has allocated them, and
hears of each copy through `done`. The loop itself reads queries (`read_inbox`) and, while nothing else waits for it,
copies small payloads (`copy_now`): both take less time than it takes to wake a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from mmap import MAP_SHARED, PROT_READ, mmap
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import xxhash

from ..errors import BadPrefix, BadTree, LimitReached, TensordError
from ..shm.copy import copy_checked
from ..shm.inbox import check_inbox
from ..shm.keys import generation_of
from ..shm.layout import NAMESPACE_TAG_BYTES, SPAN_HEADER_BYTES, SpanHeader, aligned
from ..shm.prefix import PrefixRecord, block_key
from ..shm.recipe import Recipe, recipe
from .core.effects import Copy, Move
from .core.events import Copied, Moved
from .core.turns import Turns

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
TURN_BYTES: Final = 4 << 20
"""What is copied for one client before it is another's turn; a part of the library's has about as much."""
SMALL_BYTES: Final = 128 << 10
"""A payload of up to so much that came in one part is small: 20 to 50 µs of copying."""


@dataclass(slots=True)
class CopyJob:
    """A part of a put to be copied, `copied_bytes` of which are; or a span to be moved."""

    part: Copy | Move
    copied_bytes: int = 0

    @property
    def client(self) -> int:
        """Whose turn it takes: moves are nobody's."""
        return self.part.client if isinstance(self.part, Copy) else 0


class Copier:
    """One worker thread over `ring`, (ring_bytes,) uint8 and writable."""

    def __init__(self, ring: Bytes, tree_depth_max: int, done: Callable[[Copied | Moved], object]) -> None:
        """`done` is called in the worker thread."""
        self._ring = ring
        self._tree_depth_max = tree_depth_max
        self._done = done
        # By client, and by the number that the client has given each of them.
        self._inboxes: dict[int, dict[int, Bytes]] = {}
        self._uids: dict[int, int] = {}
        self._checksums: dict[tuple[int, int], xxhash.xxh3_64] = {}
        # What is asked for, and None at the end; the worker takes it over into its turns.
        self._asked: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._jobs: Turns[CopyJob] = Turns()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="tensord-copier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread once the copies asked for so far are done."""
        self._asked.put(None)
        self._thread.join()

    @property
    def inboxes_bytes(self) -> int:
        """Bytes of all inboxes that are open."""
        return sum(len(inbox) for own in self._inboxes.values() for inbox in own.values())

    def inboxes_bytes_of(self, uid: int) -> int:
        """Bytes of the inboxes of a uid's clients that are open."""
        return sum(
            len(inbox) for client, own in self._inboxes.items() if self._uids[client] == uid for inbox in own.values()
        )

    def open_inbox(
        self,
        client: int,
        fd: int,
        size_bytes: int,
        inboxes_bytes_max: int,
        uid: int = 0,
        number: int = 0,
        inboxes_per_client_max: int = 1,
    ) -> None:
        """Maps an inbox of a client's under `number`; `fd` stays the caller's.

        Raises:
            SegmentError: not a sealed memfd of that size.
            LimitReached: the number is taken, the client has too many, or all of them together would be too large.
        """
        own = self._inboxes.get(client, {})
        if number in own:
            raise LimitReached(f"the client's inbox {number} is open already: close it, or take another number")
        if len(own) >= inboxes_per_client_max:
            raise LimitReached(
                f"inboxes_per_client_max is {inboxes_per_client_max}, and the client has as many: close those whose "
                "puts are answered"
            )
        if self.inboxes_bytes + size_bytes > inboxes_bytes_max:
            raise LimitReached(
                f"inboxes_bytes_max is {inboxes_bytes_max}: {self.inboxes_bytes} bytes of inboxes are open, and "
                f"{size_bytes} more were asked for; raise it, or close clients that no longer put"
            )
        check_inbox(fd, size_bytes)
        mapped = np.frombuffer(mmap(fd, size_bytes, MAP_SHARED, PROT_READ), np.uint8)
        self._uids[client] = uid
        self._inboxes.setdefault(client, {})[number] = mapped

    def read_inbox(self, client: int, offset: int, size_bytes: int, number: int = 0) -> bytes:
        """A copy of bytes of a client's inbox, which the client may change meanwhile.

        Raises:
            LimitReached: there is none, or a shorter one.
        """
        inbox = self._inbox_of(client, number, "a query")
        end = offset + size_bytes
        if end > len(inbox):
            raise LimitReached(f"a query ends at {end}, behind the inbox's {len(inbox)} bytes")
        return inbox[offset:end].tobytes()

    def close_inbox(self, client: int, number: int | None = None) -> None:
        """Unmaps a client's inbox; copies out of it that are still to be done fail. Without `number` all of them, for
        when no copy of the client is under way."""
        if number is not None:
            self._inboxes.get(client, {}).pop(number, None)
            return
        self._inboxes.pop(client, None)
        self._uids.pop(client, None)
        # One operation to the interpreter, since the worker changes the table meanwhile.
        for put in list(self._checksums):
            if put[0] == client:
                self._checksums.pop(put, None)

    def discard(self, client: int, put_id: int) -> None:
        """A put has ended before its last part; no copy of it is under way."""
        self._checksums.pop((client, put_id), None)

    def copy(self, part: Copy | Move) -> None:
        """Asks for a part, or for a span to be moved; what becomes of it is told to `done`."""
        self._asked.put(CopyJob(part))

    @staticmethod
    def is_small(part: Copy) -> bool:
        """Whether the part is a whole payload for `copy_now`."""
        return part.header is not None and part.part_bytes == part.header.payload_bytes <= SMALL_BYTES

    def copy_now(self, part: Copy) -> Copied:
        """Copies a small payload, in the caller's thread."""
        copied = self._outcome(CopyJob(part))
        assert isinstance(copied, Copied), "a small payload is copied in one turn"
        return copied

    def _next(self) -> CopyJob | None:
        """The job whose turn it is; None once there are none, and no more come."""
        while not self._stopping and (not self._jobs or not self._asked.empty()):
            job = self._asked.get()
            if job is None:
                self._stopping = True
            else:
                self._jobs.push(job.part.uid, job.client, job)
        return self._jobs.take() if self._jobs else None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            outcome = self._outcome(job)
            if outcome is not None:
                self._done(outcome)
            else:
                self._jobs.push_first(job.part.uid, job.client, job)

    def _outcome(self, job: CopyJob) -> Copied | Moved | None:
        """Carries out one turn of a job; None if there is more to do."""
        try:
            return self._move(job, job.part) if isinstance(job.part, Move) else self._carry_out(job)
        except TensordError as error:
            return _failed(job.part, error)
        except Exception as error:
            # Whatever it was, it concerns one put; the store must hear of it, or that put's span would stay taken.
            return _failed(job.part, TensordError(f"the copy failed: {error!r}"))

    def _move(self, job: CopyJob, move: Move) -> Moved | None:
        """Copies a span for one turn; its header, which names the new span, last.

        Raises:
            Corrupt: no header stands before the payload.
        """
        low = max(job.copied_bytes, SPAN_HEADER_BYTES)
        high = min(job.copied_bytes + TURN_BYTES, move.size_bytes)
        np.copyto(
            self._ring[move.to_offset + low : move.to_offset + high],
            self._ring[move.from_offset + low : move.from_offset + high],
        )
        job.copied_bytes = high
        if high < move.size_bytes:
            return None
        header = SpanHeader.unpack(self._ring[move.from_offset : move.from_offset + SPAN_HEADER_BYTES].tobytes())
        packed = np.frombuffer(header.moved_to(move.number).pack(), np.uint8)
        self._ring[move.to_offset : move.to_offset + SPAN_HEADER_BYTES] = packed
        return Moved(move.number)

    def _carry_out(self, job: CopyJob) -> Copied | None:
        """Copies for one turn; None if there is more to copy of the part."""
        part = job.part
        assert isinstance(part, Copy), part
        inbox = self._inbox_of(part.client, part.inbox, "a part")
        end = part.inbox_offset + part.part_bytes
        if end > len(inbox):
            raise LimitReached(f"a part ends at {end}, behind the inbox's {len(inbox)} bytes")
        put = (part.client, part.put_id)
        # Taken out, and put back only if the part went well and is not the last: no checksum outlives its put.
        checksum = self._checksums.pop(put, None)
        if part.ring_offset == part.payload_offset and not job.copied_bytes:
            checksum = xxhash.xxh3_64()
        if checksum is None:
            raise TensordError(f"put {part.put_id} has failed at an earlier part")
        low, high = job.copied_bytes, min(job.copied_bytes + TURN_BYTES, part.part_bytes)
        there = self._ring[part.ring_offset + low : part.ring_offset + high]
        copy_checked(there, inbox[part.inbox_offset + low : part.inbox_offset + high], checksum)
        job.copied_bytes = high
        if high < part.part_bytes:
            self._checksums[put] = checksum
            return None
        if part.header is None:
            self._checksums[put] = checksum
            return Copied(part.client, part.put_id)
        record = self._finish(part.payload_offset, part.header, checksum.intdigest())
        return Copied(part.client, part.put_id, checksum.intdigest(), record=record)

    def _inbox_of(self, client: int, number: int, what: str) -> Bytes:
        inbox = self._inboxes.get(client, {}).get(number)
        if inbox is None:
            raise LimitReached(f"{what} names the client's inbox {number}, which is not open: send OpenInbox first")
        return inbox

    def _finish(self, payload_offset: int, header: SpanHeader, checksum: int) -> PrefixRecord | None:
        # From the ring's copy: whatever the sender does to its inbox now, what was checked is what is published.
        tree = self._ring[payload_offset : payload_offset + header.tree_bytes].tobytes()
        described = recipe(tree, depth_max=self._tree_depth_max)
        if described.end_bytes > header.payload_bytes:
            raise BadTree(f"the tree describes {described.end_bytes} bytes, and the payload has {header.payload_bytes}")
        record = self._record(payload_offset, header, described) if header.prefix_bytes else None
        packed = np.frombuffer(header.pack(checksum), np.uint8)
        self._ring[payload_offset - SPAN_HEADER_BYTES : payload_offset] = packed
        return record

    def _record(self, payload_offset: int, header: SpanHeader, described: Recipe) -> PrefixRecord:
        """What the record says that is the payload's first leaf.

        The key has to follow from it: who believes keys, as every client does that matches, would be given one
        sequence's payload for another's.

        Raises:
            BadPrefix: there is none, or another than the key's.
        """
        leaves = described.leaves
        first = min(leaves, key=lambda leaf: leaf.offset) if leaves else None
        at, size_bytes = aligned(header.tree_bytes), header.prefix_bytes
        is_record = first is not None and first.dtype == np.uint8 and (first.offset, first.shape) == (at, (size_bytes,))
        if not is_record:
            raise BadPrefix(f"the payload's first leaf is no record of {size_bytes} bytes (prefix_bytes)")
        packed = self._ring[payload_offset + at : payload_offset + at + size_bytes].tobytes()
        record = PrefixRecord.unpack(packed)
        if block_key(header.key[:NAMESPACE_TAG_BYTES], packed, generation_of(header.key)) != header.key:
            raise BadPrefix(f"{header.key.hex()[:16]}… is not the key of the record that was put under it")
        return record


def _failed(part: Copy | Move, error: TensordError) -> Copied | Moved:
    if isinstance(part, Move):
        return Moved(part.number, error)
    return Copied(part.client, part.put_id, error=error)
