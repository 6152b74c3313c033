"""Times of single hits in a lane's first page: a short log that the client writes and the daemon reads.

Owns: the words of this log. Does not own: which hits are timed (the client), the histogram (the daemon).

Invariants: a client without this log leaves its words 0, which is an empty log. Whatever a client writes, a read gives
at most TIMES times.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

TIMED_AT: Final = 24
"""Where the number of times that were ever written stands, in words from the lane's beginning."""
TIMES_AT: Final = 32
TIMES: Final = 16
"""Times that the log holds. The daemon reads it ten times a second, and a client times about one hit a second."""
_COUNT_MASK: Final = (1 << 63) - 1

Array = np.ndarray[Any, Any]


def log_time(words: memoryview, took_ns: int) -> None:
    """Writes the time of a hit into the lane of these `words`. Two threads at once may lose one of their times."""
    timed = words[TIMED_AT]
    words[TIMES_AT + timed % TIMES] = took_ns
    words[TIMED_AT] = (timed + 1) & _COUNT_MASK


def times_since(header: Array, seen: int) -> list[int]:
    """The times in nanoseconds that were written after the first `seen` ones, at most the last TIMES.

    `header`: the words of a lane's first page, (512,) uint64. A client may have written any value, from 0 to 2^64 - 1.
    """
    timed = int(header[TIMED_AT])
    kept = max(0, min(timed - seen, TIMES))
    return [int(header[TIMES_AT + number % TIMES]) for number in range(timed - kept, timed)]
