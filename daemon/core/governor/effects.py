"""What the governor asks for. The actor carries effects out in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....ipc import messages


@dataclass(frozen=True, slots=True)
class GovernorSend:
    """An answer or a push, for a client that has not left."""

    client: int
    message: messages.Answer


@dataclass(frozen=True, slots=True)
class Press:
    """To the store, whenever one of these has changed; all at their defaults: as if there were no pressure.

    The same again, once `idle_s` has passed, for what has become idle since. The store answers each with HostHolds.

    `resident_bytes_max`: the ring may keep so many bytes in memory; None: all that it has.
    `idle_s`: entries not used for so long go, once per Press. `refuse`: puts are refused, for `reason`.
    """

    resident_bytes_max: int | None = None
    idle_s: float | None = None
    refuse: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GovernorAnnounce:
    """Something that watchers may want to know.

    `body["event"]` names it: mode, order, refuse, owner, workflow, stuck.
    """

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GovernorLog:
    """One line for the operator: every transition, and every owner that does not answer."""

    level: str
    event: str
    fields: dict[str, Any]


Effect = GovernorSend | Press | GovernorAnnounce | GovernorLog
