"""What is remembered of entries that went: when, why, how old and how used they were, and what they were worth.

Owns one record for each of the last `most` entries that went, in columns: about 80 bytes a record. Does not own what
the policy remembers of a key, nor the counts by reason (`histogram`).

Invariants: a record is never changed, only overwritten by a newer one once there are `most`; a look-up takes numpy's
time for one pass over the records, below a millisecond for RECORDS_MAX of them.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...shm.layout import KEY_BYTES

RECORDS_MAX: Final = 1 << 16
LATEST: Final = 1024
"""Of so many of the latest records medians are told."""
MADE_ROOM: Final = frozenset({"capacity", "entries", "tokens", "index_bucket", "pressure", "emergency"})
"""The reasons of entries that the policy chose to go."""
LOOKS_MAX: Final = 256
"""Records that one question for the beginning of a key lists."""
_COLUMNS: Final = {"at": "f8", "age_s": "f8", "idle_s": "f8", "uses": "u8", "worth": "f8", "reason": "u1"}
_WORDS: Final = KEY_BYTES // 8
_KEY: Final = Struct(f"={_WORDS}Q")


class RemovalRecord(msgspec.Struct, frozen=True):
    """An entry that went at `at`, a time of the store's clock; `uses`: after its put."""

    key: bytes
    reason: str
    at: float
    age_s: float
    idle_s: float
    uses: int
    worth: float


class RemovalHistory:
    """Records of entries that went, the latest `most` of them."""

    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most = min(most, RECORDS_MAX)
        self._total = 0
        # Memory is taken as records come: the system sets zeroed pages aside when they are written.
        self._keys = np.zeros((_WORDS, most), np.uint64)
        self._columns = {name: np.zeros(most, kind) for name, kind in _COLUMNS.items()}
        # Single items are written several times faster through a memoryview.
        self._rows: list[Any] = [memoryview(row) for row in (*self._keys, *self._columns.values())]
        self._reasons: list[str] = []

    def __len__(self) -> int:
        """How many are remembered."""
        return min(self._total, self._most)

    @property
    def most(self) -> int:
        """How many are remembered at most."""
        return self._most

    def add(self, gone: RemovalRecord) -> None:
        """An entry went."""
        if gone.reason not in self._reasons:
            self._reasons.append(gone.reason)
        place = self._total % self._most
        about = (gone.at, gone.age_s, gone.idle_s, gone.uses, gone.worth, self._reasons.index(gone.reason))
        for row, value in zip(self._rows, (*_KEY.unpack(gone.key), *about), strict=True):
            row[place] = value
        self._total += 1

    def find(self, key: bytes) -> RemovalRecord | None:
        """The latest record of a key."""
        places = self._beginning(key, 2 * KEY_BYTES)
        return self._record(int(places[-1])) if len(places) else None

    def beginning(self, key: bytes, digits: int, most: int) -> list[bytes]:
        """Up to `most` different keys whose first hexadecimal digits are `key`'s, those that went last first; fewer
        where many of the latest records are of the same keys."""
        places = self._beginning(key, digits)[: -LOOKS_MAX - 1 : -1]
        return list(dict.fromkeys(map(self._key, places.tolist())))[:most]

    def made_room(self) -> dict[str, Any]:
        """Of the entries among the latest LATEST that the policy chose: how many, and their ages and idle times in
        seconds, each as the median and as the least that nine in ten had."""
        latest = np.arange(self._total - min(len(self), LATEST), self._total) % self._most
        chosen = np.array([name in MADE_ROOM for name in self._reasons], bool)
        latest = latest[chosen[self._columns["reason"][latest]]]
        told: dict[str, Any] = {"entries": len(latest), "age_s": None, "idle_s": None}
        if len(latest):
            for name in ("age_s", "idle_s"):
                # Not np.percentile: the first of a process loads numpy.ma, which takes 15 ms.
                ordered = np.sort(self._columns[name][latest])
                last = len(ordered) - 1
                half, tenth = np.interp([0.5 * last, 0.1 * last], np.arange(last + 1), ordered).tolist()
                told[name] = {"median": half, "tenth": tenth}
        return told

    def _beginning(self, key: bytes, digits: int) -> npt.NDArray[np.intp]:
        """The places of the records whose keys begin with so many digits of `key`, the latest last."""
        mask = np.frombuffer(bytes.fromhex("f" * digits + "0" * (2 * KEY_BYTES - digits)), np.uint64)
        wanted = np.frombuffer(key, np.uint64) & mask
        # The second word first, where there is one: keys of one namespace have the first one in common.
        first, *others = sorted(np.flatnonzero(mask).tolist(), key=lambda word: word != 1)
        places = np.flatnonzero((self._keys[first, : len(self)] & mask[first]) == wanted[first])
        for word in others:
            places = places[(self._keys[word, places] & mask[word]) == wanted[word]]
        oldest = self._total % self._most if len(self) == self._most else 0
        older = np.searchsorted(places, oldest)
        return np.concatenate((places[older:], places[:older]))

    def _key(self, place: int) -> bytes:
        return _KEY.pack(*self._keys[:, place].tolist())

    def _record(self, place: int) -> RemovalRecord:
        values = {name: column[place].item() for name, column in self._columns.items()}
        return RemovalRecord(self._key(place), self._reasons[values.pop("reason")], **values)
