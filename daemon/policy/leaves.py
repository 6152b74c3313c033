"""Who may go at once, in queues by class, weight and owner; and the order that follows from queues.

A queue holds leaves of one class, one weight and one owner by last use. As a class's index rises to one peak and falls
after it (`hazards`), the coldest of a queue is its oldest or its youngest: an order over all compares the ends of
queues.

Owns: queues, and in which of them a span stands. Does not own who may go.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from .ages import Age
from .hazards import BOUNDS, Row
from .thinning import thin

Rank = tuple[float, int, int]


@dataclass(slots=True, eq=False)
class Agent:
    """`state`: how its last call ended. `spans`: how many known or remembered entries are its own."""

    name: str
    state: int
    spans: int = 0
    leaves: dict[int, Span] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Span:
    """An entry, known or remembered. `serial` orders last uses. `gap`: the age at which it was used last.

    `put_at`: not 0 where it belongs to the window (`window`).
    `agent`: whose it is; None where several use it (`shared`), or nobody said. `queue`: where it stands, if it does;
    `ticket`: as what. `row`: its class, as long as its agent's state is `state`.
    """

    number: int
    key: bytes
    depth: int
    size_bytes: int
    weight: int
    used_at: float = 0.0
    serial: int = 0
    uses: int = 0
    gap: float = 0.0
    shared: bool = False
    agent: Agent | None = None
    age: Age[Span] | None = None
    queue: Queue | None = None
    ticket: int = 0
    row: Row | None = None
    state: int = -1
    owner: int = 0
    put_at: int = 0


# (serial, or its opposite in the heap of the youngest; ticket; last use; span)
Place = tuple[int, int, float, Span]


@dataclass(slots=True, eq=False)
class Queue:
    """Places of leaves, oldest and youngest first. Those that have left are still there, but none of them first."""

    row: Row
    value: float
    name: tuple[Row, int, int]
    oldest: list[Place] = field(default_factory=list)
    youngest: list[Place] = field(default_factory=list)
    standing: int = 0
    thinned: tuple[int, int] = (0, 0)
    """How far leftovers of the oldest and of the youngest were looked for (`thinning`)."""

    def has(self, place: Place) -> bool:
        """Whether the place is that of a span which still stands there."""
        return place[3].ticket == place[1]

    def tidy(self) -> None:
        """Lets go of the places of those that have left: the first ones, and some others."""
        for heap in (self.oldest, self.youngest):
            while heap and not self.has(heap[0]):
                heappop(heap)
        at_oldest, at_youngest = self.thinned
        if len(self.oldest) > 2 * self.standing + 16:
            at_oldest = thin(self.oldest, at_oldest, self.has)
        if len(self.youngest) > 2 * self.standing + 16:
            at_youngest = thin(self.youngest, at_youngest, self.has)
        self.thinned = at_oldest, at_youngest


# (worth, side, order, ticket, queue, heap of places, where in it)
End = tuple[float, int, int, int, Queue, list[Place], int]


CLOCK_SHARE: Final = 1
"""The clock is set no more often than once for each so many queues that it takes."""
_WITHIN: Final = -1
"""What stands before the ends: a place within a queue's heap."""


