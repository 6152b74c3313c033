"""A client's lane: its pin words, its access log, its counters. Only that client writes it; the daemon only reads it.

Owns: the lane's words on both sides, and when a lane may be forgotten. Does not own which spans exist.

A lane's life is a kernel lock and not a socket: the daemon takes `flock(LOCK_SH)` on a file description of its own,
hands that to the client and closes its copy. The lock then lasts while any descriptor or mapping of it lives in any
process. The daemon may forget the lane only once `LOCK_EX` is to be had.

Everything that a finalizer does here is a handful of operations that the GIL makes atomic, and never a lock, which a
finalizer running inside the locked region would deadlock on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from itertools import count, islice
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from typing import Any, Final
from weakref import ref

import numpy as np

from ..errors import LayoutMismatch
from .layout import (
    LANE_BYTES,
    LANE_HEADER_WORDS,
    LANE_LOG_WORDS,
    LANE_WORDS,
    PAGE_BYTES,
    unpack_lane_header,
)

# Words of the header page behind the packed magic, version and id.
_HEAD, _MISSES, _BYTES = 8, 16, 24
_PINS_AT: Final = LANE_HEADER_WORDS
_LOG_AT: Final = LANE_HEADER_WORDS + LANE_WORDS
_LOG_MASK: Final = LANE_LOG_WORDS - 1

Array = np.ndarray[Any, Any]


class Lane:
    """The client's side of its lane.

    `free` holds the numbers of the words that pin nothing. Taking one is `free.pop()`, giving it back is what the
    finalizer of the word's last view does.
    """

    __slots__ = (
        "_heads",
        "_map",
        "_misses",
        "_refs",
        "_releases",
        "_state",
        "free",
        "lane_id",
        "served_bytes",
        "words",
    )

    def __init__(self, fd: int) -> None:
        """Maps the lane behind `fd`, which stays the caller's.

        Raises:
            LayoutMismatch: not a lane of this layout version.
        """
        if os.fstat(fd).st_size != LANE_BYTES:
            raise LayoutMismatch(f"a lane of {os.fstat(fd).st_size} bytes, expected {LANE_BYTES}")
        self._map = mmap(fd, LANE_BYTES, MAP_SHARED, PROT_READ | PROT_WRITE)
        self.lane_id = unpack_lane_header(self._map[:PAGE_BYTES])
        self.words = memoryview(self._map).cast("Q")
        self.free = list(range(_PINS_AT + LANE_WORDS - 1, _PINS_AT - 1, -1))
        self.served_bytes = 0
        self._heads = count()
        self._misses = count(1)
        # The finalizers hold this pair, and not the lane: a lane must die with its last view, not with a later run of
        # the cycle collector.
        self._state: list[Any] = [self.words, self.free]
        self._releases: list[Callable[[object], None]] = [_releaser(self._state, w) for w in range(_PINS_AT, _LOG_AT)]
        self._refs: list[ref[Array] | None] = [None] * LANE_WORDS

    @property
    def in_use(self) -> int:
        """How many words pin something."""
        return LANE_WORDS - len(self._state[1])

    def pin(self, span_id: int) -> int:
        """Publishes a pin. The caller then sees whether the slot's seq still stands, else `unpin`s.

        Returns:
            The word's number.

        Raises:
            IndexError: every word is taken.
        """
        # The words before the free list: a lane frozen in between has an empty one, so that no pin goes to scratch.
        words = self.words
        word = self.free.pop()
        # SYNC POINT: this store and the caller's load of seq may pass each other here; the daemon's fence settles it.
        words[word] = span_id
        return word

    def unpin(self, word: int) -> None:
        """Takes a pin back that no view has been tied to."""
        self.words[word] = 0
        self.free.append(word)

    def tie(self, word: int, root: Array) -> None:
        """Ties the word's pin to `root`: it is released when the last view of `root` is collected."""
        self._refs[word - _PINS_AT] = ref(root, self._releases[word - _PINS_AT])

    def tie_many(self, words: list[int], root: Array) -> ref[Array]:
        """`tie` for a batch: all of `words` are released with `root`. The caller keeps the returned reference."""
        numbers = np.array(words)
        state = self._state

        def release(_: object) -> None:
            np.frombuffer(state[0], "u8")[numbers] = 0
            state[1].extend(words)

        return ref(root, release)

    def take_many(self, wanted: int) -> list[int]:
        """Up to `wanted` free words, fewer where the lane is nearly full."""
        take = self.free.pop
        words: list[int] = []
        try:
            for _ in range(wanted):
                words.append(take())
        except IndexError:
            pass
        return words

    def log(self, span_id: int, served_bytes: int) -> None:
        """Records a hit for the daemon's recency and frequency. The oldest record is overwritten."""
        head = next(self._heads)
        words = self.words
        words[_LOG_AT + (head & _LOG_MASK)] = span_id
        words[_HEAD] = head + 1
        # Two threads may lose one another's addition; the daemon uses it for a rate only.
        self.served_bytes = words[_BYTES] = self.served_bytes + served_bytes

    def log_many(self, span_ids: Array, served_bytes: int) -> None:
        """`log` for a batch; (n,) uint64 span ids."""
        if not len(span_ids):
            return
        heads = np.fromiter(islice(self._heads, len(span_ids)), np.int64, len(span_ids))
        words = np.frombuffer(self.words, "u8")
        words[_LOG_AT + (heads & _LOG_MASK)] = span_ids
        self.words[_HEAD] = int(heads[-1]) + 1
        self.served_bytes = self.words[_BYTES] = self.served_bytes + served_bytes

    def log_miss(self) -> None:
        """Counts a lookup that found nothing."""
        self.words[_MISSES] = next(self._misses)

    def freeze(self) -> None:
        """Never write this lane again: finalizers go on, on words that nobody reads.

        After a fork both processes hold views under the same words. Neither may clear them; the kernel lock tells the
        daemon when both have unmapped the lane.
        """
        self.free = []
        self._state[0] = self.words = memoryview(bytearray(LANE_BYTES)).cast("Q")


