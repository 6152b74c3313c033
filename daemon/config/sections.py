"""The tables of the configuration: [limits], [quotas], [memory], [gauges], [pressure], [device], [queueing],
[neighbours], [remote], [metrics] and [log].

Owns: their settings, defaults and bounds. Does not own the keys above all tables (config.py), nor the effect of a
setting. Each table can be constructed alone with its defaults: `LimitsSection()`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from ...ipc.messages.modes import Tier
from ..gauges import sources
from ..governor.forms.limits import NeighbourPlace, Thresholds
from .settings import ADDRESS, COUNT, DURATION, PATH, SERVERS, SHARE, SIZE, SIZES, SWITCH, URL, choice, setting

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S
YEAR_S: Final = 365 * DAY_S


@dataclasses.dataclass(frozen=True)
class LimitsSection:
    """The limits on clients, messages, payloads and requests. A refusal names the limit that was reached."""

    clients_max: int = setting(COUNT, 256, 1, 65_536, reload=True)
    """Clients connected at once."""
    lanes_max: int = setting(COUNT, 1024, 1, 65_536, reload=True)
    """Lanes that exist at once; a lane stays after its client's connection has ended, as long as the client's views
    live. Each takes about 250 KiB."""
    object_bytes_max: int | None = setting(SIZE, None, 4 * KIB, 16 * TIB, reload=True)
    """Size of one payload with its tree header; none: the whole ring."""
    prefix_tokens_max: int = setting(COUNT, 1 << 20, 1024, 1 << 24, reload=True)
    """Tokens of one cached sequence, and of one query for a cached prefix."""
    prefix_wait_s: float = setting(DURATION, 1.0, 0.0, 60.0, reload=True)
    """The longest time that a query for a cached prefix waits while the index is rebuilt after a restart."""
    claim_s: float = setting(DURATION, 10.0, 0.05, DAY_S, reload=True)
    """Time after which a claim ends unless its client renews it."""
    claim_s_max: float = setting(DURATION, 120.0, 0.05, DAY_S, reload=True)
    """Time after which a claim ends, renewed or not; at least claim_s."""


@dataclasses.dataclass(frozen=True)
class QuotasSection:
    """The share of the common resources that one uid or one client may use: docs/quotas.md."""

    limits_share_max: float = setting(SHARE, 0.75, 0.001, 1.0, reload=True)
    """Share that one uid may use of the clients, the readers of the status socket, the lanes, the claims and the
    invalidated namespaces that there may be at once. Root and the daemon's own uid may use all."""
    requests_per_s_max: int = setting(COUNT, 20_000, 10, 1 << 30, reload=True)
    """Requests a second of one uid's clients while other uids have clients; further requests wait. A query on the
    status socket counts as 20 requests. Root and the daemon's own uid never wait."""


@dataclasses.dataclass(frozen=True)
class MemorySection:
    """The allocation of the ring's memory."""

    prefault: bool = setting(SWITCH, True)
    """Touch all pages of the ring in the background after the start, not at their first use."""
    huge_pages: bool = setting(SWITCH, False)
    """Request huge pages for the ring; has an effect if /dev/shm is mounted with huge=advise."""


@dataclasses.dataclass(frozen=True)
class GaugesSection:
    """The sources of the gauges, which measure how full each tier is."""

    device: str = setting(choice(*sources.CHOICES[Tier.DEVICE]), "auto")
    """auto: what answers first of pyrsmi, nvidia-ml-py, sysfs, and reports of clients, through torch; file: tests."""
    host: str = setting(choice(*sources.CHOICES[Tier.HOST]), "auto")
    """auto: the cgroup's limit, or MemAvailable where it has none."""
    file: Path | None = setting(PATH, None)
    """The gauge file, with a line `NAME USED TOTAL` for each gauge; it is read at each sample."""
    sample_s: float = setting(DURATION, 2.0, 0.01, HOUR_S, reload=True)
    """Time between two samples."""
    sample_pressed_s: float = setting(DURATION, 0.25, 0.01, HOUR_S, reload=True)
    """Time between two samples while a tier is in pressure or above."""


