"""The last reading and the mode of every gauge, and the subscribers to changes of mode.

Owns readings, the time at which each gauge entered its mode, and subscribers. Does not own when a mode is entered
(`modes`), nor what follows from it (devices, host).

Invariants: every change of a mode is announced once as a transition, also that of a vanished gauge
(to relaxed). A new gauge is pushed to subscribers even if it is relaxed, which is no transition. A reading that is
stale, or not newer than the last, changes no mode; an older one changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ....ipc.messages import control as messages
from ....ipc.messages.modes import LEVELS, Mode, Tier
from ..forms.events import Sample
from ..forms.limits import GovernorLimits
from ..forms.outbox import GovernorOutbox
from .modes import TierMode


@dataclass(slots=True)
class Gauge:
    """One gauge's last reading, and the mode that its readings have led to. `announced`: the mode that was announced
    last, at `since`; None before the gauge was announced at all."""

    sample: Sample
    state: TierMode
    limits: GovernorLimits
    announced: Mode = Mode.RELAXED
    since: float | None = None

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
    def mode(self) -> Mode:
        return self.state.mode

    @property
    def level(self) -> Mode:
        return self.state.level

    @property
    def pressed(self) -> bool:
        """Whether the level is pressure or above."""
        return self.state.pressed

    @property
    def refuses(self) -> bool:
        """Whether new entries are refused."""
        return self.level is Mode.EMERGENCY

    def take(self, sample: Sample) -> bool:
        """Takes a reading. True if it is newer and not stale."""
        newer = sample.began_at - self.sample.began_at
        fresh = newer > 0 and not sample.stale
        if newer >= 0 or sample.stale:
            self.sample = sample
        if fresh:
            self.state.sample(self.share)
        return fresh

    def to_message(self) -> messages.TierState:
        sample = self.sample
        sizes = sample.used_bytes, sample.total_bytes
        return messages.TierState(
            sample.gauge, sample.tier, self.mode, *sizes, refuses=self.refuses, baseline_bytes=self.baseline_bytes
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed gauges. `fresh`: with a new reading; `moved`: with a new mode; `gone`: vanished."""

    fresh: tuple[Gauge, ...] = ()
    moved: tuple[Gauge, ...] = ()
    gone: tuple[Gauge, ...] = ()


class Tiers:
    """All gauges by name. Every method that changes gauges returns the changes."""

    def __init__(self, limits: GovernorLimits, outbox: GovernorOutbox) -> None:
        self._limits = limits
        self.subscribers: set[int] = set()
        self._outbox = outbox
        self._workflow: frozenset[str] = frozenset()
        self._gauges: dict[str, Gauge] = {}

    def __iter__(self) -> Iterator[Gauge]:
        return iter(list(self._gauges.values()))

    def find(self, name: str) -> Gauge | None:
        """The gauge of that name."""
        return self._gauges.get(name)

    def find_device(self, name: str) -> Gauge | None:
        """The same; None for the host's gauge too."""
        gauge = self.find(name)
        return gauge if gauge is not None and gauge.sample.tier is Tier.DEVICE else None

    @property
    def pressed(self) -> bool:
        """Whether any tier is at pressure or above."""
        return any(gauge.pressed for gauge in self)

    def _new_state(self, name: str) -> TierMode:
        state = TierMode(self._limits.thresholds)
        state.workflow = name in self._workflow
        return state

    def sampled(self, samples: Iterable[Sample], now: float) -> Changes:
        """Takes the readings of all gauges. A gauge without one has vanished."""
        read = {sample.gauge: sample for sample in samples}
        fresh: list[Gauge] = []
        for name, sample in read.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                before = replace(sample, began_at=float("-inf"))
                gauge = self._gauges[name] = Gauge(before, self._new_state(name), self._limits)
            if gauge.take(sample):
                fresh.append(gauge)
        gone = tuple(self._gauges.pop(name) for name in list(self._gauges) if name not in read)
        moved = self._announce_modes(now)
        for gauge in gone:
            self._announce_gone(gauge)
        return Changes(tuple(fresh), moved, gone)

    def set_workflow(self, devices: Iterable[str], now: float) -> Changes:
        """Sets the devices that a step graph concerns. It never concerns the host."""
        workflow = frozenset(devices)
        if workflow == self._workflow:
            return Changes()
        self._workflow = workflow
        for gauge in self:
            gauge.state.workflow = gauge.sample.gauge in workflow
        return Changes((), self._announce_modes(now))

    def change_thresholds(self) -> None:
        """The limits have other thresholds, for later readings."""
        for gauge in self:
            gauge.state.change_thresholds(self._limits.thresholds)

    def to_messages(self) -> list[messages.TierState]:
        """The state of every gauge, for a client."""
        return [gauge.to_message() for gauge in self]

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        for gauge in self:
            name = gauge.sample.gauge
            assert gauge is self.find(name)
            announced = gauge.since is not None and gauge.mode is gauge.announced
            assert announced, f"the mode {gauge.mode} of {name} was not announced"
            assert gauge.state.workflow == (name in self._workflow)
        assert self.subscribers <= self._outbox.clients.keys()

    def _announce_modes(self, now: float) -> tuple[Gauge, ...]:
        moved = []
        for gauge in self:
            before = gauge.announced
            if gauge.mode is not before:
                self._announce_transition(gauge, before, gauge.to_message())
                moved.append(gauge)
            elif gauge.since is None:
                # A subscriber may know another mode of the gauge from before the daemon's restart.
                self._push(messages.ModeChanged(before, gauge.to_message()))
            else:
                continue
            gauge.announced, gauge.since = gauge.mode, now
        return tuple(moved)

    def _announce_gone(self, gauge: Gauge) -> None:
        before, sample = gauge.announced, gauge.sample
        if before is not Mode.RELAXED:
            state = messages.TierState(sample.gauge, sample.tier, Mode.RELAXED, sample.used_bytes, sample.total_bytes)
            self._announce_transition(gauge, before, state)

    def _announce_transition(self, gauge: Gauge, before: Mode, state: messages.TierState) -> None:
        transition = {
            "gauge": state.gauge,
            "tier": state.tier.value,
            "before": before.value,
            "mode": state.mode.value,
            "share": round(gauge.share, 4),
        }
        self._outbox.counters.transitions[state.mode.value] += 1
        pressed = state.mode in LEVELS[LEVELS.index(Mode.PRESSURE) :]
        self._outbox.log("warning" if pressed else "info", "mode", source=gauge.sample.source, **transition)
        self._outbox.announce("mode", **transition)
        self._push(messages.ModeChanged(before, state))

    def _push(self, change: messages.ModeChanged) -> None:
        for client in sorted(self.subscribers):
            self._outbox.send(client, change)
