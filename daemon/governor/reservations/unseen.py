"""Bytes that clients have taken on devices, and that the last reading cannot show.

Owns sums of such bytes by device, each with the time from which a reading shows it. Does not own why they count: they
are of ended reservations, or of new entries.

A sum counts until a reading that was begun later. At most SUMS_MAX sums are kept for a device; beyond that the latest
two become one, which counts until a reading later than both. Of more than `devices_max` devices the oldest is
forgotten: a device whose gauge has vanished never gets another reading.

Invariant: the sums of a device are in order of time, and none is 0.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SUMS_MAX: Final = 64
"""Sums kept for each device."""


class UnseenBytes:
    """The unseen bytes of all devices."""

    def __init__(self, devices_max: int) -> None:
        self._devices_max = devices_max
        self._sums: dict[str, deque[tuple[float, int]]] = {}

    def of(self, device: str) -> int:
        """The bytes that count on a device."""
        return sum(size_bytes for _, size_bytes in self._sums.get(device, ()))

    def devices(self) -> set[str]:
        """The devices on which bytes count."""
        return set(self._sums)

    def add(self, device: str, size_bytes: int, now: float) -> None:
        """Counts bytes that were taken by `now`."""
        if not size_bytes:
            return
        sums = self._sums.setdefault(device, deque())
        if len(sums) == SUMS_MAX:
            size_bytes += sums.pop()[1]
        sums.append((now, size_bytes))
        if len(self._sums) > self._devices_max:
            del self._sums[next(iter(self._sums))]

    def sampled(self, device: str, began_at: float) -> None:
        """Drops the sums from before this reading was begun: the reading shows them."""
        sums = self._sums.get(device)
        while sums and sums[0][0] < began_at:
            sums.popleft()
        if sums is not None and not sums:
            del self._sums[device]

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert len(self._sums) <= self._devices_max
        for sums in self._sums.values():
            assert 0 < len(sums) <= SUMS_MAX
            assert [at for at, _ in sums] == sorted(at for at, _ in sums)
            assert all(size_bytes > 0 for _, size_bytes in sums)
