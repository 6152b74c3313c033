"""Answers prefix queries from the index at once, and counts the uses of the matched blocks afterwards.

While the index is rebuilt after a restart, a query that does not match completely waits until the index is complete,
for `prefix_wait_s` at most. The waiting queries have at most HELD_TOKENS_MAX tokens together; a query over this limit
is answered at once.

Owns the waiting queries, and the uses that are still to be counted: every block of a match, the first one first, in
slices, so that no answer is delayed. Does not own the index (`blocks`).

Invariant: at most USES_MAX uses are queued. Beyond that, those of the oldest matches are dropped and counted as lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...errors import BadPrefix, LimitReached
from ...ipc.messages import control as messages
from ...shm.payloads.prefix import SCOPE_BYTES
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..forms.events import PrefixAsked
from ..forms.outbox import StoreOutbox
from ..store.slots import Slots
from ..store.table import LIVE, RowTable
from ..store.tenants import AgentNumbers
from .blocks import SequenceBlocks
from .index import Found

USES_SLICE: Final = 1024
"""Uses that one Tick counts: less than 1 ms."""
USES_MAX: Final = 1 << 16
HELD_TOKENS_MAX: Final = 1 << 24
"""Limit on the tokens of all queries together that wait for the rebuilt index."""
ANSWERS_SLICE: Final = 16
"""Waiting queries that one Tick answers: 1 to 2 ms."""

Used = Callable[[list[int], float, int], object]
"""(rows, now, the number of an agent): stored entries were used, in this order."""


@dataclass(eq=False, repr=False)
class Matching:
    """Answers queries over the sequences of `blocks`. `used`: counts uses."""

    _table: RowTable
    _slots: Slots
    _agents: AgentNumbers
    _blocks: SequenceBlocks
    _used: Used
    _outbox: StoreOutbox
    wait_s: float

    def __post_init__(self) -> None:
        self.held: deque[tuple[PrefixAsked, float]] = deque()
        self._held_tokens = 0
        self._uses: deque[tuple[list[int], int]] = deque()
        self._queued_uses = 0

    @property
    def due(self) -> bool:
        """Whether `advance` has uses to count or queries to answer."""
        return bool(self._uses) or (bool(self.held) and not self._blocks.rebuilding)

    def next_timer(self) -> float | None:
        """When a query has waited for its maximum time."""
        return self.held[0][1] if self.held else None

    def asked(self, event: PrefixAsked, now: float) -> None:
        """Answers a query, or holds it while the index is rebuilt. Raises LimitReached if it is longer than
        prefix_tokens_max, BadPrefix if the record is no query, or its media do not fit it."""
        message, query = event.message, event.record
        if query.count > self._blocks.prefix_tokens_max:
            raise LimitReached(
                f"a query of {query.count} tokens, and prefix_tokens_max is {self._blocks.prefix_tokens_max}: ask for "
                "fewer, or raise it"
            )
        if query.start or query.snapshot or query.parent is not None:
            raise BadPrefix("a query must be a whole sequence; this record begins later or is a snapshot")
        assert len(query.scope) == SCOPE_BYTES and len(message.namespace) == NAMESPACE_TAG_BYTES
        found = self._blocks.index.match(message.namespace, query, event.folded)
        room = self._held_tokens + query.count <= HELD_TOKENS_MAX
        if self._blocks.rebuilding and found.offset < query.count - 1 and self.wait_s and room:
            self.held.append((event, now + self.wait_s))
            self._held_tokens += query.count
            return
        self._answer(event, found)

    def advance(self, now: float) -> None:
        """Answers the next queries whose wait is over, and counts the next slice of uses. Entries that have ended
        meanwhile are not counted."""
        rebuilt = not self._blocks.rebuilding
        for _ in range(min(len(self.held), ANSWERS_SLICE)):
            if not rebuilt and now < self.held[0][1]:
                break
            event, _ = self.held.popleft()
            self._held_tokens -= event.record.count
            self._answer(event, self._blocks.index.match(event.message.namespace, event.record, event.folded))
        left, states = USES_SLICE, self._table.states
        while self._uses and left > 0:
            span_ids, agent = self._uses.popleft()
            self._queued_uses -= len(span_ids)
            left -= len(span_ids)
            rows = [row for row in map(self._table.row_of, span_ids) if states[row] == LIVE]
            if rows:
                self._used(rows, now, agent)

    def _answer(self, event: PrefixAsked, found: Found) -> None:
        message, counters = event.message, self._outbox.counters
        key, slot_of = self._slots.key, self._table.slots
        counters.prefix_queries += 1
        counters.prefix_tokens_asked += event.record.count
        keys = [key(slot_of[row]) for row in found.blocks]
        snapshot = key(slot_of[found.snapshot]) if found.snapshot else None
        self._outbox.send(event.client, messages.Matched(message.id, found.offset, keys, snapshot))
        if not found.offset:
            return
        counters.prefix_hits += 1
        counters.prefix_tokens_matched += found.offset
        rows = [*found.blocks, found.snapshot] if found.snapshot else found.blocks
        self._uses.append(([self._table.span_ids[row] for row in rows], self._agents.named(message.agent)))
        self._queued_uses += len(rows)
        while self._queued_uses > USES_MAX:
            lost, _ = self._uses.popleft()
            self._queued_uses -= len(lost)
            counters.prefix_uses_lost += len(lost)
