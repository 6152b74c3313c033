"""What goes into the governor's core and comes out of it: events and effects. Time is an argument of `handle`.

The events that the store has too (ClientLeft, Tick), and the effects that it has too (Send,
Announce), are the store's. Invariants, which the actor guarantees as for the store: GovernorClientJoined comes before
any other event of a client, ClientLeft last; a client number is never used twice; the messages of one client stay in
order; effects are carried out in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct, field

from ....ipc.messages import control as messages
from ....ipc.messages.modes import Tier
from ...forms.effects import Announce, HostHolds, Send
from ...forms.events import AgentsTurned, ClientLeft, Pressed, Tick
from .limits import GovernorLimits, NeighbourPlace

OWNERS_EVERY_S: Final = 2.0
"""How often owners of tensors report what they see of their device, however often gauges are read."""
OWNERS_SOURCE: Final = "owners"
"""The source of a gauge that is known only from the reports of tensor owners."""


class GovernorClientJoined(Struct, frozen=True):
    """A client has connected and may send messages."""

    client: int
    name: str
    pid: int


class Governed(Struct, frozen=True):
    """A validated request of a client. A GaugeRequest is for the gauges, and does not come to the core."""

    client: int
    message: messages.GovernorRequest | messages.GaugeRequest


class Sample(Struct, frozen=True):
    """One gauge's reading. `began_at`: when reading began; memory freed later cannot show in it. `source`: the name of
    its source. `stale`: no source reads the gauge now, and this is the last value. `shown`: further values for status
    (memory stalls of the host)."""

    gauge: str
    tier: Tier
    used_bytes: int
    total_bytes: int
    source: str
    began_at: float
    stale: bool = False
    shown: Mapping[str, Any] = field(default_factory=dict)


class SourceState(Struct, frozen=True):
    """What one source of gauges does. `since`: when the state began; for "hanging", when the reading began. `state`:
    "hanging" if a reading has not returned within its deadline; "waiting" before the first answer. `problem`: a person
    must look, and no stale gauge says so."""

    source: str
    tier: Tier
    state: Literal["ok", "failing", "hanging", "absent", "waiting"]
    since: float
    why: str = ""
    problem: bool = False


class Sampled(Struct, frozen=True):
    """The last readings of all gauges, and the states of their sources. A gauge without a reading has vanished.
    Readings that are not newer than those of the last Sampled change nothing but whether a gauge is stale."""

    samples: tuple[Sample, ...]
    sources: tuple[SourceState, ...] = ()


class GovernorLimitsChanged(Struct, frozen=True):
    """The configuration was reloaded."""

    limits: GovernorLimits


class FormerDaemonFound(Struct, frozen=True):
    """Comes first, if a daemon ran before this one. Its clients attach anew, and say what it has granted them."""


class NeighbourAnswered(Struct, frozen=True):
    """The end of an AskNeighbour. "done": it accepted to free its memory; "busy": it was left alone.
    `why`: the reason if it is not "done", else what it keeps; "" if nothing."""

    number: int
    outcome: Literal["done", "busy", "failed"]
    why: str = ""


Event = (
    GovernorClientJoined
    | ClientLeft
    | Governed
    | Sampled
    | HostHolds
    | GovernorLimitsChanged
    | FormerDaemonFound
    | NeighbourAnswered
    | Tick
)


class GovernorLog(Struct, frozen=True):
    """One log line for the operator: a transition, a stuck device, or an owner that does not respond."""

    level: str
    event: str
    fields: dict[str, Any]


class AskNeighbour(Struct, frozen=True):
    """Asks a neighbour to give its memory back, if it is idle. Answered by a NeighbourAnswered with `number`: within
    `answer_s` seconds, unless the server drips or its name is not found so soon."""

    number: int
    place: NeighbourPlace
    answer_s: float


Effect = Send | Pressed | AgentsTurned | Announce | GovernorLog | AskNeighbour
