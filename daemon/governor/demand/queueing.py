"""The queueing floor: the number of cache blocks that a device needs so that its queue of requests stays finite.

By Little's law (J. D. C. Little, "A proof for the queuing formula L = λW", Operations Research 9(3), 1961) λ · E[S]
requests are served at once on average, if λ requests arrive a second and each is served for E[S] seconds. They hold
λ · E[S] · E[blocks] blocks. If fewer blocks than that and a margin are kept, evicted blocks have to be computed again.
That raises E[S], and the queue grows.

Owns: the counts of the last window, and the floor. Does not own the entries, nor the size of a block.

Time is an argument. A time before the latest one counts as the latest. The counts are kept in BUCKETS buckets of a
window, so memory and work do not depend on the number of requests. The window moves by whole buckets, so it is shorter
than `window_s` by less than one bucket. λ is computed over the time that the window really covers.

Invariants: the sums are those of the buckets. The floor is computed in integers, so that no rounding error raises it by
a block.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

MARGIN_PERCENT: Final = 115
"""The floor in percent of the mean need. The margin is there because requests do not arrive evenly."""
BUCKETS: Final = 64
COVERED_BUCKETS_MIN: Final = 4
"""λ is computed over at least this many buckets of time. Otherwise the first few requests would be a high rate."""

# Times and durations are converted to integers, because sums of floats are inexact.
_CLOCK_PER_S: Final = 1_000_000
_SERVICE_PER_S: Final = 1_000_000_000


@dataclass(slots=True)
class _Bucket:
    index: int
    arrivals: int = 0
    completions: int = 0
    service: int = 0
    blocks: int = 0

    def add(self, other: _Bucket) -> None:
        self.arrivals += other.arrivals
        self.completions += other.completions
        self.service += other.service
        self.blocks += other.blocks

    def subtract(self, other: _Bucket) -> None:
        self.arrivals -= other.arrivals
        self.completions -= other.completions
        self.service -= other.service
        self.blocks -= other.blocks


class QueueingController:
    """The arrivals and completions of one device's requests in the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        assert window_s > 0, window_s
        self._width = max(1, round(window_s * _CLOCK_PER_S / BUCKETS))
        self._buckets: deque[_Bucket] = deque()
        self._sum = _Bucket(0)
        self._began: int | None = None
        self._latest = 0

    def record_request_arrival(self, now: float, count: int = 1) -> None:
        """Counts `count` arrived requests."""
        assert count >= 0, count
        self._record(now, _Bucket(0, arrivals=count))

    def record_request_completion(self, now: float, service_s: float, blocks: int) -> None:
        """Counts a request that was served in `service_s` seconds and held `blocks` during that time."""
        assert 0 <= service_s < float("inf"), service_s
        assert blocks >= 0, blocks
        self._record(now, _Bucket(0, completions=1, service=round(service_s * _SERVICE_PER_S), blocks=blocks))

    def floor(self, now: float) -> int:
        """The floor: ceil(λ · E[S] · E[blocks] · 1.15). 0 if no request was completed in the window."""
        return _floor(*self._window(now))

    def means(self, now: float) -> dict[str, float]:
        """λ, E[S] and E[blocks] of the window that ends now, for status and metrics; 0 where no request was counted."""
        sums, covered = self._window(now)
        served = max(sums.completions, 1)
        return {
            "arrivals_per_s": sums.arrivals * _CLOCK_PER_S / covered,
            "service_s": sums.service / served / _SERVICE_PER_S,
            "blocks_per_request": sums.blocks / served,
        }

    def check_invariants(self) -> None:
        """Asserts that the sums agree with the buckets, and that there are at most BUCKETS buckets."""
        total = _Bucket(0)
        for bucket in self._buckets:
            total.add(bucket)
        assert total == self._sum
        indices = [bucket.index for bucket in self._buckets]
        assert indices == sorted(set(indices))
        assert not indices or indices[-1] - indices[0] < BUCKETS

    def _record(self, now: float, more: _Bucket) -> None:
        self._latest = at = self._clock(now)
        if self._began is None:
            self._began = at
        index = at // self._width
        while self._buckets and self._buckets[0].index <= index - BUCKETS:
            self._sum.subtract(self._buckets.popleft())
        if not self._buckets or self._buckets[-1].index != index:
            self._buckets.append(_Bucket(index))
        self._buckets[-1].add(more)
        self._sum.add(more)

    def _window(self, now: float) -> tuple[_Bucket, int]:
        """The counts of the window that ends now, and the time that it covers. Changes nothing."""
        at = self._clock(now)
        first = at // self._width - BUCKETS + 1
        sums = _Bucket(0)
        sums.add(self._sum)
        for bucket in self._buckets:
            if bucket.index >= first:
                break
            sums.subtract(bucket)
        began = at if self._began is None else self._began
        covered = at - max(began, first * self._width)
        return sums, max(covered, COVERED_BUCKETS_MIN * self._width)

    def _clock(self, now: float) -> int:
        at = round(now * _CLOCK_PER_S)
        return at if self._began is None else max(at, self._latest)


def _floor(sums: _Bucket, covered: int) -> int:
    if sums.completions == 0:
        return 0
    need = sums.arrivals * _CLOCK_PER_S * sums.service * sums.blocks * MARGIN_PERCENT
    whole = covered * sums.completions * _SERVICE_PER_S * sums.completions * 100
    return -(-need // whole)
