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
LATEST: Final = 1024
"""The number of latest records that the medians cover."""
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

    def made_room(self) -> dict[str, Any]:
        """Of the latest LATEST removals, those for which the policy chose the entry: their count, their ages and their
        idle times in seconds. Ages and idle times are given as the median and as the value that nine in ten exceed."""
        latest = np.arange(self._total - min(len(self), LATEST), self._total) % self._most
        latest = latest[self._records["reason"][latest] < len(MADE_ROOM)]
        told: dict[str, Any] = {"entries": len(latest), "age_s": None, "idle_s": None}
        if len(latest):
            for name in ("age_s", "idle_s"):
                # Not np.percentile: its first call in a process imports numpy.ma, which takes 15 ms.
                ordered = np.sort(self._records[name][latest])
                last = len(ordered) - 1
                half, tenth = np.interp([0.5 * last, 0.1 * last], np.arange(last + 1), ordered).tolist()
                told[name] = {"median": half, "tenth": tenth}
        return told
