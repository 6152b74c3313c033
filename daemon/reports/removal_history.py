"""Records of the latest removed entries: when each ended and why, its age, its idle time, its uses and its worth.

Owns one record for each of the latest `most` removals, of 80 bytes; they come in batches. Does
not own what the policy remembers of a key, nor the histograms by reason (`counters`).

Invariants: a record never changes; the oldest is overwritten once there are `most`. A look-up is one numpy pass over
the records: less than a millisecond for RECORDS_MAX of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...shm.ring.layout import KEY_BYTES

RECORDS_MAX: Final = 1 << 16
LATEST: Final = 1024
"""The number of latest records that the medians cover."""
MADE_ROOM: Final = frozenset({"capacity", "entries", "tokens", "pressure"})
"""The reasons of removals for which the policy chose the entry."""
_FIGURES: Final = {"at": "f8", "age_s": "f8", "idle_s": "f8", "uses": "u8", "worth": "f8"}
_RECORD: Final = np.dtype([("key", "u8", KEY_BYTES // 8), *_FIGURES.items(), ("reason", "u1")], align=True)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Removed:
    """A batch of removed entries, n of them. `keys`: (n, 4) uint64; `reasons`: of each; `at`: the time of all by the
    store's clock; `sizes`: bytes of the ring; the others as in RemovalRecord, (n,)."""

    keys: Array
    reasons: Sequence[str]
    at: float
    age_s: Array
    idle_s: Array
    uses: Array
    worth: Array
    sizes: Array

    def by_reason(self) -> dict[str, Array]:
        """The indices of the entries with each reason."""
        kinds = dict.fromkeys(self.reasons)
        if len(kinds) == 1:
            return {next(iter(kinds)): np.arange(len(self.reasons))}
        return {kind: np.array([at for at, each in enumerate(self.reasons) if each == kind]) for kind in kinds}


class RemovalRecord(msgspec.Struct, frozen=True):
    """A removed entry. `at`: time of the removal by the store's clock; `uses`: uses after its put."""

    key: bytes
    reason: str
    at: float
    age_s: float
    idle_s: float
    uses: int
    worth: float


class RemovalHistory:
    """The records of the latest `most` removals."""

    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most = min(most, RECORDS_MAX)
        self._total = 0
        # Zeroed pages take memory only once they are written, so memory grows with the records.
        self._records = np.zeros(most, _RECORD)
        self._reasons: list[str] = []

    def __len__(self) -> int:
        """How many records there are."""
        return min(self._total, self._most)

    def add(self, gone: Removed) -> None:
        """Adds the records of a batch, the last of which is the latest."""
        records = np.zeros(len(gone.reasons), _RECORD)
        records["key"] = gone.keys
        for name in _FIGURES:
            records[name] = getattr(gone, name)
        for reason, at in gone.by_reason().items():
            if reason not in self._reasons:
                self._reasons.append(reason)
            records["reason"][at] = self._reasons.index(reason)
        self._total += len(records)
        kept = records[-self._most :]
        self._records[np.arange(self._total - len(kept), self._total) % self._most] = kept

    def find(self, key: bytes) -> RemovalRecord | None:
        """The latest record of a key."""
        words = np.frombuffer(key, np.uint64)
        keys = self._records["key"]
        # The second word first: all keys of a namespace have the same first word.
        places = np.flatnonzero(keys[: len(self), 1] == words[1])
        places = places[(keys[places] == words).all(axis=1)]
        if not len(places):
            return None
        oldest = self._total % self._most if len(self) == self._most else 0
        found = self._records[places[np.searchsorted(places, oldest) - 1]]
        return RemovalRecord(key, self._reasons[found["reason"]], *(found[name].item() for name in _FIGURES))

    def made_room(self) -> dict[str, Any]:
        """Of the latest LATEST removals, those for which the policy chose the entry: their count, their ages and their
        idle times in seconds. Ages and idle times are given as the median and as the value that nine in ten exceed."""
        latest = np.arange(self._total - min(len(self), LATEST), self._total) % self._most
        chosen = np.array([name in MADE_ROOM for name in self._reasons], bool)
        latest = latest[chosen[self._records["reason"][latest]]]
        told: dict[str, Any] = {"entries": len(latest), "age_s": None, "idle_s": None}
        if len(latest):
            for name in ("age_s", "idle_s"):
                # Not np.percentile: its first call in a process imports numpy.ma, which takes 15 ms.
                ordered = np.sort(self._records[name][latest])
                last = len(ordered) - 1
                half, tenth = np.interp([0.5 * last, 0.1 * last], np.arange(last + 1), ordered).tolist()
                told[name] = {"median": half, "tenth": tenth}
        return told
