"""What the governor asks for. The actor carries effects out in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..effects import Announce, Send
from ..host_memory import Pressed


@dataclass(frozen=True, slots=True)
class GovernorLog:
    """One line for the operator: every transition, and every owner that does not answer."""

    level: str
    event: str
    fields: dict[str, Any]


Effect = Send | Pressed | Announce | GovernorLog
