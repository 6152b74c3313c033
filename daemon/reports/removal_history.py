"""Records of the latest removed entries: when each ended and why, its age, its idle time, its uses and its worth.

Owns one record for each of the latest `most` removals, of 88 bytes; they come in batches. Does not own what the policy
remembers of a key, nor the histograms by reason (`counters`). A look-up is one numpy pass over the records: less than a
millisecond for RECORDS_MAX of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...shm.ring.layout import KEY_BYTES

RECORDS_MAX: Final = 1 << 16
MADE_ROOM: Final = ("capacity", "entries", "tokens", "pressure")
"""The reasons of removals for which the policy chose the entry."""
REASONS: Final = (*MADE_ROOM, "ttl", "explicit", "cleared", "invalidated", "corrupt")
_FIGURES: Final = ("at", "age_s", "idle_s", "uses", "worth")
REMOVED: Final = np.dtype(
    [
        ("key", "u8", KEY_BYTES // 8),
        ("at", "f8"),
        ("age_s", "f8"),
        ("idle_s", "f8"),
        ("uses", "u8"),
        ("worth", "f8"),
        ("span_bytes", "u8"),
        ("reason", "u1"),
    ],
    align=True,
)
"""One removal. `at`: its time by the store's clock; `uses`: uses after the put; `span_bytes`: bytes of the ring;
`reason`: index into REASONS."""

Array = npt.NDArray[Any]


class RemovalHistory:
    """The records of the latest `most` removals."""

    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most = min(most, RECORDS_MAX)
        self._total = 0
        # Zeroed pages take memory only once they are written, so memory grows with the records.
        self._records = np.zeros(most, REMOVED)

    def __len__(self) -> int:
        return min(self._total, self._most)

    def add(self, gone: Array) -> None:
        """Adds the records of a batch, (n,) REMOVED, the last of which is the latest."""
        self._total += len(gone)
        kept = gone[-self._most :]
        self._records[np.arange(self._total - len(kept), self._total) % self._most] = kept

    def find(self, key: bytes) -> dict[str, Any] | None:
        """The latest record of a key: its `reason`, `at`, `age_s`, `idle_s`, `uses` and `worth`."""
        words = np.frombuffer(key, np.uint64)
        keys = self._records["key"]
        # The second word first: all keys of a namespace have the same first word.
        places = np.flatnonzero(keys[: len(self), 1] == words[1])
        places = places[(keys[places] == words).all(axis=1)]
        if not len(places):
            return None
        oldest = self._total % self._most if len(self) == self._most else 0
        found = self._records[places[np.searchsorted(places, oldest) - 1]]
        return {"reason": REASONS[found["reason"]], **{name: found[name].item() for name in _FIGURES}}
