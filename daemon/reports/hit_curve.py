"""Hit ratios that a ring of another size would give.

Owns: a histogram of reuse distances (`distances`), by group of keys. Does not own the sample.

A point of a curve is the share of requests whose distance is at most the size: the hit ratio of a cache of that size
that evicts the least recently used entry. The sample has too few or too many requests for the most popular keys. The
difference to all requests for stored keys counts as hits, since such keys have short distances (SHARDS-adj). Puts of
missing keys do not: the sample has too few or too many of them by chance, also where no key is ever used again.

The error of a point is twice its standard error, plus the misses that there are among as many average requests as that
difference. The groups give the standard error: each has the keys with one part of the hashes, so their hit ratios are
GROUPS independent estimates. Without sampling that part is 0. If no request of a sample is a hit, it is 3 hits instead:
a sample would have had one with a probability of 95 % (the rule of three). Requests whose distance lies in the same
column of the histogram as the size may be on either side of it; they are a part of the error too.

The histogram is halved every HALVE_AFTER sampled requests, so older requests count less and less.
"""

from __future__ import annotations

import math
from array import array
from typing import Any, Final

import numpy as np

GROUPS: Final = 8
HALVE_AFTER: Final = 1 << 20
MULTIPLES: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
"""The sizes of a curve's points, as multiples of the present size."""

_STEP_BITS: Final = 4
"""A histogram has 2**_STEP_BITS columns for each doubling of the distance."""
_OCTAVES: Final = 48
_COLUMNS: Final = (_OCTAVES << _STEP_BITS) + 1
"""The last column counts distances of 2**_OCTAVES bytes and more."""
_GROUP_SHIFT: Final = 29
"""The bits of a key's number that choose its group. The sample uses the lowest bits of 32."""

Array = np.ndarray[Any, Any]


def column_of(distance_bytes: int) -> int:
    """The column of a distance."""
    octave = distance_bytes.bit_length() - 1
    if octave >= _OCTAVES:
        return _COLUMNS - 1
    if octave < _STEP_BITS:
        return max(distance_bytes, 0)
    return (octave << _STEP_BITS) + (distance_bytes >> (octave - _STEP_BITS)) - (1 << _STEP_BITS)


def _within(size_bytes: int) -> float:
    """The share of the column of `size_bytes` that is below `size_bytes`."""
    octave = size_bytes.bit_length() - 1
    if octave < _STEP_BITS or octave >= _OCTAVES:
        return 0.0
    width = 1 << (octave - _STEP_BITS)
    return (size_bytes & (width - 1)) / width


def _standard_error(hits: Array, requests: Array, sampled_share: float) -> float:
    """The standard error of the hits, given the requests, both by group, with the correction for a sample of a finite
    population (Cochran, Sampling Techniques, sections 2.8 and 6.4)."""
    ratio = float(hits.sum()) / float(requests.sum())
    spread = float(((hits - ratio * requests) ** 2).sum()) * GROUPS / (GROUPS - 1)
    return math.sqrt(spread * (1 - sampled_share))


def _spread_of_none(sampled_share: float) -> float:
    """The most hits among all requests of which a sample has none (Hanley and Lippman-Hand, JAMA 249, 1983)."""
    return 3 / sampled_share if sampled_share < 1 else 0.0


class HitCurve:
    """The requests by group and distance, scaled to all requests: GROUPS rows of _COLUMNS."""

    def __init__(self) -> None:
        self._counts = array("d", bytes(8 * GROUPS * _COLUMNS))
        self._sampled = 0
        self._asked = 0.0
        self._unsampled = 0.0

    def asked(self, requests: int, *, here: bool) -> None:
        """Counts requests of any keys, sampled or not. `here`: for stored keys; else puts of missing ones."""
        self._asked += requests
        self._unsampled += here * requests

    def sampled(self, number: int, distance_bytes: int, factor: int, *, here: bool) -> None:
        """Counts a sampled request. `factor`: the number of requests that it stands for."""
        self._unsampled -= here * factor
        self._counts[(number >> _GROUP_SHIFT & GROUPS - 1) * _COLUMNS + column_of(distance_bytes)] += factor
        self._sampled += 1
        if self._sampled >= HALVE_AFTER:
            self._table()[:] *= 0.5
            self._asked *= 0.5
            self._unsampled *= 0.5
            self._sampled //= 2

    def as_dict(self, capacity_bytes: int, factor: int) -> dict[str, Any]:
        """For the answer to an AdviseQuery. `factor`: one key in this number is sampled. `points`: size in bytes,
        hit ratio, error."""
        sizes = [int(multiple * capacity_bytes) for multiple in MULTIPLES]
        return {
            "capacity_bytes": capacity_bytes,
            "sampled_requests": self._sampled,
            "requests": self._asked,
            "points": [[size, *self._point(size, 1 / factor)] for size in sizes],
        }

    def _table(self) -> Array:
        """The counts as (GROUPS, _COLUMNS) float64, the same memory."""
        return np.frombuffer(self._counts).reshape(GROUPS, _COLUMNS)

    def _point(self, size_bytes: int, sampled_share: float) -> tuple[float, float]:
        """The hit ratio of a cache of `size_bytes`, and its error. `sampled_share`: the share of the keys that are in
        the sample. The sample lacks `_unsampled` requests for stored keys, or has too many of them if below 0."""
        counts, column, unsampled = self._table(), column_of(size_bytes), self._unsampled
        below = _within(size_bytes)
        hits = counts[:, :column].sum(axis=1) + below * counts[:, column]
        requests = counts.sum(axis=1)
        total = float(requests.sum())
        if total == 0:
            return 0.0, 1.0
        ratio = min(max((float(hits.sum()) + unsampled) / max(total + unsampled, 1.0), 0.0), 1.0)
        blurred = max(below, 1 - below) * float(counts[:, column].sum()) if below else 0.0
        spread = 2 * _standard_error(hits, requests, sampled_share) if hits.any() else _spread_of_none(sampled_share)
        error = (spread + (1 - ratio) * abs(unsampled) + blurred) / total
        return ratio, min(error, 1.0)
