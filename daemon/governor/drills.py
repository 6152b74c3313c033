"""Drills: made-up readings that show what would follow from them, or that act until the client leaves.

Owns the shadow modes, one for each client and gauge that it asks about. Does not own the actual modes (tiers), the
orders of a pass (devices) or the ring's memory (host): it queries these parts and changes nothing of theirs.

A shadow starts in its gauge's mode and continues from one reading of its client to the next. So a file of readings
plays as it would in reality, hysteresis included.

Invariant: every shadow belongs to a connected client.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from ...errors import LimitReached, OwnedElsewhere
from ...ipc.messages import control as messages
from ...ipc.messages.modes import HOST_GAUGE, Mode, Tier
from ...ipc.messages.schema import SIZE_BYTES_MAX
from .devices.circumstances import Circumstances
from .devices.devices import Devices, PassPlan
from .forms.events import Sample
from .forms.limits import GovernorLimits
from .forms.thresholds import Thresholds
from .host import Host
from .modes.tiers import Changes, Gauge, Tiers


def sample_of(message: messages.Drill, now: float) -> Sample:
    """The made-up reading in the form of a gauge's reading."""
    tier = Tier.HOST if message.gauge == HOST_GAUGE else Tier.DEVICE
    return Sample(message.gauge, tier, message.used_bytes, message.total_bytes, "drill", now)


class Drills:
    """Answers Drill. `circumstances`: gives a device's circumstances by a gauge."""

    def __init__(
        self,
        tiers: Tiers,
        devices: Devices,
        host: Host,
        circumstances: Callable[[Gauge, float], Circumstances],
        limits: GovernorLimits,
    ) -> None:
        self._tiers = tiers
        self._devices = devices
        self._host = host
        self._circumstances = circumstances
        self._limits = limits
        self._shadows: dict[int, dict[str, Gauge]] = {}

    def change_thresholds(self, thresholds: Thresholds) -> None:
        """Applies to later readings."""
        for shadows in self._shadows.values():
            for gauge in shadows.values():
                gauge.state.change_thresholds(thresholds)

    def ask(self, client: int, message: messages.Drill, now: float) -> messages.Drilled:
        """What would follow from the reading. Only the shadow changes.

        Raises:
            LimitReached: the client asks about too many gauges; the text names the limit.
        """
        shadows = self._shadows.get(client, {})
        gauge = shadows.get(message.gauge)
        sample = sample_of(message, now)
        if gauge is None:
            self._check_room(len(shadows), message.gauge)
            gauge = self._shadows.setdefault(client, {})[message.gauge] = self._begin(sample)
        real = self._tiers.find(message.gauge)
        gauge.state.workflow = (self._tiers.new_state(sample.gauge) if real is None else real.state).workflow
        before = gauge.mode
        gauge.sample = sample
        gauge.state.sample(gauge.share)
        return self._drilled(message, before, gauge, now)

    def act(self, client: int, message: messages.Drill, now: float) -> tuple[messages.Drilled, Changes]:
        """The reading replaces the gauge's own. The answer says what a pass is about to order.

        Raises:
            OwnedElsewhere: another client drills that gauge.
            LimitReached: there are as many gauges as allowed; the text names the limit.
        """
        driller = self._tiers.driller(message.gauge)
        if driller not in (None, client):
            raise OwnedElsewhere(f"client {driller} drills gauge {message.gauge!r}: wait until it has left")
        known = self._tiers.find(message.gauge)
        if known is None:
            self._check_room(len(self._tiers), message.gauge)
        sample = sample_of(message, now)
        before = (known.state if known is not None else self._tiers.new_state(sample.gauge)).mode
        changes = self._tiers.drill(client, sample, now)
        return self._drilled(message, before, changes.fresh[0], now), changes

    def client_left(self, client: int) -> None:
        """Ends the client's shadows."""
        self._shadows.pop(client, None)

    def check_invariants(self, clients: set[int]) -> None:
        """Asserts that all shadows belong to connected clients."""
        assert self._shadows.keys() <= clients
        assert all(self._shadows.values())

    def _begin(self, sample: Sample) -> Gauge:
        known = self._tiers.find(sample.gauge)
        state = self._tiers.new_state(sample.gauge) if known is None else deepcopy(known.state)
        return Gauge(sample, state, self._tiers.baseline_of)

    def _check_room(self, gauges: int, name: str) -> None:
        if gauges >= self._limits.devices_max:
            raise LimitReached(
                f"{gauges} gauges are known here, and {self._limits.devices_max} may be (a fixed limit): "
                f"{name!r} is one too many"
            )

    def _drilled(self, message: messages.Drill, before: Mode, gauge: Gauge, now: float) -> messages.Drilled:
        if gauge.sample.tier is Tier.HOST:
            plan, shrink_bytes = PassPlan(), self._host.over_bytes(gauge)
        else:
            plan = self._devices.plan(message.gauge, self._circumstances(gauge, now), now)
            shrink_bytes = 0
        return messages.Drilled(
            message.id,
            before,
            gauge.to_message(),
            plan.offload_entries,
            # Sums of sizes that owners claim may exceed the largest size of a message.
            min(plan.offload_bytes, SIZE_BYTES_MAX),
            plan.drop_entries,
            min(plan.drop_bytes, SIZE_BYTES_MAX),
            shrink_bytes,
        )
