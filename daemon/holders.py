"""How many lanes pin each span: what clients are told of, and nothing is decided by.

Owns the counts as they were last told. Knows no entries: a lane may name spans that are gone, or never were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..shm.layout import REUSE_HOLDERS_MAX

Array = np.ndarray[Any, Any]


class Holders:
    """One ring's. For one thread at a time."""

    def __init__(self, span_ids: Array, holders: Array) -> None:
        """`span_ids` are held by so many as `holders` says, for all that the index tells; (n,) uint64 each."""
        order = np.argsort(span_ids)
        self._span_ids = span_ids[order]
        self._holders = holders[order]

    def __len__(self) -> int:
        """How many spans are held."""
        return len(self._span_ids)

    def changes(self, pinned: Sequence[Array]) -> list[tuple[int, int]]:
        """Takes in what each lane pins, (n,) uint64 with repetitions, which count once.

        Returns:
            (span id, holders) where that is not what it was; 0 where nobody holds it any more.
        """
        each = [np.unique(pins) for pins in pinned]
        span_ids, holders = np.unique(np.concatenate([*each, np.empty(0, np.uint64)]), return_counts=True)
        holders = np.minimum(holders, REUSE_HOLDERS_MAX).astype(np.uint64)
        known = np.union1d(self._span_ids, span_ids)
        before, now = np.zeros((2, len(known)), np.uint64)
        before[np.searchsorted(known, self._span_ids)] = self._holders
        now[np.searchsorted(known, span_ids)] = holders
        self._span_ids, self._holders = span_ids, holders
        changed = before != now
        return list(zip(known[changed].tolist(), now[changed].tolist(), strict=True))
