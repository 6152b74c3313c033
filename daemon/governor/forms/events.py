"""The governor's events. `Governor.handle(event, now)` takes one at a time; time is an argument.

Owns the forms only. Invariants, which the actor that delivers the events guarantees, as for the store:
GovernorClientJoined comes before any other event of a client, GovernorClientLeft last; a client number is never used
twice; the messages of one client stay in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ....ipc.messages import control as messages
from ....ipc.messages.modes import Tier
from ...core.host_memory import HostHolds
from .limits import GovernorLimits

OWNERS_EVERY_S: Final = 2.0
"""How often owners of tensors report what they see of their device, however often gauges are read."""


@dataclass(frozen=True, slots=True)
class GovernorClientJoined:
    """A client has connected and may send messages."""

    client: int
    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class GovernorClientLeft:
    """The client's connection has ended, and with it all its registrations."""

    client: int


@dataclass(frozen=True, slots=True)
class GovernorReceived:
    """A validated request of a client. A GaugeRequest goes to the gauges instead."""

    client: int
    message: messages.GovernorRequest


@dataclass(frozen=True, slots=True)
class Sample:
    """One gauge's reading. `began_at`: when reading began; memory freed later cannot show in it.

    `source`: the name of its source. `stale`: no source reads the gauge now, and this is the last value.
    `shown`: further values for status (memory stalls of the host).
    """

    gauge: str
    tier: Tier
    used_bytes: int
    total_bytes: int
    source: str
    began_at: float
    stale: bool = False
    shown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceState:
    """What one source of gauges does. `since`: when the state began; for "hanging", when the reading began.

    `state`: "hanging" if a reading has not returned within its deadline; "waiting" before the first answer.
    `problem`: a person must look, and no stale gauge says so.
    """

    source: str
    tier: Tier
    state: Literal["ok", "failing", "hanging", "absent", "waiting"]
    since: float
    why: str = ""
    problem: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """The last readings of all gauges, and the states of their sources. A gauge without a reading has vanished.

    Readings that are not newer than those of the last Sampled change nothing but whether a gauge is stale.
    """

    samples: tuple[Sample, ...]
    sources: tuple[SourceState, ...] = ()


@dataclass(frozen=True, slots=True)
class GovernorLimitsChanged:
    """The configuration was reloaded."""

    limits: GovernorLimits


@dataclass(frozen=True, slots=True)
class FormerDaemonFound:
    """Comes first, if a daemon ran before this one. Its clients attach anew, and say what it has granted them."""


@dataclass(frozen=True, slots=True)
class NeighbourAnswered:
    """The end of an AskNeighbour. "done": it accepted to free its memory; "busy": it was left alone.
    `why`: the reason if it is not "done", else what it keeps; "" if nothing."""

    number: int
    outcome: Literal["done", "busy", "failed"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class GovernorTick:
    """Time has passed, or the governor asked to continue (`next_timer`)."""


Event = (
    GovernorClientJoined
    | GovernorClientLeft
    | GovernorReceived
    | Sampled
    | HostHolds
    | GovernorLimitsChanged
    | FormerDaemonFound
    | NeighbourAnswered
    | GovernorTick
)
