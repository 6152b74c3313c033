"""The counts of one processor cache: lookups, hits, and the items that were sent as trees.

Owns: the counts, and what was reported last. Does not own: the outcomes that are counted (cache.py).
Invariants: all counts of one item change together.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...threads import forks


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
        passed = Counter(self.passed_through) - Counter(before.passed_through)
        return Stats(self.hits - before.hits, self.total - before.total, passed)


class ItemCounts:
    """Counts items. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._reported = Stats()
        forks.follow(self)

    def add(self, total: int, hits: int, reason: str | None = None) -> None:
        """Counts items. `reason`: why a sender sends its item as a tree."""
        with self._lock:
            now = self._now
            passed = Counter(now.passed_through)
            if reason is not None:
                passed[reason] += 1
            self._now = Stats(now.hits + hits, now.total + total, passed)

    def stats(self, delta: bool) -> Stats:
        """The counts since the start, or since `reset`; with `delta` since the last call with `delta`."""
        with self._lock:
            if not delta:
                return self._now
            reported, self._reported = self._reported, self._now
            return self._now.since(reported)

    def reset(self) -> None:
        """Sets all counts to 0."""
        with self._lock:
            self._now = self._reported = Stats()

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()
