"""Records of the latest removed entries: when each ended and why, its age, its idle time, its uses and its worth.

Owns one record for each of the latest `most` removals, in columns: about 80 bytes a record; they come in batches. Does
not own what the policy remembers of a key, nor the histograms by reason (`histogram`).

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
_COLUMNS: Final = {"at": "f8", "age_s": "f8", "idle_s": "f8", "uses": "u8", "worth": "f8", "reason": "u1"}
_WORDS: Final = KEY_BYTES // 8

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
        self._keys = np.zeros((_WORDS, most), np.uint64)
        self._columns = {name: np.zeros(most, kind) for name, kind in _COLUMNS.items()}
        self._reasons: list[str] = []

    def __len__(self) -> int:
        """How many records there are."""
        return min(self._total, self._most)

    def add(self, gone: Removed) -> None:
        """Adds the records of a batch, the last of which is the latest."""
        codes = np.zeros(len(gone.reasons), np.uint8)
        for reason, at in gone.by_reason().items():
            if reason not in self._reasons:
                self._reasons.append(reason)
            codes[at] = self._reasons.index(reason)
        columns, first = self._columns, 0
        while first < len(codes):
            # Up to the end of the columns at a time.
            place = self._total % self._most
            some = slice(first, first + self._most - place)
            places = slice(place, place + len(codes[some]))
            self._keys[:, places] = gone.keys[some].T
            columns["at"][places], columns["reason"][places] = gone.at, codes[some]
            columns["age_s"][places], columns["idle_s"][places] = gone.age_s[some], gone.idle_s[some]
            columns["uses"][places], columns["worth"][places] = gone.uses[some], gone.worth[some]
            self._total += len(codes[some])
            first += len(codes[some])

    def find(self, key: bytes) -> RemovalRecord | None:
        """The latest record of a key."""
        words = np.frombuffer(key, np.uint64)
        # The second word first: all keys of a namespace have the same first word.
        places = np.flatnonzero(self._keys[1, : len(self)] == words[1])
        places = places[(self._keys[:, places] == words[:, None]).all(axis=0)]
        if not len(places):
            return None
        oldest = self._total % self._most if len(self) == self._most else 0
        return self._record(int(places[np.searchsorted(places, oldest) - 1]))

    def made_room(self) -> dict[str, Any]:
        """Of the latest LATEST removals, those for which the policy chose the entry: their count, their ages and their
        idle times in seconds. Ages and idle times are given as the median and as the value that nine in ten exceed."""
        latest = np.arange(self._total - min(len(self), LATEST), self._total) % self._most
        chosen = np.array([name in MADE_ROOM for name in self._reasons], bool)
        latest = latest[chosen[self._columns["reason"][latest]]]
        told: dict[str, Any] = {"entries": len(latest), "age_s": None, "idle_s": None}
        if len(latest):
            for name in ("age_s", "idle_s"):
                # Not np.percentile: its first call in a process imports numpy.ma, which takes 15 ms.
                ordered = np.sort(self._columns[name][latest])
                last = len(ordered) - 1
                half, tenth = np.interp([0.5 * last, 0.1 * last], np.arange(last + 1), ordered).tolist()
                told[name] = {"median": half, "tenth": tenth}
        return told

    def _record(self, place: int) -> RemovalRecord:
        values = {name: column[place].item() for name, column in self._columns.items()}
        return RemovalRecord(self._keys[:, place].tobytes(), self._reasons[values.pop("reason")], **values)
