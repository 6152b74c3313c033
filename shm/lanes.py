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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from types import CodeType
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

# Where a lane's words stand, counted in words from its beginning.
HEAD_AT: Final = 8
MISSES_AT: Final = 16
PINS_AT: Final = LANE_HEADER_WORDS
LOG_AT: Final = LANE_HEADER_WORDS + LANE_WORDS
LOG_MASK: Final = LANE_LOG_WORDS - 1
_WORDS: Final = frozenset(range(PINS_AT, LOG_AT))

Array = np.ndarray[Any, Any]


class Lane:
    """The client's side of its lane. Its parts are open to the one function that every hit runs through.

    `free` holds the numbers of the words that pin nothing: taking one is `free.pop()`, giving it back is what
    `releases[number]` does when it is called for the last view. `refs` keeps the weak references that call
    it, `heads` counts the records of the log.

    Invariant: words come back to `_state[1]`, which is `free` itself unless the lane is suspended or frozen: then
    `free` stays empty, whoever gives words back.
    """

    __slots__ = (
        "__weakref__",
        "_batches",
        "_home",
        "_kept",
        "_map",
        "_misses",
        "_state",
        "free",
        "frozen",
        "heads",
        "lane_id",
        "refs",
        "releases",
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
        self.free = list(range(PINS_AT + LANE_WORDS - 1, PINS_AT - 1, -1))
        self.frozen = False
        # The free list while the lane is suspended, and the words that were in it.
        self._home: list[int] | None = None
        self._kept: list[int] = []
        self.heads = count()
        self._misses = count(1)
        # By their first words: the reference to each batch's array, all of its words, its finalizer.
        self._batches: dict[int, tuple[ref[Array], list[int], Callable[[object], None]]] = {}
        # The finalizers hold this, and not the lane: a lane must die with its last view, not with a later run of the
        # cycle collector.
        self._state: list[Any] = [self.words, self.free, self._batches]
        self.releases: list[Callable[[object], None]] = [_releaser(self._state, w) for w in range(LOG_AT)]
        self.refs: list[ref[Array] | None] = [None] * LOG_AT

    @property
    def in_use(self) -> int:
        """How many words pin something, or are in the hands of a thread that takes or gives one back."""
        return LANE_WORDS - len(self._state[1]) - len(self._kept)

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
        self._state[1].append(word)

    def tie(self, word: int, root: Array) -> None:
        """Ties the word's pin to `root`, to be released when the last view of it is collected."""
        self.refs[word] = ref(root, self.releases[word])

    def tie_many(self, words: list[int], root: Array) -> Array:
        """`tie` for a batch: all of `words` are released with `root`.

        Returns:
            The words as (n,) integers.
        """
        numbers = np.array(words, np.intp)
        state = self._state

        def release(_: object) -> None:
            np.frombuffer(state[0], "u8")[numbers] = 0
            state[2].pop(words[0], None)
            state[1].extend(words)

        if words:
            # The first word's place is free for it, since the batch holds that word.
            tied = self.refs[words[0]] = ref(root, release)
            self._batches[words[0]] = tied, words, release
        return numbers

    def take_many(self, wanted: int) -> list[int]:
        """Up to `wanted` free words, fewer where the lane is nearly full."""
        words: list[int] = []
        # list.extend keeps what it got before the free list ran dry.
        with suppress(IndexError):
            words.extend(islice(iter(self.free.pop, None), wanted))
        return words

    def log(self, span_id: int) -> None:
        """Records a hit, for the daemon's recency and frequency. The oldest record of the log is overwritten."""
        head = next(self.heads)
        self.words[LOG_AT + (head & LOG_MASK)] = span_id
        self.words[HEAD_AT] = head + 1

    def log_many(self, span_ids: Array) -> None:
        """`log` for a batch; (n,) uint64 span ids."""
        if not len(span_ids):
            return
        # As many numbers as there are records. Another thread's may be among them: then one of its records is lost.
        first = next(self.heads)
        deque(islice(self.heads, len(span_ids) - 1), maxlen=0)
        heads = np.arange(first, first + len(span_ids))
        np.frombuffer(self.words, "u8")[LOG_AT + (heads & LOG_MASK)] = span_ids
        self.words[HEAD_AT] = first + len(span_ids)

    def log_miss(self) -> None:
        """Counts a lookup that found nothing."""
        self.words[MISSES_AT] = next(self._misses)

    def log_misses(self, misses: int) -> None:
        """`log_miss` for a batch."""
        for number in deque(islice(self._misses, misses), maxlen=1):
            self.words[MISSES_AT] = number

    def suspend(self) -> None:
        """Hands no word out until `resume`, as if all were taken. May be called again, also within itself.

        A thread that loaded the free list before either takes its word before the list is drained, and the word counts
        as in use, or finds the list empty.
        """
        home = self._home
        if home is None:
            home = self._home = self.free
        if self.free is home:
            self.free = []
        if self._state[1] is home:
            self._state[1] = []
        with suppress(IndexError):
            self._kept.extend(iter(home.pop, None))

    def resume(self) -> None:
        """Hands words out again after `suspend`; a frozen lane stays as it is."""
        if self._home is None or self.frozen:
            return
        # Words that were given back to the list of before, by a thread that had loaded it.
        self.suspend()
        kept, self._kept = self._kept, []
        self._state[1].extend(kept)
        self.free = self._state[1]
        self._home = None

    def strays(self) -> set[int]:
        """Words that are neither free nor tied to a live array: in the hands of a thread, or lost."""
        strays = set(_WORDS.difference(self._state[1], self._kept))
        for tied, words, _ in list(self._batches.values()):
            if self.refs[words[0]] is tied and tied() is not None:
                strays.difference_update(words)
        return {word for word in strays if (own := self.refs[word]) is None or own() is None}

    def reclaim(self, lost: set[int], nobody_holds_words: Callable[[], bool]) -> int:
        """Takes words back that were lost: by an exception of a signal handler's while they were taken, or given back.

        `nobody_holds_words()`: whether no other thread is in a function that has a word in its hands, as of one moment.

        No word is taken out of a suspended lane. So once nobody holds one, a word that is not free and not tied is
        lost, or its finalizer has yet to begin; that is cut off. Once again nobody is in a finalizer, a word that is
        not free is nobody's.

        Returns:
            How many words are free again.
        """
        self.suspend()
        try:
            if self.frozen or not nobody_holds_words():
                return 0
            lost = lost & self.strays()
            for _, words, release in list(self._batches.values()):
                if lost.intersection(words):
                    _cut_off(release)
                    del self._batches[words[0]]
            for word in lost:
                _cut_off(self.releases[word])
                self.releases[word] = _releaser(self._state, word)
            if not nobody_holds_words():
                return 0
            self.suspend()
            lost.difference_update(self._state[1], self._kept)
            for word in lost:
                self.words[word] = 0
            self._kept.extend(lost)
            return len(lost)
        finally:
            self.resume()

    def freeze(self) -> None:
        """Never write this lane again: finalizers go on, on words that nobody reads.

        After a fork both processes hold views under the same words. Neither may clear them; the kernel lock tells the
        daemon when both have unmapped the lane.
        """
        if self.frozen:
            return
        # Before the words are exchanged, so that no pin goes to words that nobody reads.
        self.suspend()
        self._state[0] = self.words = memoryview(bytearray(LANE_BYTES)).cast("Q")
        self.frozen = True


def _releaser(state: list[Any], word: int) -> Callable[[object], None]:
    def release(_: object) -> None:
        state[0][word] = 0
        state[1].append(word)

    return release


def _cut_off(release: Any) -> None:
    """Has a finalizer that begins from now on do nothing to the lane. A check in the finalizer would cost every get."""
    cell = release.__closure__[release.__code__.co_freevars.index("state")]
    cell.cell_contents = [bytearray(LANE_BYTES), [], {}]


def _code_within(function: Any) -> CodeType:
    """The code of the finalizer that a function makes."""
    return next(const for const in function.__code__.co_consts if isinstance(const, CodeType))


HOLDING: Final = frozenset(
    {
        *(f.__code__ for f in (Lane.pin, Lane.unpin, Lane.tie, Lane.tie_many, Lane.take_many)),
        _code_within(_releaser),
        _code_within(Lane.tie_many),
    }
)
"""The code in which a thread may have words in its hands."""


@dataclass(frozen=True, slots=True)
class LaneRecords:
    """What a lane recorded since it was last drained: `span_ids` of hits in order, (n,) uint64; how many records were
    `lost`, overwritten or left out before they were read; and how many lookups found nothing."""

    span_ids: Array
    lost: int
    misses: int


class LaneReader:
    """The daemon's side of one lane: it reads with preadv, so that a truncated lane is a short read and no SIGBUS."""

    __slots__ = ("_fd", "_header", "_seen", "_seen_misses", "hits", "lane_id", "misses", "pinned")

    def __init__(self, fd: int, lane_id: int) -> None:
        """Takes over `fd`, a file description of its own on which no lock is held.

        What a lane recorded before it was found is not told: the daemon that read it then has counted it, and has said
        in the index when each entry was used last.
        """
        self._fd = fd
        self._header = np.zeros(LANE_HEADER_WORDS, np.uint64)
        os.preadv(fd, [self._header.data], 0)
        self.lane_id = lane_id
        self.hits = int(self._header[HEAD_AT])
        self.misses = int(self._header[MISSES_AT])
        self.pinned = 0
        self._seen = self.hits
        self._seen_misses = self.misses

    def pins(self, into: Array) -> Array:
        """The span ids that the lane pins now; `into` is (4096,) uint64 scratch.

        A word that is torn while it is read belongs to a pin made after the fence, whose reader will find its slot
        changed; whole words are all that earlier readers left. A closed reader finds none: no process holds the lane.
        """
        if self._fd < 0:
            return into[:0]
        got = os.preadv(self._fd, [into.data], PAGE_BYTES)
        words = into[: got // 8]
        found: Array = words[words != 0]
        self.pinned = len(found)
        return found

    def drain(self, most: int = LANE_LOG_WORDS) -> LaneRecords | None:
        """What was recorded since the last call, the latest `most` of it; None if nothing was."""
        header = self._header
        if self._fd < 0 or os.preadv(self._fd, [header.data], 0) < header.nbytes:
            return None
        self.hits, self.misses = int(header[HEAD_AT]), int(header[MISSES_AT])
        fresh = self.hits - self._seen
        misses = self.misses - self._seen_misses
        # Two threads may store their heads in the wrong order, so it can seem to go back; the next record mends it.
        if fresh <= 0 and misses <= 0:
            return None
        kept = max(0, min(fresh, most, LANE_LOG_WORDS))
        ids = np.zeros(kept, np.uint64)
        first = (self.hits - kept) & LOG_MASK
        # Two reads where the log wraps. A record that is overwritten meanwhile is told as the newer one, as it would be
        # in one read of the whole log.
        os.preadv(self._fd, [ids[: LANE_LOG_WORDS - first].data], (LOG_AT + first) * 8)
        os.preadv(self._fd, [ids[LANE_LOG_WORDS - first :].data], LOG_AT * 8)
        self._seen = max(self._seen, self.hits)
        self._seen_misses = max(self._seen_misses, self.misses)
        return LaneRecords(ids, max(0, fresh) - kept, max(0, misses))

    def abandoned(self) -> bool:
        """Whether no process holds the lane any more, by descriptor or mapping. True at most once: it stays locked."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Closes its descriptor."""
        os.close(self._fd)
        self._fd = -1
