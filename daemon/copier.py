"""A thread that copies payloads from inboxes into the ring, so that the event loop never waits for a large copy.

Owns: the mappings of inboxes, and the checksums of payloads that are being copied. Does not own spans: the core has
allocated them, and gets the result of each copy through `done`.

The event loop itself reads queries (`read_inbox`), and copies and moves small payloads (`copy_now`). This is faster
than waking a thread, and a small payload does not wait for other clients' large ones. Large trees are read in the
thread, which rests meanwhile, so that the event loop does not wait for the interpreter's lock.

Invariants: uids take turns, and the clients of a uid take turns, TURN_BYTES a turn. The copies of one client are done
in the order in which they were requested.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from mmap import MAP_SHARED, PROT_READ, mmap
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import xxhash

from ..errors import BadPrefix, BadTree, LimitReached, TensordError
from ..shm.copy import copy_checked
from ..shm.header import may_be_long
from ..shm.inbox import check_inbox
from ..shm.keys import generation_of
from ..shm.layout import NAMESPACE_TAG_BYTES, SPAN_HEADER_BYTES, SpanHeader, aligned
from ..shm.prefix import PrefixRecord, block_key
from ..shm.recipe import Recipe, recipe
from .core.effects import Copy, Move, Seal
from .core.events import Copied, Moved
from .core.turns import Turns

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
TURN_BYTES: Final = 4 << 20
"""The bytes copied for one client before the next client's turn. A part sent by tensord's client has about as many."""
SMALL_BYTES: Final = 128 << 10
"""The most bytes of a small payload, which also came in one part. Copying it takes 20 to 50 µs."""
SMALL_TREE_BYTES: Final = 8 << 10
"""The most bytes of a tree header that the event loop reads: up to 11 ms for the worst, 0.1 ms for 40 arrays."""
REST_S: Final = 50e-6
KNOWN_TREES_MAX: Final = 256
KNOWN_TREE_BYTES_MAX: Final = 128
"""The most trees that are kept once they were validated, and the most bytes of such a tree. Each takes 10 KB."""


@dataclass(slots=True)
class CopyJob:
    """A part of a put to be copied, or a span to be moved. `copied_bytes` of it are done."""

    part: Copy | Move | Seal
    copied_bytes: int = 0

    @property
    def client(self) -> int:
        """The client whose turn the job takes. 0 for a move, which belongs to no client."""
        return 0 if isinstance(self.part, Move) else self.part.client


class Copier:
    """One worker thread that writes into `ring`, (ring_bytes,) uint8."""

    def __init__(self, ring: Bytes, tree_depth_max: int, done: Callable[[Copied | Moved], object]) -> None:
        """`done` takes the result of each copy. It is called in the worker thread."""
        self._ring = ring
        # Payloads of one shape have identical trees, which are validated once.
        self._new_recipe = partial(recipe, depth_max=tree_depth_max)
        self._recipe = lru_cache(KNOWN_TREES_MAX)(self._new_recipe)
        self._done = done
        # By client, then by the client's number of the inbox.
        self._inboxes: dict[int, dict[int, Bytes]] = {}
        self._uids: dict[int, int] = {}
        self._checksums: dict[tuple[int, int], xxhash.xxh3_64] = {}
        # Requested jobs, and None at the end. The worker moves them into `_jobs`.
        self._asked: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._jobs: Turns[CopyJob] = Turns()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="tensord-copier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread once all requested copies are done."""
        self._asked.put(None)
        self._thread.join()

    @property
    def inboxes_bytes(self) -> int:
        """The bytes of all open inboxes."""
        return sum(len(inbox) for own in self._inboxes.values() for inbox in own.values())

    def inboxes_bytes_of(self, uid: int) -> int:
        """The bytes of the open inboxes of a uid's clients."""
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
        """Maps an inbox of a client under `number`. The caller still owns `fd`.

        Raises:
            SegmentError: `fd` is not a sealed memfd of that size.
            LimitReached: the number is in use, the client has too many inboxes, or all inboxes would be too large.
        """
        own = self._inboxes.get(client, {})
        if number in own:
            raise LimitReached(f"the client's inbox {number} is open already: close it, or use another number")
        if len(own) >= inboxes_per_client_max:
            raise LimitReached(
                f"the client has {len(own)} inboxes, and may have {inboxes_per_client_max} (a fixed limit): close "
                "inboxes whose puts are answered"
            )
        if self.inboxes_bytes + size_bytes > inboxes_bytes_max:
            raise LimitReached(
                f"inboxes_bytes_max is {inboxes_bytes_max}: {self.inboxes_bytes} bytes of inboxes are open, and "
                f"{size_bytes} more are requested; raise it, or close clients that no longer put"
            )
        check_inbox(fd, size_bytes)
        mapped = np.frombuffer(mmap(fd, size_bytes, MAP_SHARED, PROT_READ), np.uint8)
        self._uids[client] = uid
        self._inboxes.setdefault(client, {})[number] = mapped

    def read_inbox(self, client: int, offset: int, size_bytes: int, number: int = 0) -> bytes:
        """A copy of a part of a client's inbox. A copy, because the client may change the inbox at any time.

        Raises:
            LimitReached: the inbox is not open, or is too short.
        """
        inbox = self._inbox_of(client, number, "a query")
        end = offset + size_bytes
        if end > len(inbox):
            raise LimitReached(
                f"a query ends at byte {end} of an inbox of {len(inbox)} bytes: write it within the inbox"
            )
        return inbox[offset:end].tobytes()

    def close_inbox(self, client: int, number: int | None = None) -> None:
        """Unmaps a client's inbox. Copies from it that are not done yet fail.

        Without `number`, unmaps all inboxes of the client. Then no copy of the client may be under way.
        """
        if number is not None:
            self._inboxes.get(client, {}).pop(number, None)
            return
        self._inboxes.pop(client, None)
        self._uids.pop(client, None)
        # list() is one operation of the interpreter. The worker changes the table at the same time.
        for put in list(self._checksums):
            if put[0] == client:
                self._checksums.pop(put, None)

    def discard(self, client: int, put_id: int) -> None:
        """Forgets a put that has ended before its last part. No copy of it may be under way."""
        self._checksums.pop((client, put_id), None)

    def copy(self, part: Copy | Move | Seal) -> None:
        """Requests the copy of a part, the move of a span, or the check of a payload. `done` gets the result."""
        self._asked.put(CopyJob(part))

    @staticmethod
    def is_small(part: Copy | Move | Seal) -> bool:
        """True if the part is a complete payload, or an entry to move, that is small enough for `copy_now`."""
        if isinstance(part, Move):
            return part.size_bytes <= SMALL_BYTES
        header = part.header
        if header is None or may_be_long(header.tree_bytes, header.payload_bytes):
            return False
        if isinstance(part, Seal):
            size_bytes = header.tree_bytes + header.prefix_bytes
        elif part.part_bytes == header.payload_bytes:
            size_bytes = header.payload_bytes
        else:
            return False
        return size_bytes <= SMALL_BYTES and header.tree_bytes <= SMALL_TREE_BYTES

    def copy_now(self, part: Copy | Move | Seal) -> Copied | Moved:
        """Copies, moves or checks a small payload, in the caller's thread."""
        done = self._outcome(CopyJob(part))
        assert done is not None, "a small payload is copied in one turn"
        return done

    def _next(self) -> CopyJob | None:
        """The next job, by turns. Waits for one. None once the thread is stopping and all jobs are done."""
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
        """Works on a job for one turn. None if the job is not done yet."""
        try:
            match job.part:
                case Move():
                    return self._move(job, job.part)
                case Seal(client, put_id, payload_offset, header, checksum):
                    return Copied(client, put_id, checksum, record=self.finish(payload_offset, header, checksum))
                case Copy():
                    return self._carry_out(job, job.part)
        except TensordError as error:
            return _failed(job.part, error)
        except Exception as error:
            # The error concerns one put. The store must get a result, or the span of that put is never freed.
            return _failed(job.part, TensordError(f"the copy failed: {error!r}"))

    def _move(self, job: CopyJob, move: Move) -> Moved | None:
        """Copies a span for one turn. The header is written last; it names the new span.

        Raises:
            Corrupt: the old span has no valid header.
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

    def _carry_out(self, job: CopyJob, part: Copy) -> Copied | None:
        """Copies a part for one turn. None if the part is not done yet."""
        inbox = self._inbox_of(part.client, part.inbox, "a part")
        end = part.inbox_offset + part.part_bytes
        if end > len(inbox):
            raise LimitReached(
                f"a part ends at byte {end} of an inbox of {len(inbox)} bytes: write it within the inbox"
            )
        put = (part.client, part.put_id)
        # Removed here, and put back only if the part succeeds and is not the last. So no checksum outlives its put.
        checksum = self._checksums.pop(put, None)
        if part.ring_offset == part.payload_offset and not job.copied_bytes:
            checksum = xxhash.xxh3_64()
        if checksum is None:
            raise TensordError(f"an earlier part of put {part.put_id} has failed")
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
        record = self.finish(part.payload_offset, part.header, checksum.intdigest())
        return Copied(part.client, part.put_id, checksum.intdigest(), record=record)

    def _inbox_of(self, client: int, number: int, what: str) -> Bytes:
        inbox = self._inboxes.get(client, {}).get(number)
        if inbox is None:
            raise LimitReached(f"{what} names the client's inbox {number}, which is not open: send OpenInbox first")
        return inbox

    def finish(self, payload_offset: int, header: SpanHeader, checksum: int) -> PrefixRecord | None:
        """Checks the tree, and a block's record, of a payload in the ring, and writes its span's header. Any thread may
        call it.

        Raises:
            BadTree, BadPrefix: the payload is not what its header says.
        """
        # The checks read the bytes in the ring. A client may change its inbox now, but not the copied bytes. A client
        # that has written a span writes no more after its Commit; it belongs to a user trusted with the ring.
        payload = self._ring[payload_offset : payload_offset + header.payload_bytes]
        tree = payload[: header.tree_bytes].tobytes()
        known = self._recipe(tree) if len(tree) <= KNOWN_TREE_BYTES_MAX else self._new_recipe(tree, rest=_rest)
        described = known.whole(payload, _rest)
        if described.end_bytes > header.payload_bytes:
            raise BadTree(
                f"the tree describes {described.end_bytes} bytes; the payload has only {header.payload_bytes}"
            )
        record = self._record(payload_offset, header, described) if header.prefix_bytes else None
        packed = np.frombuffer(header.pack(checksum), np.uint8)
        self._ring[payload_offset - SPAN_HEADER_BYTES : payload_offset] = packed
        return record

    def _record(self, payload_offset: int, header: SpanHeader, described: Recipe) -> PrefixRecord:
        """The record in the payload's first leaf.

        The key must be the digest of the record. Clients that match trust keys; with a wrong key they would get the
        payload of another sequence.

        Raises:
            BadPrefix: the payload has no record, or its record has another key.
        """
        leaves = described.leaves
        first = min(leaves, key=lambda leaf: leaf.offset) if leaves else None
        at, size_bytes = aligned(header.tree_bytes), header.prefix_bytes
        is_record = first is not None and first.dtype == np.uint8 and (first.offset, first.shape) == (at, (size_bytes,))
        if not is_record:
            raise BadPrefix(f"the payload's first leaf is not a record of prefix_bytes = {size_bytes} bytes")
        packed = self._ring[payload_offset + at : payload_offset + at + size_bytes].tobytes()
        record = PrefixRecord.unpack(packed)
        if block_key(header.key[:NAMESPACE_TAG_BYTES], packed, generation_of(header.key)) != header.key:
            raise BadPrefix(f"the key {header.key.hex()[:16]}… is not the digest of the payload's record")
        return record


def _rest() -> None:
    """Lets the event loop have the interpreter's lock."""
    time.sleep(REST_S)


def _failed(part: Copy | Move | Seal, error: TensordError) -> Copied | Moved:
    if isinstance(part, Move):
        return Moved(part.number, error)
    return Copied(part.client, part.put_id, error=error)
