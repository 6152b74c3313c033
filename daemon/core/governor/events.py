"""What can happen to the governor. `Governor.handle(event, now)` takes one at a time; time is an argument.

The actor that feeds them promises what the store's does: GovernorClientJoined comes before anything else of a client,
GovernorClientLeft last, numbers are not used again, the order of one client's messages is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ....ipc import messages
from ....ipc.modes import Tier
from ..host_memory import HostHolds
from .limits import GovernorLimits

OWNERS_EVERY_S: Final = 2.0
"""Owners of tensors say so often what they see of their device, however often gauges are read."""


@dataclass(frozen=True, slots=True)
class GovernorClientJoined:
    """A client that may say something from now on."""

    client: int
    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class GovernorClientLeft:
    """Its connection is gone, and with it all that it had registered."""

    client: int


@dataclass(frozen=True, slots=True)
class GovernorReceived:
    """A validated request of a client; a GaugeRequest goes to the gauges instead."""

    client: int
    message: messages.GovernorRequest


@dataclass(frozen=True, slots=True)
class Sample:
    """One gauge's reading. `began_at`: when it was begun; what was freed later cannot show in it.

    `source` names where it comes from; `stale`: that has failed three times or more, and this is its last value.
    `shown`: what status shows besides (memory stalls of the host).
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
class Sampled:
    """All gauges that there are, as they were read together. One that is not among them any more is gone."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class GovernorLimitsChanged:
    """The configuration was read again."""

    limits: GovernorLimits


@dataclass(frozen=True, slots=True)
class GovernorTick:
    """Time has passed, or the governor asked to go on (`next_timer`)."""


Event = (
    GovernorClientJoined
    | GovernorClientLeft
    | GovernorReceived
    | Sampled
    | HostHolds
    | GovernorLimitsChanged
    | GovernorTick
)
