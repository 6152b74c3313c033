"""A thread that copies payloads into the ring, so that the event loop never waits for a large copy.

    records of a client of another uid ─ InboxCopy → its inbox → the ring, checked → InboxCopied
    entries that make room             ─ Move → another place of the ring          → Moved

Owns: the mappings of inboxes, and the check of trees that come from them. Does not own places in the ring (the core has
lent them), nor the records of blocks, which `prefix` checks. The event loop itself reads queries, and copies and moves
small payloads (`copy_now`): this is faster than waking a thread, and does not wait for large ones.

Invariants: uids take turns, and the clients of a uid take turns, TURN_BYTES a turn. The copies of one client are done
in the order in which they were requested.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from mmap import MAP_SHARED, PROT_READ, mmap
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import xxhash
from msgspec import Struct

from ...errors import BadMessage, BadTree, LimitReached, TensordError
from ...shm.payloads.copy import copy_checked
from ...shm.payloads.header import may_be_long
from ...shm.payloads.prefix import HEADER_BYTES, MEDIA_BYTES, MEDIA_MAX, TOKEN_BYTES, PrefixRecord, Tokens
from ...shm.payloads.recipe import recipe
from ...shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader
from ...shm.ring.segments import check_inbox
from ..claims.turns import Turns
from ..forms.effects import Move
from ..forms.events import Moved

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
TURN_BYTES: Final = 4 << 20
"""The bytes copied for one client before the next client's turn."""
SMALL_BYTES: Final = 128 << 10
"""The most bytes of a small payload. Copying it takes 20 to 50 µs."""
SMALL_TREE_BYTES: Final = 8 << 10
"""The most bytes of a tree header that the event loop reads: up to 11 ms for the worst, 0.1 ms for 40 arrays."""
REST_S: Final = 50e-6
KNOWN_TREES_MAX: Final = 256
KNOWN_TREE_BYTES_MAX: Final = 128
"""The most trees that are kept once they were validated, and the most bytes of such a tree. Each takes 10 KB."""


class InboxCopy(Struct, frozen=True):
    """Copies a payload from a client's inbox to the ring, where it has the same offset, and checks its tree. Answered
    by InboxCopied. `offset`: of the payload, in bytes."""

    client: int
    uid: int
    offset: int
    payload_bytes: int
    tree_bytes: int


class InboxCopied(Struct, frozen=True):
    """An InboxCopy was carried out, or failed with `error`. `checksum`: xxh3-64 of the payload in the ring."""

    client: int
    checksum: int = 0
    error: TensordError | None = None


@dataclass(slots=True)
class CopyJob:
    """A payload to be copied, or a span to be moved. `copied_bytes` of it are done. `client`: whose turn the job takes;
    0 for a move, which belongs to no client."""

    part: InboxCopy | Move
    checksum: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    copied_bytes: int = 0

    @property
    def client(self) -> int:
        return 0 if isinstance(self.part, Move) else self.part.client


