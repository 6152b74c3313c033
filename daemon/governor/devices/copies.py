"""Whether an entry is worth its copy in the host tier: copying it takes no longer than computing it again.

Owns the rate of copies of each device, measured from acknowledged offloads, and the estimate of computing from the
reported milliseconds or from tokens. Does not own who copies (the owners), nor whether the host accepts a copy.

The rate is the median of the last RATES_KEPT offloads and of ASSUMED_COUNTS times ASSUMED_BYTES_PER_S. So a copy during
which its process was stopped does not count, and a device without offloads has the assumed rate. Rates are forgotten
after RATE_FRESH_S: a slow rate that kept all entries from being copied would otherwise never be measured again.

Invariant: a device has at most RATES_KEPT rates, and only while an owner has it open.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from ..forms.limits import GovernorLimits
from .record import HeldEntry

ASSUMED_BYTES_PER_S: Final = 4 << 30
"""The rate before any measurement: a copy by one thread of a small machine."""
MEASURED_BYTES_MIN: Final = 1 << 20
"""Offloads of fewer bytes measure the messages around a copy, and not the copy."""
RATES_KEPT: Final = 15
ASSUMED_COUNTS: Final = 2
RATE_FRESH_S: Final = 600.0


class CopyRates:
    """Bytes a second at which each open device's entries are copied to the host."""

    def __init__(self, limits: GovernorLimits) -> None:
        self._limits = limits
        self._rates: dict[str, deque[tuple[float, float]]] = {}

    def copied(self, device: str, size_bytes: int, seconds: float, now: float) -> None:
        """Takes an acknowledged offload of so many bytes, of which the owner says how long copying took."""
        if size_bytes >= MEASURED_BYTES_MIN and seconds > 0:
            rates = self._rates.setdefault(device, deque(maxlen=RATES_KEPT))
            rates.append((now, size_bytes / seconds))

    def closed(self, device: str) -> None:
        """The device has no owner left."""
        self._rates.pop(device, None)

    def bytes_per_s(self, device: str, now: float) -> float:
        """The rate to count with: the configured one, else the measured one."""
        if self._limits.copy_bytes_per_s is not None:
            return float(self._limits.copy_bytes_per_s)
        fresh = [rate for at, rate in self._rates.get(device, ()) if at > now - RATE_FRESH_S]
        return median([*fresh, *[float(ASSUMED_BYTES_PER_S)] * ASSUMED_COUNTS])

    def is_worth(self, entry: HeldEntry, bytes_per_s: float) -> bool:
        """Whether copying takes no longer than computing again.

        Computing takes the reported milliseconds; without them it is estimated from the tokens, by kind. An entry of
        which neither is known is worth its copy.
        """
        if entry.cost_ms > 0:
            compute_s = entry.cost_ms / 1000
        elif entry.tokens:
            compute_s = entry.tokens * self._limits.s_per_token(entry.kind)
        else:
            return True
        return entry.size_bytes / bytes_per_s <= compute_s

    def check_invariants(self, devices: set[str]) -> None:
        """Asserts what the module's docstring promises."""
        assert self._rates.keys() <= devices
        assert all(0 < len(rates) <= RATES_KEPT for rates in self._rates.values())
