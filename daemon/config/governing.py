"""The configuration tables for the governor: [gauges], [pressure], [device], [queueing] and [metrics].

Owns: their settings, defaults and bounds. Does not own the rest of the tree (config.py), nor the effect of a setting.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ...ipc.messages.modes import Tier
from ..gauges.sources import registry
from ..governor.forms.thresholds import Thresholds
from .sections import DAY_S, HOUR_S, MIB, TIB
from .settings import ADDRESS, DURATION, PATH, SHARE, SIZE, SIZES, choice, setting


@dataclasses.dataclass(frozen=True)
class GaugesSection:
    """The sources of the gauges, which measure how full each tier is."""

    device: str = setting(
        choice(*registry.choices(Tier.DEVICE)), f"{registry.described(Tier.DEVICE)}; file: tests", "auto"
    )
    host: str = setting(choice(*registry.choices(Tier.HOST)), registry.described(Tier.HOST), "auto")
    file: Path | None = setting(
        PATH,
        "the gauge file, with a line `NAME USED TOTAL` for each gauge; it is read at each sample",
        None,
        optional=True,
    )
    sample_s: float = setting(DURATION, "time between two samples", 2.0, low=0.01, high=HOUR_S, reload=True)
    sample_pressed_s: float = setting(
        DURATION,
        "time between two samples while a tier is in pressure or above",
        0.25,
        low=0.01,
        high=HOUR_S,
        reload=True,
    )


@dataclasses.dataclass(frozen=True)
class PressureSection:
    """The modes: the threshold of each mode, and the idle entries that are evicted in it."""

    normal: float = setting(
        SHARE, "share of a tier from which its mode is normal", 0.70, low=0.01, high=0.99, reload=True
    )
    pressure: float = setting(SHARE, "share from which the mode is pressure", 0.85, low=0.02, high=0.995, reload=True)
    critical: float = setting(SHARE, "share from which the mode is critical", 0.92, low=0.03, high=0.999, reload=True)
    emergency: float = setting(SHARE, "share from which the mode is emergency", 0.96, low=0.04, high=1.0, reload=True)
    hysteresis: float = setting(
        SHARE,
        "a mode ends after two samples in a row that are below its threshold by this share or more",
        0.02,
        low=0.0,
        high=0.2,
        reload=True,
    )
    relaxed_idle_s: float = setting(
        DURATION,
        "relaxed: device entries that are idle for this time are evicted",
        600.0,
        low=0.01,
        high=365 * DAY_S,
        reload=True,
    )
    normal_idle_s: float = setting(
        DURATION,
        "normal: device entries that are idle for this time are evicted",
        120.0,
        low=0.01,
        high=365 * DAY_S,
        reload=True,
    )
    critical_idle_s: float = setting(
        DURATION,
        "critical and emergency: entries that are idle for this time are evicted too",
        30.0,
        low=0.01,
        high=365 * DAY_S,
        reload=True,
    )
    ack_s: float = setting(
        DURATION,
        "time in which an owner must carry out an order; after it the owner counts as not answering",
        10.0,
        low=0.05,
        high=HOUR_S,
        reload=True,
    )
    retry_s: float = setting(
        DURATION,
        """time until an entry is ordered again after its owner kept it or did not answer; while a reservation waits,
        1 s at most""",
        30.0,
        low=0.05,
        high=DAY_S,
        reload=True,
    )

    def thresholds(self) -> Thresholds:
        """The thresholds of the modes. Raises BadConfiguration if they are inconsistent."""
        return Thresholds(self.normal, self.pressure, self.critical, self.emergency, self.hysteresis)


@dataclasses.dataclass(frozen=True)
class DeviceSection:
    """The budget of each device's entries, and what is held there by plan."""

    max_bytes: int | None = setting(
        SIZE,
        "bytes of entries on one device; none: no limit",
        None,
        low=1,
        high=16 * TIB,
        optional=True,
        reload=True,
    )
    baseline: tuple[tuple[str, int], ...] | None = setting(
        SIZES,
        """bytes of a device that are held by plan, as by an inference engine: modes are about the rest; one size for
        all devices, or by name; none: no plan""",
        None,
        optional=True,
        reload=True,
    )
    baseline_learn_s: float | None = setting(
        DURATION,
        "learn a device's baseline from what is no entry and has been held steadily for this time; none: do not learn",
        None,
        low=60.0,
        high=DAY_S,
        optional=True,
        reload=True,
    )


@dataclasses.dataclass(frozen=True)
class QueueingSection:
    """The queueing floor: the amount of cache that a device needs so that its queue of requests stays finite."""

    block_bytes: int = setting(
        SIZE, "size of one block, as clients count blocks", 2 * MIB, low=1, high=1 * TIB, reload=True
    )


@dataclasses.dataclass(frozen=True)
class MetricsSection:
    """Metrics in Prometheus' text format, over HTTP."""

    listen: str | None = setting(
        ADDRESS,
        "HOST:PORT on which metrics are also served by TCP, without authentication; none: no TCP",
        None,
        optional=True,
    )