def _releaser(state: list[Any], word: int) -> Callable[[object], None]:
    def release(_: object) -> None:
        state[0][word] = 0
        state[1].append(word)

    return release


class LaneReader:
    """The daemon's side of one lane: it reads with preadv, so that a truncated lane is a short read and no SIGBUS."""

    __slots__ = ("_fd", "_seen", "lane_id", "lost", "pinned")

    def __init__(self, fd: int, lane_id: int) -> None:
        """Takes over `fd`, a file description of its own on which no lock is held."""
        self._fd = fd
        self.lane_id = lane_id
        self.lost = 0
        self.pinned = 0
        self._seen = 0

    def pins(self, into: Array) -> Array:
        """The span ids that the lane pins now; `into` is (4096,) uint64 scratch.

        A word that is torn while it is read belongs to a pin made after the fence, whose reader will find its slot
        changed; whole words are all that earlier readers left.
        """
        got = os.preadv(self._fd, [into.data], PAGE_BYTES)
        words = into[: got // 8]
        found: Array = words[words != 0]
        self.pinned = len(found)
        return found

    def drain(self) -> Array:
        """Span ids of the hits since the last call, in order; what was overwritten meanwhile is added to `lost`."""
        header = np.empty(LANE_HEADER_WORDS, np.uint64)
        if os.preadv(self._fd, [header.data], 0) < header.nbytes:
            return header[:0]
        head = int(header[_HEAD])
        fresh = head - self._seen
        if fresh <= 0:
            return header[:0]
        if fresh > LANE_LOG_WORDS:
            self.lost += fresh - LANE_LOG_WORDS
            fresh = LANE_LOG_WORDS
        self._seen = head
        log = np.zeros(LANE_LOG_WORDS, np.uint64)
        os.preadv(self._fd, [log.data], _LOG_AT * 8)
        last = head & _LOG_MASK
        return np.roll(log, -last)[LANE_LOG_WORDS - fresh :]

    def counters(self) -> dict[str, int]:
        """hits, misses and bytes served, as the client counts them."""
        header = np.zeros(LANE_HEADER_WORDS, np.uint64)
        os.preadv(self._fd, [header.data], 0)
        return {"hits": int(header[_HEAD]), "misses": int(header[_MISSES]), "served_bytes": int(header[_BYTES])}

    def abandoned(self) -> bool:
        """Whether no process holds the lane any more, by descriptor or mapping. True at most once: it stays locked."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)
