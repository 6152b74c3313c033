"""How quickly a remote store answers, and how long computing an entry takes: what decides whether asking is worth it.

Owns: the averages. Does not own the decision (`fetches`).

Averages are exponential, with a weight of 1/8 for each new measurement. What was measured more than FORGOTTEN_S ago
counts no longer: so a store that was too slow to ask is asked again, by one client a minute.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

WEIGHT: Final = 1 / 8
FORGOTTEN_S: Final = 60.0
LARGE_BYTES: Final = 256 << 10
"""The least bytes of a payload whose reading takes longer than the store's answer, over any network worth using."""
NAMESPACES_MAX: Final = 1024
"""Namespaces whose costs are known at once. The one that was reported longest ago goes first."""


class Average:
    """An exponential average that is forgotten FORGOTTEN_S after its last measurement."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at: float | None = None

    def add(self, value: float, now: float) -> None:
        known = self.known(now)
        self._value = value if known is None else known + WEIGHT * (value - known)
        self._at = now

    def known(self, now: float) -> float | None:
        """The average; None without a recent measurement."""
        return None if self._at is None or now - self._at > FORGOTTEN_S else self._value


class RemoteSpeed:
    """The speed of one store. All methods take the time of the store core's clock."""

    def __init__(self) -> None:
        self.answer_s = Average()
        """Seconds until the store says whether it has a key."""
        self._s_per_byte = Average()

    def read(self, size_bytes: int, took_s: float, now: float) -> None:
        """A payload was read. The time of a small one is that of an answer, and says nothing of large ones."""
        if size_bytes >= LARGE_BYTES:
            self._s_per_byte.add(took_s / size_bytes, now)

    def read_s(self, size_bytes: int, now: float) -> float:
        """The expected time of a read; as far as it is unknown, 0."""
        return (self.answer_s.known(now) or 0.0) + size_bytes * (self._s_per_byte.known(now) or 0.0)

    def bytes_per_s(self, now: float) -> float | None:
        """The speed of reads; None if it is unknown."""
        s_per_byte = self._s_per_byte.known(now)
        return 1.0 / s_per_byte if s_per_byte else None


class ComputeCosts:
    """How long the entries of each namespace take to compute, on average, as puts have reported it."""

    def __init__(self) -> None:
        self._cost_s: OrderedDict[bytes, float] = OrderedDict()

    def reported(self, tag: bytes, cost_s: float) -> None:
        """A put has taken so long to compute; 0: unknown."""
        if cost_s <= 0:
            return
        known = self._cost_s.pop(tag, None)
        self._cost_s[tag] = cost_s if known is None else known + WEIGHT * (cost_s - known)
        if len(self._cost_s) > NAMESPACES_MAX:
            self._cost_s.popitem(last=False)

    def of(self, tag: bytes) -> float | None:
        """The average in seconds; None if no put has reported any."""
        return self._cost_s.get(tag)
