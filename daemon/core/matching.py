"""Answers prefix queries from the index at once, and counts the uses of the matched blocks afterwards.

While the index is rebuilt after a restart, a query that does not match completely waits until the index is complete,
for `prefix_wait_s` at most. The waiting queries have at most HELD_TOKENS_MAX tokens together; a query over this limit
is answered at once.

Owns the waiting queries, and the uses that are still to be counted: every block of a match, the first one first, in
slices, so that no answer is delayed. Does not own the index (`sequences`).

Invariant: at most USES_MAX uses are queued. Beyond that, those of the oldest matches are dropped and counted as lost.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ...errors import BadPrefix, LimitReached
from ...ipc import messages
from ...shm.layout import NAMESPACE_TAG_BYTES
from ...shm.prefix import SCOPE_BYTES
from .events import PrefixAsked
from .expiry import Expiry
from .outbox import StoreOutbox
from .prefix_index import Found
from .span_table import SpanTable

USES_SLICE: Final = 1024
"""Uses that one Tick counts: 1 to 2 ms."""
USES_MAX: Final = 1 << 16
"""Limit on uses that wait to be counted."""
HELD_TOKENS_MAX: Final = 1 << 24
"""Limit on the tokens of all queries together that wait for the rebuilt index."""
ANSWERS_SLICE: Final = 16
"""Waiting queries that one Tick answers: 1 to 2 ms."""


class Matching:
    """Answers queries over the sequences of `memory`."""

    def __init__(
        self, memory: SpanTable, expiry: Expiry, outbox: StoreOutbox, prefix_tokens_max: int, wait_s: float
    ) -> None:
        self._memory = memory
        self._expiry = expiry
        self._outbox = outbox
        self._tokens_max = prefix_tokens_max
        self._wait_s = wait_s
        self._held: deque[tuple[PrefixAsked, float]] = deque()
        self._held_tokens = 0
        self._uses: deque[tuple[list[bytes], str]] = deque()
        self._queued_uses = 0

    @property
    def due(self) -> bool:
        """Whether `advance` has uses to count or queries to answer."""
        return bool(self._uses) or (bool(self._held) and not self._memory.sequences.rebuilding)

    @property
    def held(self) -> int:
        """The number of queries that wait for the rebuilt index."""
        return len(self._held)

    def next_timer(self) -> float | None:
        """When a query has waited for its maximum time."""
        return self._held[0][1] if self._held else None

    def change_limits(self, prefix_tokens_max: int, wait_s: float) -> None:
        """Applies to later queries."""
        self._tokens_max, self._wait_s = prefix_tokens_max, wait_s

    def asked(self, event: PrefixAsked, now: float) -> None:
        """Answers a query, or holds it while the index is rebuilt.

        Raises:
            LimitReached: the query is longer than prefix_tokens_max.
            BadPrefix: the record is no query, or its media do not fit it.
        """
        message, query = event.message, event.record
        if query.count > self._tokens_max:
            raise LimitReached(
                f"a query of {query.count} tokens, and prefix_tokens_max is {self._tokens_max}: ask for fewer, or "
                "raise it"
            )
        if query.start or query.snapshot or query.parent is not None:
            raise BadPrefix("a query must be a whole sequence; this record begins later or is a snapshot")
        assert len(query.scope) == SCOPE_BYTES and len(message.namespace) == NAMESPACE_TAG_BYTES
        found = self._memory.sequences.index.match(message.namespace, query, event.folded)
        room = self._held_tokens + query.count <= HELD_TOKENS_MAX
        if self._memory.sequences.rebuilding and found.offset < query.count - 1 and self._wait_s and room:
            self._held.append((event, now + self._wait_s))
            self._held_tokens += query.count
            return
        self._answer(event, found)

    def _answer(self, event: PrefixAsked, found: Found) -> None:
        message, query = event.message, event.record
        counters = self._outbox.counters
        counters.prefix_queries += 1
        counters.prefix_hits += found.offset > 0
        counters.prefix_tokens_asked += query.count
        counters.prefix_tokens_matched += found.offset
        self._outbox.send(event.client, messages.Matched(message.id, found.offset, found.blocks, found.snapshot))
        if found.offset:
            last = [] if found.snapshot is None else [found.snapshot]
            self._queue_uses([*found.blocks, *last], message.agent)

    def advance(self, now: float) -> None:
        """Answers the next queries whose wait is over, and counts the next slice of uses. Entries that have ended
        meanwhile are not counted."""
        rebuilt = not self._memory.sequences.rebuilding
        for _ in range(min(len(self._held), ANSWERS_SLICE)):
            if not rebuilt and now < self._held[0][1]:
                break
            event, _ = self._held.popleft()
            query = event.record
            self._held_tokens -= query.count
            found = self._memory.sequences.index.match(event.message.namespace, query, event.folded)
            self._answer(event, found)
        left = USES_SLICE
        find = self._memory.entries.find
        while self._uses and left > 0:
            keys, agent = self._uses.popleft()
            self._queued_uses -= len(keys)
            left -= len(keys)
            self._expiry.used([entry for entry in map(find, keys) if entry is not None], now, agent)

    def _queue_uses(self, keys: list[bytes], agent: str) -> None:
        self._uses.append((keys, agent))
        self._queued_uses += len(keys)
        while self._queued_uses > USES_MAX:
            lost, _ = self._uses.popleft()
            self._queued_uses -= len(lost)
            self._outbox.counters.prefix_uses_lost += len(lost)
