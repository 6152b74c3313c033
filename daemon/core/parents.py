"""The parents of puts in flight: whether there is one, and the puts that wait for theirs.

A put may name a parent that is in flight itself, so that a chain is put without waiting for each answer. If the child's
payload is complete first, the child waits until the put of its parent has ended, and is published or refused then.

Owns the puts that wait, and what the policy is told of a put with a parent. Does not own the puts (`puts`), nor the
links between stored entries (`sequences`).

Invariants: a put waits for parents whose puts began before it, so no two puts wait for each other. What waits takes no
turn in the queue for room, and no put waits for it to free its span.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...errors import ParentGone
from ...shm.prefix import PrefixRecord
from ..policy.candidate import Candidate
from .admission import parent_gone
from .entries import SpanEntry
from .puts import PutProgress, PutTable
from .span_table import SpanTable


class Parents:
    """The parents of the puts in `puts`."""

    def __init__(self, memory: SpanTable, puts: PutTable) -> None:
        self._memory = memory
        self._puts = puts
        self._waiting: dict[bytes, dict[PutProgress, PrefixRecord | None]] = {}
        self._ready: deque[tuple[PutProgress, PrefixRecord | None]] = deque()

    @property
    def any_ready(self) -> bool:
        """Whether a put is to be published, or refused, now that a put of its parent has ended."""
        return bool(self._ready)

    def refusal(self, parent: bytes | None, put: PutProgress | None = None) -> ParentGone | None:
        """The refusal of a put whose parent is neither stored nor in flight, so that the put takes no room. None if the
        parent is stored, hidden as a victim, or in flight since before `put`. A span is refused by its Commit only."""
        entries = self._memory.entries
        if parent is None or (put is not None and put.takes):
            return None
        if entries.find(parent) or entries.hidden(parent) or self._puts.in_flight(parent, put):
            return None
        return parent_gone(parent)

    def began(self, put: PutProgress) -> None:
        """The put's parent stays from now on."""
        if put.commit.parent is not None:
            self._memory.sequences.follow(put.commit.parent)

    def ended(self, put: PutProgress) -> None:
        """The put has ended: its parent may go. The puts that waited for the put's key are ready."""
        parent = put.commit.parent
        if parent is not None:
            self._memory.sequences.unfollow(parent)
        if put.waits_for_parent:
            self._puts.set_waiting(put, waits=False)
            self._ready = deque(each for each in self._ready if each[0] is not put)
            waiting = self._waiting.get(parent or b"", {})
            waiting.pop(put, None)
            if parent is not None and not waiting:
                self._waiting.pop(parent, None)
        self._ready += self._waiting.pop(put.key, {}).items()

    def waits(self, put: PutProgress, record: PrefixRecord | None) -> bool:
        """Whether a put whose payload is complete, and has `record`, has to wait for its parent. It waits from now
        on."""
        parent = put.commit.parent
        if parent is None or self._memory.entries.find(parent) or not self._puts.in_flight(parent, put):
            return False
        self._puts.set_waiting(put, waits=True)
        self._waiting.setdefault(parent, {})[put] = record
        return True

    def take_ready(self) -> tuple[PutProgress, PrefixRecord | None] | None:
        """Takes one of the puts that are ready, with the record of its payload."""
        if not self._ready:
            return None
        ready = self._ready.popleft()
        self._puts.set_waiting(ready[0], waits=False)
        return ready

    def published(self, put: PutProgress, now: float) -> SpanEntry | None:
        """The published entry of the put's parent. A parent that is a victim is republished, with its hidden ancestors.
        None without a parent, or if it is not stored, or one of its ancestors has ended."""
        key, entries = put.commit.parent, self._memory.entries
        if key is None:
            return None
        entry, victim = entries.find(key), entries.hidden(key)
        if entry is not None or victim is None:
            return entry
        before = self._memory.sequences.hidden_ancestors(victim)
        if before is None:
            return None
        for each in (*reversed(before), victim):
            self._memory.republish(each, now)
        return victim

    def admission_test(self, put: PutProgress) -> Callable[[int], bool] | None:
        """The test whether the policy prefers the put to a victim. None: no test; only puts with a stored parent are
        tested, and no spans, of whose puts too little is known."""
        memory, commit = self._memory, put.commit
        parent = memory.entries.find(commit.parent) if commit.parent is not None and not put.takes else None
        if parent is None:
            return None
        new = Candidate(
            memory.spans.next_span_id,
            commit.key,
            put.need.span_bytes,
            commit.tokens,
            commit.cost_ms,
            parent.depth + 1,
            parent.before_bytes + parent.span_bytes,
            commit.agent,
        )
        return lambda victim: memory.policy.admits(new, victim)

    def check_invariants(self) -> None:
        """Asserts that the puts that wait are those of the table, and that each has a put to wait for."""
        waiting = [put for own in self._waiting.values() for put in own]
        ready = [put for put, _ in self._ready]
        assert {put for put in self._puts if put.waits_for_parent} == {*waiting, *ready}
        assert all(self._waiting.values())
        for put in waiting:
            assert put.commit.parent is not None and self._puts.in_flight(put.commit.parent, put)
