"""Queries for cached prefixes: answered at once from the index, counted as uses of what they found afterwards.

Owns the uses that are still to be counted: of every piece of a match, the first one first, in slices, so that no answer
waits for them. More than USES_MAX are not kept in mind: those of the oldest matches are left out, and counted as lost.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ...errors import BadPrefix, LimitReached
from ...ipc import messages
from ...shm.layout import NAMESPACE_TAG_BYTES
from ...shm.prefix import SCOPE_BYTES
from .events import PrefixAsked
from .memory import Memory
from .outbox import Outbox
from .tenure import Tenure

USES_SLICE: Final = 1024
"""Uses that one Tick counts: 1 to 2 ms."""
USES_MAX: Final = 1 << 16


class Matching:
    """Answers queries over `memory`'s sequences."""

    def __init__(self, memory: Memory, tenure: Tenure, outbox: Outbox, prefix_tokens_max: int) -> None:
        self._memory = memory
        self._tenure = tenure
        self._outbox = outbox
        self._tokens_max = prefix_tokens_max
        self._uses: deque[tuple[list[bytes], str]] = deque()
        self._waiting = 0

    @property
    def due(self) -> bool:
        """Whether `go_on` has something to do."""
        return bool(self._uses)

    def change_limits(self, prefix_tokens_max: int) -> None:
        """For queries from now on."""
        self._tokens_max = prefix_tokens_max

    def asked(self, event: PrefixAsked) -> None:
        """Answers a query.

        Raises:
            LimitReached: it is longer than prefix_tokens_max.
            BadPrefix: it is none, or its media do not fit it.
        """
        message, query = event.message, event.piece
        if query.count > self._tokens_max:
            raise LimitReached(
                f"a query of {query.count} tokens, and prefix_tokens_max is {self._tokens_max}: ask for fewer, or "
                "raise it"
            )
        if query.start or query.snapshot or query.parent is not None:
            raise BadPrefix("a query is a whole sequence, and this one is a piece of one")
        assert len(query.scope) == SCOPE_BYTES and len(message.namespace) == NAMESPACE_TAG_BYTES
        found = self._memory.sequences.index.match(message.namespace, query, event.folded)
        counters = self._outbox.counters
        counters.prefix_queries += 1
        counters.prefix_hits += found.offset > 0
        counters.prefix_tokens_asked += query.count
        counters.prefix_tokens_matched += found.offset
        self._outbox.send(event.client, messages.Matched(message.id, found.offset, found.blocks, found.snapshot))
        if found.offset:
            last = [] if found.snapshot is None else [found.snapshot]
            self._keep_in_mind([*found.blocks, *last], message.agent)

    def go_on(self, now: float) -> None:
        """Counts the next slice of uses. What has gone meanwhile is not counted."""
        left = USES_SLICE
        find = self._memory.entries.find
        while self._uses and left > 0:
            keys, agent = self._uses.popleft()
            self._waiting -= len(keys)
            left -= len(keys)
            self._tenure.used([entry for entry in map(find, keys) if entry is not None], now, agent)

    def _keep_in_mind(self, keys: list[bytes], agent: str) -> None:
        self._uses.append((keys, agent))
        self._waiting += len(keys)
        while self._waiting > USES_MAX:
            lost, _ = self._uses.popleft()
            self._waiting -= len(lost)
            self._outbox.counters.prefix_uses_lost += len(lost)
