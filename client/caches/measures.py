"""Sizes of nested trees with leaves of any type, and what a cache counts.

Owns: the rule how many bytes a leaf counts, and counters. Does not own: limits, nor what is counted.
Invariants: imports neither torch nor numpy; a leaf's own `nbytes` is its size. Counts that are added together change
together.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...shm.payloads.header import NODES_MAX
from ..threads import forks


def array_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays, tensors and byte strings, of any shape, dtype and depth. Scalars and text count 0.

    A leaf that occurs twice counts twice, as when it is stored. A tree that is too large to store, or that contains
    itself, is counted up to the largest number of nodes that can be stored.
    """
    size_bytes, rest = 0, [tree]
    # Not recursive: a tree may be deeper than the stack.
    for _ in range(NODES_MAX):
        if not rest:
            break
        node = rest.pop()
        if isinstance(node, Mapping):
            rest.extend(node.values())
        elif isinstance(node, list | tuple):
            rest.extend(node)
        elif isinstance(node, bytes | bytearray):
            size_bytes += len(node)
        else:
            # `nbytes` is right for 0 dimensions and narrow dtypes too. A sparse tensor's raises RuntimeError.
            with suppress(AttributeError, RuntimeError):
                size_bytes += int(node.nbytes)
    return size_bytes


class Counts:
    """Counts by name. Thread-safe. The child of a fork begins anew."""

    _now: Counter[str]
    _last: Counter[str]

    def __init__(self) -> None:
        self.after_fork_in_child()
        forks.follow(self)

    def add(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._now.update(counts)

    def count(self, name: str) -> None:
        """Adds 1."""
        self.add({name: 1})

    def since_reset(self) -> Counter[str]:
        with self._lock:
            return self._now.copy()

    def since_last(self) -> Counter[str]:
        """The counts since the last call of this method."""
        with self._lock:
            since = self._now - self._last
            self._last = self._now.copy()
            return since

    def reset(self) -> None:
        with self._lock:
            self._now, self._last = Counter(), Counter()

    def after_fork_in_child(self) -> None:
        """The counts are the parent's, and a thread of the parent may have held the lock. For the library."""
        self._lock = threading.Lock()
        self.reset()
