"""The daemon's side of a client's lane: the name of its file, what the client has written into it, and whether it is
abandoned.

Invariants: the daemon reads with preadv, so that a truncated lane is a short read and not a SIGBUS. Whatever a client
writes, a read gives at most as many pins and records as a lane has room for.
"""

from __future__ import annotations

import fcntl
import os
import re
from typing import Any, Final, NamedTuple

import numpy as np

from ..ring.layout import LANE_HEADER_WORDS, LANE_LOG_WORDS, PAGE_BYTES
from ..ring.segments import segment_name
from .lane import HEAD_AT, LOG_AT, LOG_MASK, MISSES_AT
from .records import SubmissionReader

_LANE: Final = re.compile(r"lane\.([0-9a-f]{1,16})(?:\.u([0-9]{1,10}))?(\.fenced)?")

Array = np.ndarray[Any, Any]


def lane_name(instance: str, lane_id: int, *, uid: int | None, fenced: bool) -> str:
    """The name of a lane. `uid`: the user whose quota the lane counts against. `fenced`: whether the process that
    writes the lane registered for the expedited fence."""
    whose = "" if uid is None else f".u{uid}"
    return segment_name(instance, f"lane.{lane_id:x}{whose}{'.fenced' if fenced else ''}")


def read_lane_name(instance: str, name: str) -> tuple[int, int | None, bool] | None:
    """(lane id, uid, fenced) from a lane's name; None if `name` is not a lane's."""
    found = _LANE.fullmatch(name.removeprefix(segment_name(instance, "")))
    return (int(found[1], 16), int(found[2]) if found[2] else None, found[3] is not None) if found else None


class LaneRecords(NamedTuple):
    """The records of a lane since the last drain. `span_ids`: the hits in order, (n,) uint64. `lost`: the number of
    records that were overwritten or left out before the daemon read them. `misses`: the number of lookups without a
    hit."""

    span_ids: Array
    lost: int
    misses: int


class LaneReader:
    """The daemon's side of one lane."""

    __slots__ = ("_fd", "_header", "_seen", "_seen_misses", "hits", "lane_id", "misses", "pinned")

    def __init__(self, fd: int, lane_id: int) -> None:
        """Takes over `fd`, a file description of its own without a lock. Existing records are skipped: the daemon that
        read the lane before has counted them."""
        self._fd = fd
        self._header = np.zeros(LANE_HEADER_WORDS, np.uint64)
        os.preadv(fd, [self._header.data], 0)
        self.lane_id = lane_id
        self.hits = int(self._header[HEAD_AT])
        self.misses = int(self._header[MISSES_AT])
        self.pinned = 0
        self._seen = self.hits
        self._seen_misses = self.misses

    def pins(self, into: Array) -> Array:
        """The span ids that the lane pins now; none once the reader is closed. `into` is scratch memory, (4096,)
        uint64. A word that is torn during the read belongs to a pin made after the fence, whose reader will find its
        slot changed. Pins made before the fence are read whole."""
        if self._fd < 0:
            return into[:0]
        got = os.preadv(self._fd, [into.data], PAGE_BYTES)
        words = into[: got // 8]
        found: Array = words[words != 0]
        self.pinned = len(found)
        return found

    def drain(self, most: int = LANE_LOG_WORDS) -> LaneRecords | None:
        """The records since the last call, at most the newest `most`; None if there are none."""
        header = self._header
        if self._fd < 0 or os.preadv(self._fd, [header.data], 0) < header.nbytes:
            return None
        self.hits, self.misses = int(header[HEAD_AT]), int(header[MISSES_AT])
        fresh = self.hits - self._seen
        misses = self.misses - self._seen_misses
        # Two threads may store their heads in reverse order: the head can seem to go back, until the next record.
        if fresh <= 0 and misses <= 0:
            return None
        kept = max(0, min(fresh, most, LANE_LOG_WORDS))
        ids = np.zeros(kept, np.uint64)
        first = (self.hits - kept) & LOG_MASK
        # Two reads, since the log may wrap. A record that is overwritten meanwhile is reported as the newer one.
        os.preadv(self._fd, [ids[: LANE_LOG_WORDS - first].data], (LOG_AT + first) * 8)
        os.preadv(self._fd, [ids[LANE_LOG_WORDS - first :].data], LOG_AT * 8)
        self._seen = max(self._seen, self.hits)
        self._seen_misses = max(self._seen_misses, self.misses)
        return LaneRecords(ids, max(0, fresh) - kept, max(0, misses))

    def submissions(self) -> SubmissionReader:
        """The lane's queue, from what is written there next."""
        return SubmissionReader(self._fd)

    def abandoned(self) -> bool:
        """Whether no process has a descriptor or mapping of the lane any more. If True, this reader keeps the lane
        locked, so no other reader gets True."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Closes the reader's descriptor. Later calls find no pins and no records."""
        os.close(self._fd)
        self._fd = -1