class Leaves:
    """All queues, and the heap of their ends. An operation is O(log n) amortised, but for `set_clock`.

    Ages are as of the clock that was set last, so that the ends' order stands until the next time.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[Row, int, int], Queue] = {}
        self._ends: list[End] = []
        self._tickets = 0
        self._standing = 0
        self._clock = 0.0
        self._passed = 0

    def __len__(self) -> int:
        return self._standing

    def set_clock(self, now: float) -> None:
        """Worths from now on are as of `now`, and of the rows as they are now. O(number of queues)."""
        self._clock = now
        self._passed = 0
        ends: list[End] = []
        for queue in self._queues.values():
            for side, heap in enumerate((queue.oldest, queue.youngest)):
                end = self._end(queue, heap, 0, side)
                if end is not None:
                    ends.append(end)
        heapify(ends)
        self._ends = ends

    def pass_clock(self, now: float) -> None:
        """`now` has come: the clock is set where that is not too often for what it takes."""
        self._passed += 1
        if now > self._clock and self._passed * CLOCK_SHARE >= len(self._queues):
            self.set_clock(now)

    def rank(self, row: Row, weight: int, used_at: float, serial: int) -> Rank:
        """Warmth: worth first; of equal worth the one further from its class's peak is colder."""
        at = bisect_right(BOUNDS, self._clock - used_at)
        worth = row.index[at] * 2.0**weight
        return (worth, 0, serial) if at >= row.peak else (worth, 1, -serial)

    def add(self, span: Span, row: Row) -> None:
        """The span, which stands nowhere, has become a leaf."""
        assert span.queue is None, span.number
        name = (row, span.weight, span.owner)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = Queue(row, 2.0**span.weight, name)
        self._tickets += 1
        ticket = self._tickets
        span.queue, span.ticket = queue, ticket
        self._standing += 1
        queue.standing += 1
        if span.agent is not None:
            span.agent.leaves[span.number] = span
        heappush(queue.oldest, (span.serial, ticket, span.used_at, span))
        if queue.oldest[0][1] == ticket:
            self._show_end(queue, queue.oldest, 0)
        heappush(queue.youngest, (-span.serial, ticket, span.used_at, span))
        if queue.youngest[0][1] == ticket:
            self._show_end(queue, queue.youngest, 1)

    def leave(self, span: Span) -> None:
        """The span, wherever it stands, is no leaf any more, or its place has changed."""
        queue, ticket = span.queue, span.ticket
        if queue is None:
            return
        span.queue, span.ticket = None, 0
        self._standing -= 1
        queue.standing -= 1
        if span.agent is not None:
            del span.agent.leaves[span.number]
        if not queue.standing:
            del self._queues[queue.name]
            queue.oldest.clear()
            queue.youngest.clear()
        else:
            was_oldest, was_youngest = queue.oldest[0][1] == ticket, queue.youngest[0][1] == ticket
            queue.tidy()
            if was_oldest:
                self._show_end(queue, queue.oldest, 0)
            if was_youngest:
                self._show_end(queue, queue.youngest, 1)
        ends = self._ends
        while ends and not (ends[0][5] and ends[0][5][0][1] == ends[0][3]):
            heappop(ends)

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        """Spans from cold to warm, of `owners` alone if given."""
        # Heaps are read in their order without being changed: behind each place come the two below it.
        ends, front, seen = self._ends, list[tuple[End, int]](), set[tuple[int, int]]()
        if ends:
            front.append((ends[0], 0))
        while front:
            end, above = heappop(front)
            _, side, _, ticket, queue, heap, at = end
            if above >= 0:
                for below in (2 * above + 1, 2 * above + 2):
                    if below < len(ends):
                        heappush(front, (ends[below], below))
                if not heap or heap[0][1] != ticket or (ticket, side) in seen:
                    continue
                if owners is not None and queue.name[2] not in owners:
                    continue
                seen.add((ticket, side))
            place = heap[at]
            for below in (2 * at + 1, 2 * at + 2):
                further = self._end(queue, heap, below, side)
                if further is not None:
                    heappush(front, (further, _WITHIN))
            if queue.has(place):
                yield place[3].number

    def check_invariants(self, leaves: set[int]) -> None:
        """Asserts that exactly `leaves` stand, each in one queue, and that the ends are known."""
        found: list[int] = []
        shown = {(end[3], end[1]) for end in self._ends}
        for queue in self._queues.values():
            here = [place for place in queue.oldest if queue.has(place)]
            assert len(here) == queue.standing > 0
            assert {place[1] for place in here} == {place[1] for place in queue.youngest if queue.has(place)}
            for side, heap in enumerate((queue.oldest, queue.youngest)):
                end = self._end(queue, heap, 0, side)
                assert queue.has(heap[0]) and (end is None or (end[3], side) in shown)
            found += [place[3].number for place in here]
        assert len(found) == len(set(found)) == self._standing
        assert set(found) == leaves, (set(found), leaves)

    def _end(self, queue: Queue, heap: list[Place], at: int, side: int) -> End | None:
        """The place as an end; None where it is none of this side of the class's peak, or there is none."""
        if at >= len(heap):
            return None
        order, ticket, used_at, _ = heap[at]
        in_bucket = bisect_right(BOUNDS, self._clock - used_at)
        row = queue.row
        if (in_bucket < row.peak) != side:
            return None
        return (row.index[in_bucket] * queue.value, side, order, ticket, queue, heap, at)

    def _show_end(self, queue: Queue, heap: list[Place], side: int) -> None:
        end = self._end(queue, heap, 0, side)
        if end is not None:
            heappush(self._ends, end)
