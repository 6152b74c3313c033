"""The host tier under pressure: how much of its ring the store may keep in memory, and when it must refuse puts.

    pressure or above   the ring returns the bytes over the threshold: resident - (used - pressure), in whole MiB
    emergency           besides, puts are refused, at once; that ends with the mode
    below pressure      the ring takes back what leaves used below pressure - hysteresis; no limit once that is all

Each step waits until the store has settled after the last one and a reading was begun after that. An earlier reading
still shows memory that was returned already, or does not show what was just taken, so every step would be made twice.
The ring shrinks to the threshold and grows to `hysteresis` below it, so that neither causes the other.

Invariant: `refuse` is set exactly while the gauge's level is emergency.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ..forms.effects import HostHolds
from ..forms.events import Pressed
from .forms.limits import GovernorLimits
from .forms.outbox import GovernorOutbox
from .tiers import Gauge

MIB: Final = 1 << 20


class Host:
    """The demands on the store, from reading to reading. `holds`: the store's last report."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox) -> None:
        self._limits = limits
        self._outbox = outbox
        self.holds = HostHolds(0, 0, settled=False)
        self._settled_since: float | None = None
        self.press = Pressed()

    def reported(self, event: HostHolds, now: float) -> None:
        """Takes the store's report. A reading begun before it does not show it."""
        moved = self.holds.resident_bytes != event.resident_bytes
        self.holds = event
        if not event.settled:
            self._settled_since = None
        elif moved or self._settled_since is None:
            self._settled_since = now

    def sampled(self, gauge: Gauge) -> None:
        """Processes a new reading: emergency begins or ends, which does not wait for the store; and if the reading
        shows that the store has settled, the next step is made."""
        press = self.press
        if not gauge.refuses:
            press = replace(press, refuse=False, reason="")
        elif not press.refuse:
            reason = (
                f"host memory is {gauge.share:.1%} full, and emergency begins at "
                f"{self._limits.thresholds.emergency:.1%}: puts are accepted again when emergency ends"
            )
            press = replace(press, refuse=True, reason=reason)
        if self._settled_since is not None and gauge.sample.began_at > self._settled_since:
            press = replace(press, resident_bytes_max=self._resident_bytes_max(gauge))
        self._ask(press)

    def gauge_gone(self) -> None:
        """The host's fill level is unknown from now on: no pressure is assumed."""
        self._ask(Pressed())

    def _resident_bytes_max(self, gauge: Gauge) -> int | None:
        resident_bytes, limit_bytes = self.holds.resident_bytes, self.press.resident_bytes_max
        thresholds, sample = self._limits.thresholds, gauge.sample
        if gauge.pressed:
            over_bytes = sample.used_bytes - int(thresholds.pressure * sample.total_bytes)
            over_bytes = min(resident_bytes, max(0, -(-over_bytes // MIB) * MIB))
            return resident_bytes - over_bytes if over_bytes else limit_bytes
        if limit_bytes is None:
            return None
        room_bytes = int((thresholds.pressure - thresholds.hysteresis) * sample.total_bytes) - sample.used_bytes - 1
        if resident_bytes + room_bytes >= self.holds.wanted_bytes:
            return None
        return max(limit_bytes, resident_bytes + room_bytes // MIB * MIB)

    def _ask(self, press: Pressed) -> None:
        if press != self.press:
            self.press = press
            self.holds = replace(self.holds, settled=False)
            self._settled_since = None
            self._outbox.add(press)
