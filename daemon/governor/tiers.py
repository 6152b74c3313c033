"""The last reading and the mode of every gauge, and the subscribers to changes of mode.

A rise takes effect at once, with the reading that shows it. A level ends downwards once the last FALLS readings are all
below its threshold by `hysteresis` or more; so a fall goes as far down as all of these readings allow. A step graph
changes the name of the modes normal and pressure to workflow_aware, and changes no level.

Invariants: every change of a mode is announced once as a transition, also that of a vanished gauge (to relaxed). A new
gauge is pushed to subscribers even if it is relaxed, which is no transition. A reading that is stale, or not newer than
the last, changes no mode; an older one changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from ...ipc.messages import control as messages
from ...ipc.messages.modes import LEVELS, Mode, Tier
from .forms.events import Sample
from .forms.limits import GovernorLimits
from .forms.outbox import GovernorOutbox

FALLS: Final = 2
PRESSED: Final = LEVELS[LEVELS.index(Mode.PRESSURE) :]


@dataclass(slots=True, eq=False)
class Gauge:
    """One gauge's last reading, and the mode that its readings have led to. `workflow`: a step graph concerns the
    device. `announced`: the mode that was announced last, at `since`; None before the gauge was announced at all.
    `kept`: the levels that the last readings do not end."""

    sample: Sample
    limits: GovernorLimits
    workflow: bool = False
    announced: Mode = Mode.RELAXED
    since: float | None = None
    index: int = 0
    kept: deque[int] = field(default_factory=lambda: deque(maxlen=FALLS))

    @property
    def baseline_bytes(self) -> int:
        """What is held by plan. The host has no such plan."""
        sample = self.sample
        return 0 if sample.tier is Tier.HOST else self.limits.baseline_bytes(sample.gauge, sample.total_bytes)

    @property
    def share(self) -> float:
        """Used bytes divided by total bytes, both without the baseline. May exceed 1."""
        baseline_bytes = self.baseline_bytes
        used_bytes = max(0, self.sample.used_bytes - baseline_bytes)
        return used_bytes / max(self.sample.total_bytes - baseline_bytes, 1)

    @property
    def free_bytes(self) -> int:
        """The bytes that the last reading shows as free; negative if it shows more than there is."""
        return self.sample.total_bytes - self.sample.used_bytes

    @property
    def calm_bytes(self) -> int:
        """How many bytes more may be used below the pressure threshold; negative: how many less must be."""
        baseline_bytes, sample = self.baseline_bytes, self.sample
        begins = baseline_bytes + self.limits.thresholds.pressure * (sample.total_bytes - baseline_bytes)
        return math.ceil(begins) - 1 - sample.used_bytes

    @property
    def level(self) -> Mode:
        """The level of the tier, without regard to step graphs."""
        return LEVELS[self.index]

    @property
    def mode(self) -> Mode:
        aware = self.workflow and self.level in (Mode.NORMAL, Mode.PRESSURE)
        return Mode.WORKFLOW_AWARE if aware else self.level

    @property
    def pressed(self) -> bool:
        return self.level in PRESSED

    @property
    def refuses(self) -> bool:
        return self.level is Mode.EMERGENCY

    def take(self, sample: Sample) -> bool:
        """Takes a reading. True if it is newer and not stale."""
        newer = sample.began_at - self.sample.began_at
        fresh = newer > 0 and not sample.stale
        if newer >= 0 or sample.stale:
            self.sample = sample
        if fresh:
            self.kept.append(self.limits.thresholds.kept(self.share))
            if len(self.kept) == FALLS:
                self.index = min(self.index, max(self.kept))
            self.index = max(self.index, self.limits.thresholds.level(self.share))
        return fresh

    def to_message(self) -> messages.TierState:
        sample = self.sample
        sizes = sample.used_bytes, sample.total_bytes
        return messages.TierState(sample.gauge, sample.tier, self.mode, *sizes, self.refuses, self.baseline_bytes)


class Tiers:
    """All gauges by name."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox) -> None:
        self._limits = limits
        self.subscribers: set[int] = set()
        self._outbox = outbox
        self._workflow: frozenset[str] = frozenset()
        self._gauges: dict[str, Gauge] = {}

    def __iter__(self) -> Iterator[Gauge]:
        return iter(self._gauges.values())

    def find(self, name: str) -> Gauge | None:
        return self._gauges.get(name)

    def find_device(self, name: str) -> Gauge | None:
        """The same; None for the host's gauge too."""
        gauge = self.find(name)
        return gauge if gauge is not None and gauge.sample.tier is Tier.DEVICE else None

    def sampled(self, samples: Iterable[Sample], now: float) -> tuple[list[Gauge], list[Gauge], list[Gauge]]:
        """Takes the readings of all gauges. A gauge without one has vanished. Returns the gauges with a new reading,
        those with a new mode, and those that have vanished."""
        read = {sample.gauge: sample for sample in samples}
        for name, sample in read.items():
            if name not in self._gauges:
                unread = Sample(name, sample.tier, 0, 0, "", -math.inf)
                self._gauges[name] = Gauge(unread, self._limits, name in self._workflow)
        fresh = [self._gauges[name] for name, sample in read.items() if self._gauges[name].take(sample)]
        gone = [self._gauges.pop(name) for name in list(self._gauges) if name not in read]
        for gauge in gone:
            gauge.index = 0
        return fresh, self._announce([*self, *gone], now), gone

    def set_workflow(self, devices: Iterable[str], now: float) -> list[Gauge]:
        """Sets the devices that a step graph concerns, never the host. Returns the gauges with a new mode."""
        self._workflow = frozenset(devices)
        for gauge in self:
            gauge.workflow = gauge.sample.gauge in self._workflow
        return self._announce(self, now)

    def check_invariants(self) -> None:
        for gauge in self:
            assert gauge.since is not None and gauge.mode is gauge.announced, "a mode was not announced"
            assert gauge.workflow == (gauge.sample.gauge in self._workflow)
        assert self.subscribers <= self._outbox.clients.keys()

    def _announce(self, gauges: Iterable[Gauge], now: float) -> list[Gauge]:
        """Tells of every mode that is not the announced one, and of new gauges. Returns the gauges with a new mode."""
        moved = []
        for gauge in gauges:
            before, mode, sample = gauge.announced, gauge.mode, gauge.sample
            if mode is before and gauge.since is not None:
                continue
            if mode is not before:
                moved.append(gauge)
                names = {"gauge": sample.gauge, "tier": sample.tier.value}
                transition = {**names, "before": before.value, "mode": mode.value, "share": round(gauge.share, 4)}
                self._outbox.counters.transitions[mode.value] += 1
                self._outbox.log("warning" if mode in PRESSED else "info", "mode", source=sample.source, **transition)
                self._outbox.announce("mode", **transition)
            # A subscriber may know another mode of a new gauge from before the daemon's restart.
            for client in sorted(self.subscribers):
                self._outbox.send(client, messages.ModeChanged(before, gauge.to_message()))
            gauge.announced, gauge.since = mode, now
        return moved
