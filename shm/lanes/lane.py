"""A client's lane: its pin words, its access log, its counters. Only that client writes the lane; the daemon reads it.

Invariants: a lane's lifetime is that of a kernel lock, not of a socket. The daemon takes `flock(LOCK_SH)` on a file
description of its own, passes the description to the client and closes its copy. The lock then lasts while any process
has a descriptor or a mapping of it. The daemon forgets a lane only after it got `LOCK_EX`.

Finalizers here use a few operations that the GIL makes atomic, and never a lock: a finalizer that runs in a thread
which holds the lock would deadlock. A pin's release does not rest on the lane being alive: since 2.5, numpy lets go of
what an array lies over before it calls the array's weak references, and the lane may end with that.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count, islice
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from types import CodeType
from typing import Any, Final
from weakref import ref

import numpy as np

from ...errors import LayoutMismatch
from ..ring.layout import LANE_BYTES, LANE_HEADER_WORDS, LANE_LOG_WORDS, LANE_WORDS, QUEUE_AT, unpack_lane_header

# Offsets of a lane's fields, in words from the lane's beginning.
HEAD_AT: Final = 8
MISSES_AT: Final = 16
PINS_AT: Final = LANE_HEADER_WORDS
LOG_AT: Final = LANE_HEADER_WORDS + LANE_WORDS
SPARE_END: Final = LANE_HEADER_WORDS + 16
VIEW_WORDS: Final = LOG_AT - SPARE_END
LOG_MASK: Final = LANE_LOG_WORDS - 1
_WORDS: Final = frozenset(range(PINS_AT, LOG_AT))

Array = np.ndarray[Any, Any]


class GrantPin:
    """Pins the span of a grant until it is collected."""

    __slots__ = ("__weakref__",)


class Lane:
    """The client's side of its lane. Its attributes are public for the client's view of the ring.

    `free` holds the numbers of the words that pin nothing. `free.pop()` takes a word; `releases[number]`, or
    `new_release(number)` if that is None, is the finalizer that clears the word and returns it when the last view is
    collected. `refs` keeps the weak references that call the finalizers. `heads` counts the records of the log.

    Invariants: words return to `_state[1]`. It is `free` itself unless the lane is suspended or frozen; then `free`
    stays empty, whichever thread returns words. Words below `SPARE_END` are for grants alone, so that views of any
    number leave room for puts; they return to `_spare_state[1]`.
    """

    __slots__ = (
        *("__weakref__", "_batches", "_home", "_kept", "_map", "_misses", "_spare_state", "_state"),
        *("free", "frozen", "heads", "lane_id", "refs", "releases", "words"),
    )

    def __init__(self, fd: int) -> None:
        """Maps the lane behind `fd`, which the caller keeps. Raises LayoutMismatch if it is none of this layout."""
        if os.fstat(fd).st_size != LANE_BYTES:
            raise LayoutMismatch(f"a lane of {os.fstat(fd).st_size} bytes, expected {LANE_BYTES}")
        self._map = mmap(fd, LANE_BYTES, MAP_SHARED, PROT_READ | PROT_WRITE)
        self.lane_id = unpack_lane_header(self._map)
        self.words = memoryview(self._map).cast("Q")
        self.free = list(range(PINS_AT + LANE_WORDS - 1, SPARE_END - 1, -1))
        self.frozen = False
        # While the lane is suspended: the free list from before, and the words that were in it.
        self._home: list[int] | None = None
        self._kept: list[int] = []
        self.heads = count()
        self._misses = count(1)
        # By the first word of each batch: the reference to its array, all of its words, its finalizer.
        self._batches: dict[int, tuple[ref[Any], list[int], Callable[[object], None]]] = {}
        # Each entry is None again once its finalizer has run.
        self.refs: list[ref[Any] | None] = [None] * LOG_AT
        # The finalizers hold this list, not the lane. A lane must be collected with its last view, not in a later run
        # of the cycle collector. The list keeps the references, and so the finalizers, until the last of them has run:
        # the lane may be collected before that.
        self._state: list[Any] = [self.words, self.free, self._batches, self.refs]
        self._spare_state: list[Any] = [self.words, list(range(PINS_AT, SPARE_END)), self._batches, self.refs]
        # Made at need: all of them take longer than the rest of an attach, and a megabyte.
        self.releases: list[Callable[[object], None] | None] = [None] * LOG_AT

    @property
    def in_use(self) -> int:
        """Number of words that pin a span or that a thread is just taking or returning."""
        return LANE_WORDS - len(self._state[1]) - len(self._kept) - len(self._spare_state[1])

    @property
    def in_use_by_views(self) -> int:
        """As `in_use`, without the words of grants. A forked child has the views too; it does not write into grants."""
        in_use = self.in_use
        return in_use - sum(each is not None and type(each()) is GrantPin for each in self.refs.copy())

    @property
    def queue(self) -> memoryview:
        """The bytes of the queue of records (records.py)."""
        return memoryview(self._map)[QUEUE_AT:LANE_BYTES]

    def pin(self, span_id: int) -> int:
        """Publishes a pin of the span, and returns its word's number. The caller then checks that the slot's seq is
        unchanged, and else calls `unpin`. Raises IndexError if every word is taken."""
        # `words` is loaded before the free list. If `freeze` replaces the words in between, the free list is empty, so
        # no pin goes to the replacement.
        words = self.words
        word = self.free.pop()
        # SYNC POINT: this store and the caller's load of seq may be reordered here; the daemon's fence makes both
        # orders safe.
        words[word] = span_id
        return word

    def unpin(self, word: int) -> None:
        """Releases a pin that is not tied to any view."""
        self.words[word] = 0
        self._state[1].append(word)

    def tie(self, word: int, root: Array) -> None:
        """Ties the word's pin to `root`: the pin is released when `root` and all views of it are collected."""
        self.refs[word] = ref(root, self.releases[word] or self.new_release(word))

    def lend(self, span_id: int) -> GrantPin:
        """Pins a grant's span until the returned object is collected. Raises IndexError if every word is taken."""
        held = GrantPin()
        # Loaded first, as in `pin`.
        words = self.words
        try:
            word = self.free.pop()
        except IndexError:
            word = self._spare_state[1].pop()
        words[word] = span_id
        self.refs[word] = ref(held, self.releases[word] or self.new_release(word))
        return held

    def new_release(self, word: int) -> Callable[[object], None]:
        """Makes the finalizer of a word that the caller has taken."""
        state = self._spare_state if word < SPARE_END else self._state
        release = self.releases[word] = _releaser(state, word)
        return release

    def tie_many(self, words: list[int], root: Array) -> Array:
        """`tie` for a batch: all pins of `words` are released together with `root`. Returns `words`, (n,) integers."""
        numbers = np.array(words, np.intp)
        state = self._state

        def release(_: object) -> None:
            np.frombuffer(state[0], "u8")[numbers] = 0
            state[2].pop(words[0], None)
            state[3][words[0]] = None
            state[1].extend(words)

        if words:
            # The batch owns its first word, so that word's place in `refs` is unused.
            tied = self.refs[words[0]] = ref(root, release)
            self._batches[words[0]] = tied, words, release
        return numbers

    def take_many(self, wanted: int) -> list[int]:
        """Takes up to `wanted` free words; fewer if fewer are free."""
        words: list[int] = []
        # list.extend keeps the words taken before the free list was empty.
        with suppress(IndexError):
            words.extend(islice(iter(self.free.pop, None), wanted))
        return words

    def log(self, span_id: int) -> None:
        """Records a hit for the daemon's statistics. Overwrites the oldest record of a full log."""
        head = next(self.heads)
        self.words[LOG_AT + (head & LOG_MASK)] = span_id
        self.words[HEAD_AT] = head + 1

    def log_many(self, span_ids: Array) -> None:
        """`log` for a batch; `span_ids` is (n,) uint64."""
        if not len(span_ids):
            return
        # Takes as many numbers as there are records. If another thread takes a number in between, one record of that
        # thread is lost.
        first = next(self.heads)
        deque(islice(self.heads, len(span_ids) - 1), maxlen=0)
        heads = np.arange(first, first + len(span_ids))
        np.frombuffer(self.words, "u8")[LOG_AT + (heads & LOG_MASK)] = span_ids
        self.words[HEAD_AT] = first + len(span_ids)

    def log_miss(self) -> None:
        """Counts a lookup without a hit."""
        self.words[MISSES_AT] = next(self._misses)

    def log_misses(self, misses: int) -> None:
        """`log_miss` for a batch of `misses` lookups."""
        for number in deque(islice(self._misses, misses), maxlen=1):
            self.words[MISSES_AT] = number

    def suspend(self) -> None:
        """Gives out no word until `resume`, as if all words were taken. Calls may be repeated and nested. A thread that
        loaded the free list earlier either takes its word before the list is drained, and the word counts as in use, or
        finds the list empty."""
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
        """Ends `suspend`. A frozen lane stays frozen."""
        if self._home is None or self.frozen:
            return
        # Collects the words that a thread returned to the earlier free list, which it had loaded before `suspend`.
        self.suspend()
        kept, self._kept = self._kept, []
        self._state[1].extend(kept)
        self.free = self._state[1]
        self._home = None

    def strays(self) -> set[int]:
        """Words that are neither free nor tied to a live array: a thread is using them, or they are lost."""
        strays = set(_WORDS.difference(self._state[1], self._kept, self._spare_state[1]))
        for tied, words, _ in list(self._batches.values()):
            if self.refs[words[0]] is tied and tied() is not None:
                strays.difference_update(words)
        return {word for word in strays if (own := self.refs[word]) is None or own() is None}

    def reclaim(self, lost: set[int], nobody_holds_words: Callable[[], bool]) -> int:
        """Takes back words that were lost when a signal handler raised while a thread took or returned them.

        `nobody_holds_words()` is called twice. Each call returns whether there was a moment at which no other thread
        was inside a function of `HOLDING`; without such a moment, no word is reclaimed. Returns how many are.

        After the first such moment, a word that is neither free nor tied is lost, or its finalizer has not begun, since
        a suspended lane gives out no word. The finalizers of these words are disabled. After the second such moment no
        thread is inside a finalizer any more, so a word of `lost` that is still not free has no owner.
        """
        self.suspend()
        try:
            if not nobody_holds_words():
                return 0
            lost = lost & self.strays()
            for _, words, release in list(self._batches.values()):
                if lost.intersection(words):
                    _disable(release)
                    del self._batches[words[0]]
            for word in lost:
                if made := self.releases[word]:
                    _disable(made)
                self.releases[word] = None
            if not nobody_holds_words():
                return 0
            self.suspend()
            lost.difference_update(self._state[1], self._kept, self._spare_state[1])
            for word in lost:
                self.words[word] = 0
            self._kept.extend(lost)
            return len(lost)
        finally:
            self.resume()

    def freeze(self) -> None:
        """Stops writing this lane for ever. Finalizers continue, on a private copy of the words that no process reads.
        After a fork, both processes have views that depend on the same words, so neither may clear them. The kernel
        lock tells the daemon when both processes have unmapped the lane."""
        if self.frozen:
            return
        # Suspends before the words are replaced, so that no pin goes to the replacement.
        self.suspend()
        spare, self._spare_state[1] = self._spare_state[1], []
        with suppress(IndexError):
            self._kept.extend(iter(spare.pop, None))
        self._state[0] = self._spare_state[0] = self.words = memoryview(bytearray(LANE_BYTES)).cast("Q")
        self.frozen = True


def _releaser(state: list[Any], word: int) -> Callable[[object], None]:
    def release(_: object) -> None:
        state[0][word] = 0
        state[3][word] = None
        state[1].append(word)

    return release


def _disable(release: Any) -> None:
    """Disables a finalizer that has not begun yet. A check inside the finalizer would cost time in every get."""
    cell = release.__closure__[release.__code__.co_freevars.index("state")]
    cell.cell_contents = [bytearray(LANE_BYTES), [], {}, [None] * LOG_AT]


def _code_within(function: Any) -> CodeType:
    """The code of the finalizer that `function` makes."""
    return next(const for const in function.__code__.co_consts if isinstance(const, CodeType))


HOLDING: Final = frozenset(
    {
        *(f.__code__ for f in (Lane.pin, Lane.unpin, Lane.tie, Lane.lend, Lane.tie_many, Lane.take_many)),
        _code_within(_releaser),
        _code_within(Lane.tie_many),
    }
)
"""The code in which a thread may hold words that are neither free nor tied."""