@dataclasses.dataclass(frozen=True)
class PressureSection:
    """The modes: the threshold of each mode, and the idle entries that are evicted in it."""

    normal: float = setting(SHARE, 0.70, 0.01, 0.99, reload=True)
    """Share of a tier from which its mode is normal."""
    pressure: float = setting(SHARE, 0.85, 0.02, 0.995, reload=True)
    """Share from which the mode is pressure."""
    critical: float = setting(SHARE, 0.92, 0.03, 0.999, reload=True)
    """Share from which the mode is critical."""
    emergency: float = setting(SHARE, 0.96, 0.04, 1.0, reload=True)
    """Share from which the mode is emergency."""
    hysteresis: float = setting(SHARE, 0.02, 0.0, 0.2, reload=True)
    """A mode ends after two samples in a row that are below its threshold by this share or more."""
    relaxed_idle_s: float = setting(DURATION, 600.0, 0.01, YEAR_S, reload=True)
    """Relaxed: device entries that are idle for this time are evicted."""
    normal_idle_s: float = setting(DURATION, 120.0, 0.01, YEAR_S, reload=True)
    """Normal: device entries that are idle for this time are evicted."""
    critical_idle_s: float = setting(DURATION, 30.0, 0.01, YEAR_S, reload=True)
    """Critical and emergency: device entries that are idle for this time are evicted too."""
    ack_s: float = setting(DURATION, 10.0, 0.05, HOUR_S, reload=True)
    """Time in which an owner must carry out an order; after it the owner counts as not answering."""
    retry_s: float = setting(DURATION, 30.0, 0.05, DAY_S, reload=True)
    """Time until an entry is ordered again after its owner kept it or did not answer; while a reservation waits, 1 s at
    most."""

    def thresholds(self) -> Thresholds:
        """The thresholds of the modes. Raises BadConfiguration if they are inconsistent."""
        return Thresholds(self.normal, self.pressure, self.critical, self.emergency, self.hysteresis)


@dataclasses.dataclass(frozen=True)
class DeviceSection:
    """The budget of each device's entries, and what is held there by plan."""

    max_bytes: int | None = setting(SIZE, None, 1, 16 * TIB, reload=True)
    """Bytes of entries on one device; none: no limit."""
    baseline: tuple[tuple[str, int], ...] | None = setting(SIZES, None, reload=True)
    """Bytes of a device that are held by plan, as by an inference engine: modes are about the rest; one size for all
    devices, or by name; none: no plan."""


@dataclasses.dataclass(frozen=True)
class QueueingSection:
    """The queueing floor: the amount of cache that a device needs so that its queue of requests stays finite."""

    block_bytes: int = setting(SIZE, 2 * MIB, 1, 1 * TIB, reload=True)
    """Size of one block, as clients count blocks."""


@dataclasses.dataclass(frozen=True)
class NeighboursSection:
    """Servers that are no clients, and are asked to give memory of a card back when `tensorctl room` needs it."""

    servers: tuple[NeighbourPlace, ...] | None = setting(SERVERS, None, reload=True)
    """The servers in the order in which they are asked; without a card, a server is asked for every card; none: no
    server is ever asked."""
    answer_s: float = setting(DURATION, 20.0, 0.05, 600.0, reload=True)
    """Time in which a server must have said that it is idle, and answered the request to free its memory."""
    beyond_loopback: bool = setting(SWITCH, False, reload=True)
    """Allow servers whose address is not localhost, 127.0.0.0/8 or ::1."""


@dataclasses.dataclass(frozen=True)
class RemoteSection:
    """A store that several hosts share: entries that this host misses are read from there, and new ones written."""

    url: str | None = setting(URL, None)
    """The store: dir://PATH, redis://, rediss://, valkey:// or valkeys://HOST:PORT, or mooncake://MASTER:PORT, with
    options; none: this host shares entries with no other."""
    timeout_s: float = setting(DURATION, 5.0, 0.01, HOUR_S)
    """How long the store's server may leave a request unanswered. A client waits for the store at most as long, and at
    most as long as computing takes."""
    write: bool = setting(SWITCH, True, reload=True)
    """Write entries to the store; false: this host only reads."""


@dataclasses.dataclass(frozen=True)
class MetricsSection:
    """Metrics in Prometheus' text format, over HTTP."""

    listen: str | None = setting(ADDRESS, None)
    """HOST:PORT on which metrics are also served by TCP, without authentication; none: no TCP."""


@dataclasses.dataclass(frozen=True)
class LogSection:
    """The daemon's log on standard error."""

    level: str = setting(choice("info", "warning", "error"), "info", reload=True)
    """The lowest level that is logged."""
    format: str = setting(choice("auto", "console", "json"), "auto")
    """auto: JSON to the journal, key=value elsewhere; json: JSON on any stream, but for what Python and libraries
    print."""
    slow_s: float = setting(DURATION, 0.01, 0.0, HOUR_S, reload=True)
    """A request that takes longer from its arrival to its answer is kept for `tensorctl latency`."""
