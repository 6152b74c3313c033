"""The counts of one processor cache: lookups, hits, and the items that were sent as trees.

Owns: the counts, and what was reported last. Does not own: the outcomes that are counted (cache.py).
Invariants: all counts of one item change together.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of lookups. `passed_through`: how many items were sent as trees, by reason:

    - "too_large": larger than object_bytes_max or the ring; "unsupported": a leaf of an unsupported type
    - "full": no room besides pinned entries; "pressure": the host is in emergency; "refused": the daemon refused it for
      another reason
    - "no_daemon"; "late": no answer in time, or an earlier put is still unanswered
    - "held": no room in the sender's holds; "invalidated": a receiver missed it recently
    - "gone": it was held, and cleared meanwhile
    - "mismatch": the tree stored under its hash is not one that this sender's processor makes
    """

    hits: int = 0
    total: int = 0
    passed_through: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        """Hits divided by lookups; 0 without lookups."""
        return self.hits / self.total if self.total else 0.0

    def since(self, before: Stats) -> Stats:
        """The counts since `before`."""
        passed = {reason: count - before.passed_through.get(reason, 0) for reason, count in self.passed_through.items()}
        return Stats(
            self.hits - before.hits,
            self.total - before.total,
            {reason: count for reason, count in passed.items() if count},
        )


class ItemCounts:
    """Counts items. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported = Stats()
        self.reset()

    def sent(self, hit: bool, reason: str | None) -> None:
        """Counts an item of a sender. `reason`: why it is sent as a tree; None if a reference is sent."""
        with self._lock:
            self._total += 1
            self._hits += hit
            if reason is not None:
                self._passed[reason] += 1

    def received(self, total: int, hits: int) -> None:
        """Counts the items of a receiver's request."""
        with self._lock:
            self._total += total
            self._hits += hits

    def stats(self, delta: bool) -> Stats:
        """The counts since the start, or since `reset`; with `delta` since the last call with `delta`."""
        with self._lock:
            stats = Stats(self._hits, self._total, dict(self._passed))
            if not delta:
                return stats
            reported, self._reported = self._reported, stats
            return stats.since(reported)

    def reset(self) -> None:
        """Sets all counts to 0."""
        with self._lock:
            self._hits = self._total = 0
            self._passed: Counter[str] = Counter()
            self._reported = Stats()

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()
