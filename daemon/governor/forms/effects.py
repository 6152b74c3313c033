"""The governor's effects. The actor carries them out in the order given. Owns the forms only. Invariant: they are
immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.effects import Announce, Send
from ...core.events import AgentsTurned
from ...core.host_memory import Pressed
from .limits import NeighbourPlace


@dataclass(frozen=True, slots=True)
class GovernorLog:
    """One log line for the operator: a transition, a stuck device, or an owner that does not respond."""

    level: str
    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AskNeighbour:
    """Asks a neighbour to give its memory back, if it is idle. Answered once by a NeighbourAnswered with `number`,
    after `answer_s` seconds at the latest."""

    number: int
    place: NeighbourPlace
    answer_s: float


Effect = Send | Pressed | AgentsTurned | Announce | GovernorLog | AskNeighbour