class Copier:
    """One worker thread that writes into `ring`, (ring_bytes,) uint8."""

    def __init__(self, ring: Bytes, tree_depth_max: int, done: Callable[[InboxCopied | Moved], object]) -> None:
        """`done` takes the result of each copy. It is called in the worker thread."""
        self._ring = ring
        # Payloads of one shape have identical trees, which are validated once.
        self._new_recipe = partial(recipe, depth_max=tree_depth_max)
        self._recipe = lru_cache(KNOWN_TREES_MAX)(self._new_recipe)
        self._done = done
        self._inboxes: dict[int, Bytes] = {}
        # Requested jobs, and None at the end.
        self._asked: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tensord-copier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread once all requested copies are done."""
        self._asked.put(None)
        self._thread.join()

    @property
    def inboxes(self) -> int:
        return len(self._inboxes)

    def open_inbox(self, client: int, fd: int, size_bytes: int) -> None:
        """Maps the inbox of a client, which takes the place of the one before. The caller still owns `fd`. Raises
        SegmentError if it is not a sealed memfd of that size."""
        check_inbox(fd, size_bytes)
        self._inboxes[client] = np.frombuffer(mmap(fd, size_bytes, MAP_SHARED, PROT_READ), np.uint8)

    def read_query(self, client: int, offset: int, size_bytes: int, tokens_max: int) -> tuple[PrefixRecord, Tokens]:
        """Copies a prefix query out of a client's inbox, in the caller's thread: its record, and its tokens, (n,)
        uint32. The client may write there meanwhile, so only the copy is used. Raises LimitReached or BadPrefix if the
        bytes are not within an inbox, are too many, or have no valid record."""
        if size_bytes > HEADER_BYTES + MEDIA_MAX * MEDIA_BYTES + tokens_max * TOKEN_BYTES:
            raise LimitReached(
                f"the query has {size_bytes} bytes, too many for prefix_tokens_max = {tokens_max}: send fewer tokens, "
                "or raise it"
            )
        packed = self._part_of(client, offset, size_bytes, "a query").tobytes()
        record = PrefixRecord.unpack(packed)
        return record, np.frombuffer(packed, np.uint32, record.count, record.text_at)

    def close_inbox(self, client: int) -> None:
        """Unmaps a client's inbox. Copies from it that have not begun fail."""
        self._inboxes.pop(client, None)

    def copy(self, part: InboxCopy | Move) -> None:
        """Requests the copy of a payload, or the move of a span. `done` gets the result."""
        self._asked.put(CopyJob(part))

    @staticmethod
    def is_small(part: InboxCopy | Move) -> bool:
        """Whether the payload, or the entry to move, is small enough for `copy_now`."""
        if isinstance(part, Move):
            return part.size_bytes <= SMALL_BYTES
        small = part.payload_bytes <= SMALL_BYTES and part.tree_bytes <= SMALL_TREE_BYTES
        return small and not may_be_long(part.tree_bytes, part.payload_bytes)

    def copy_now(self, part: InboxCopy | Move) -> InboxCopied | Moved:
        """Copies or moves a small payload, in the caller's thread."""
        done = self._outcome(CopyJob(part))
        assert done is not None, "a small payload is copied in one turn"
        return done

    def _work(self) -> None:
        jobs: Turns[CopyJob] = Turns()
        stopping = False
        while jobs or not stopping:
            while not stopping and (not jobs or not self._asked.empty()):
                asked = self._asked.get()
                if asked is None:
                    stopping = True
                else:
                    jobs.push(asked.part.uid, asked.client, asked)
            if jobs:
                job = jobs.take()
                outcome = self._outcome(job)
                if outcome is not None:
                    self._done(outcome)
                else:
                    jobs.push_first(job.part.uid, job.client, job)

    def _outcome(self, job: CopyJob) -> InboxCopied | Moved | None:
        """Works on a job for one turn. None if the job is not done yet."""
        part = job.part
        try:
            return self._move(job, part) if isinstance(part, Move) else self._carry_out(job, part)
        except Exception as error:
            # It concerns one put. The store must get a result, or the place of that put is never free.
            failure = error if isinstance(error, TensordError) else TensordError(f"the copy failed: {error!r}")
            return Moved(part.number, failure) if isinstance(part, Move) else InboxCopied(part.client, error=failure)

    def _move(self, job: CopyJob, move: Move) -> Moved | None:
        """Copies a span for one turn. The header is written last, and names the new span. Raises Corrupt if the old
        span has no valid one."""
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

    def _carry_out(self, job: CopyJob, part: InboxCopy) -> InboxCopied | None:
        """Copies a payload for one turn. None if it is not done yet."""
        inbox = self._part_of(part.client, part.offset, part.payload_bytes, "a payload")
        low, high = job.copied_bytes, min(job.copied_bytes + TURN_BYTES, part.payload_bytes)
        copy_checked(self._ring[part.offset + low : part.offset + high], inbox[low:high], job.checksum)
        job.copied_bytes = high
        if high < part.payload_bytes:
            return None
        self.check(part.offset, part.payload_bytes, part.tree_bytes)
        return InboxCopied(part.client, job.checksum.intdigest())

    def _part_of(self, client: int, offset: int, size_bytes: int, what: str) -> Bytes:
        inbox = self._inboxes.get(client)
        if inbox is None:
            raise LimitReached(f"{what} lies in the client's inbox, which is not open: send OpenInbox first")
        if offset + size_bytes > len(inbox):
            raise LimitReached(
                f"{what} ends at byte {offset + size_bytes} of an inbox of {len(inbox)} bytes: write it within the "
                "inbox"
            )
        return inbox[offset : offset + size_bytes]

    def check(self, offset: int, payload_bytes: int, tree_bytes: int) -> None:
        """Raises BadTree or BadMessage if a payload in the ring is not what its record says. Any thread may call it."""
        # The checks read the bytes in the ring: a client may change its inbox now, but not what was copied.
        payload = self._ring[offset : offset + payload_bytes]
        if not 0 < tree_bytes <= payload_bytes:
            raise BadMessage(f"a tree of {tree_bytes} bytes in a payload of {payload_bytes}: it is a part of it")
        tree = payload[:tree_bytes].tobytes()
        known = self._recipe(tree) if len(tree) <= KNOWN_TREE_BYTES_MAX else self._new_recipe(tree, rest=_rest)
        end_bytes = known.whole(payload, _rest).end_bytes
        if end_bytes > payload_bytes:
            raise BadTree(f"the tree describes {end_bytes} bytes; the payload has only {payload_bytes}")


def _rest() -> None:
    """Lets the event loop have the interpreter's lock."""
    time.sleep(REST_S)
