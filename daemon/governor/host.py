"""The host tier under pressure: how much of its ring the store may keep in memory, and when it must refuse puts.

Owns the last Pressed sent to the store, and whether the store has settled since. Does not own how the ring shrinks.

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

from ..core.host_memory import HostHolds, Pressed
from .forms.limits import GovernorLimits
from .forms.outbox import GovernorOutbox
from .modes.tiers import Gauge

MIB: Final = 1 << 20


def accepts_offload(gauge: Gauge | None) -> bool:
    """Whether entries may be offloaded to the host tier: it is below pressure, or its fill level is unknown."""
    return gauge is None or not gauge.pressed


class Host:
    """The demands on the store, from reading to reading."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox) -> None:
        self._limits = limits
        self._outbox = outbox
        self._holds: HostHolds | None = None
        self._settled_since: float | None = None
        self.press = Pressed()

    @property
    def resident_bytes(self) -> int:
        """The resident bytes by the store's last report; 0 before the first."""
        return 0 if self._holds is None else self._holds.resident_bytes

    @property
    def wanted_bytes(self) -> int:
        """The bytes that would be resident without pressure."""
        return 0 if self._holds is None else self._holds.wanted_bytes

    def holds(self, event: HostHolds, now: float) -> None:
        """Takes the store's report. A reading begun before it does not show it."""
        last, self._holds = self._holds, event
        moved = last is None or last.resident_bytes != event.resident_bytes
        if not event.settled:
            self._settled_since = None
        elif moved or self._settled_since is None:
            self._settled_since = now

    def mode_changed(self, gauge: Gauge, now: float) -> None:
        """Emergency begins or ends: neither waits for the store."""
        self._ask(self._with_emergency(self.press, gauge))

    def sampled(self, gauge: Gauge, now: float) -> None:
        """Processes a new reading: makes the next step if the store has settled and the reading shows it."""
        press = self._with_emergency(self.press, gauge)
        if self._settled_since is not None and gauge.sample.began_at > self._settled_since:
            press = replace(press, resident_bytes_max=self._resident_bytes_max(gauge))
        self._ask(press)

    def gauge_gone(self, now: float) -> None:
        """The host's fill level is unknown from now on: no pressure is assumed."""
        self._ask(Pressed())

    def check_invariants(self) -> None:
        """Asserts the invariants that need no gauge."""
        assert self.press.refuse == bool(self.press.reason)
        assert self._holds is not None or self.press.resident_bytes_max is None
        assert self._settled_since is None or (self._holds is not None and self._holds.settled)

    def _resident_bytes_max(self, gauge: Gauge) -> int | None:
        assert self._holds is not None
        resident_bytes, limit_bytes = self._holds.resident_bytes, self.press.resident_bytes_max
        thresholds, sample = self._limits.thresholds, gauge.sample
        if gauge.pressed:
            over_bytes = sample.used_bytes - int(thresholds.pressure * sample.total_bytes)
            over_bytes = min(resident_bytes, max(0, -(-over_bytes // MIB) * MIB))
            return resident_bytes - over_bytes if over_bytes else limit_bytes
        if limit_bytes is None:
            return None
        room_bytes = int((thresholds.pressure - thresholds.hysteresis) * sample.total_bytes) - sample.used_bytes - 1
        if resident_bytes + room_bytes >= self._holds.wanted_bytes:
            return None
        return max(limit_bytes, resident_bytes + room_bytes // MIB * MIB)

    def _with_emergency(self, press: Pressed, gauge: Gauge) -> Pressed:
        if not gauge.refuses:
            return replace(press, refuse=False, reason="")
        if press.refuse:
            return press
        threshold = self._limits.thresholds.emergency
        reason = (
            f"host memory is {gauge.share:.1%} full, and emergency begins at {threshold:.1%}: "
            "puts are accepted again when emergency ends"
        )
        return replace(press, refuse=True, reason=reason)

    def _ask(self, press: Pressed) -> None:
        if press == self.press:
            return
        self.press = press
        if self._holds is not None:
            self._holds = replace(self._holds, settled=False)
        self._settled_since = None
        self._outbox.add(press)
