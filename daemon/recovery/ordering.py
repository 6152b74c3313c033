"""Orders a million rows in steps of some milliseconds."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final

import numpy as np

SORTED_AT_ONCE: Final = 1 << 17

Array = np.ndarray[Any, Any]


def sort(numbers: Array) -> Iterator[None]:
    """Sorts in place."""
    if len(numbers) <= SORTED_AT_ONCE:
        numbers.sort()
    else:
        half = len(numbers) // 2
        numbers.partition(half)
        yield
        yield from sort(numbers[:half])
        yield from sort(numbers[half:])
    yield


def by_time(times: Array, depths: Array, rows: Array, row_bits: int) -> Generator[None, None, Array]:
    """Rows in the order of their times, to a millionth of a second or of 2 ** 20 seconds; of equal ones, parents before
    their children."""
    if not len(rows):
        return rows
    of = times[rows]
    of -= of.min()
    scale = min(1e6, (1 << 62 - row_bits) / max(float(of.max()), 1.0))
    packed = ((of * scale).astype(np.uint64) + depths[rows]) << np.uint64(row_bits) | rows.astype(np.uint64)
    yield
    yield from sort(packed)
    found: Array = (packed & np.uint64((1 << row_bits) - 1)).astype(np.int64)
    return found
