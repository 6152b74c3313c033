"""The states of a connection, as tables: what may be said in each, and where it leads.

                control socket                                     status socket

    FRESH ──Hello──> GREETING ──Welcome──> GREETED             FRESH ──any query──> OPEN
                                            │    ↑
                                         Attach  Error         Both end in CLOSED: the peer is
                                            ↓    │             gone, or broke the rules, or
                     ATTACHED <─Attached─ ATTACHING            Hello was refused.

Owns: the tables. Does not own any connection's state (`connection` does).

Both sides read the same tables: a message counts when it is sent, and when it arrives.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from . import messages as m
from .decode import kinds
from .places import CONTROL_NAME, STATUS_NAME
from .words import Message


class State(StrEnum):
    FRESH = "fresh"
    GREETING = "greeting"
    GREETED = "greeted"
    ATTACHING = "attaching"
    ATTACHED = "attached"
    OPEN = "open"
    CLOSED = "closed"


Kind = type[Message]

# These need no lane, so that a command can send them without attaching.
UNATTACHED: Final[frozenset[Kind]] = frozenset(
    {m.Evict, m.Touch, m.Clear, m.Invalidate, m.Limit, m.EvictPrefixes, m.AgentTurn, *kinds(m.GovernorRequest).values()}
)
ATTACHED: Final[frozenset[Kind]] = frozenset(kinds(m.ControlRequest).values()) - {
    m.Hello,
    m.Attach,
}

CONTROL_ALLOWED: Final[dict[State, frozenset[Kind]]] = {
    State.FRESH: frozenset({m.Hello}),
    State.GREETING: frozenset(),
    State.GREETED: UNATTACHED | {m.Attach},
    State.ATTACHING: UNATTACHED,
    State.ATTACHED: ATTACHED,
    State.CLOSED: frozenset(),
}
QUERIES: Final[frozenset[Kind]] = frozenset(kinds(m.StatusRequest).values())
STATUS_ALLOWED: Final[dict[State, frozenset[Kind]]] = {
    State.FRESH: QUERIES,
    State.OPEN: QUERIES,
    State.CLOSED: frozenset(),
}

MOVES: Final[dict[tuple[State, Kind], State]] = {
    (State.FRESH, m.Hello): State.GREETING,
    (State.GREETING, m.Welcome): State.GREETED,
    (State.GREETED, m.Attach): State.ATTACHING,
    (State.ATTACHING, m.Attached): State.ATTACHED,
    **{(State.FRESH, query): State.OPEN for query in QUERIES},
}
MOVES_WHEN_REFUSED: Final[dict[Kind, State]] = {
    m.Hello: State.CLOSED,
    m.Attach: State.GREETED,
}

REMEDIES: Final[dict[State, str]] = {
    State.FRESH: "send Hello first, and wait for Welcome",
    State.GREETING: "wait for Welcome",
    State.GREETED: "send Attach first, and wait for Attached",
    State.ATTACHING: "wait for Attached",
    State.ATTACHED: "Hello and Attach are sent once; connect anew to attach again",
    State.OPEN: "send queries only",
    State.CLOSED: "connect anew",
}

COUNTS: Final[frozenset[Kind]] = frozenset({m.Counted, m.Done})
ANSWERS: Final[dict[Kind, frozenset[Kind]]] = {
    m.Hello: frozenset({m.Welcome}),
    m.Attach: frozenset({m.Attached}),
    m.OpenInbox: COUNTS,
    m.Commit: frozenset({m.Committed}),
    m.Claim: frozenset({m.Claimed}),
    m.Evict: COUNTS,
    m.Touch: COUNTS,
    m.Clear: COUNTS,
    m.Invalidate: frozenset({m.Generation}),
    m.Pin: frozenset({m.Pinned}),
    m.Unpin: COUNTS,
    m.Limit: frozenset({m.Limited}),
    m.MatchPrefix: frozenset({m.Matched}),
    m.EvictPrefixes: COUNTS,
    m.AgentTurn: COUNTS,
    m.Subscribe: frozenset({m.Modes}),
    m.OpenDevice: frozenset({m.DeviceOpened}),
    m.RegisterEntry: frozenset({m.Registered}),
    m.ReleaseEntries: COUNTS,
    m.AcknowledgeOrder: COUNTS,
    m.ReserveDevice: frozenset({m.Reserved}),
    m.ReleaseReservation: COUNTS,
    m.RegisterWorkflow: COUNTS,
    m.AdvanceWorkflow: COUNTS,
    m.EndWorkflow: COUNTS,
    m.Drill: frozenset({m.Drilled}),
    **{query: frozenset({m.Document}) for query in QUERIES},
}
"""What may answer a request; an Error may answer each. Who is not here gets no answer."""
OTHER_SOCKET: Final[dict[str, str]] = {
    **{
        name: f"that is the status socket, where nothing can be changed and {name} is not taken: "
        f"name the control socket, {CONTROL_NAME} unless it was configured otherwise"
        for name in kinds(m.ControlRequest)
    },
    **{
        name: f"that is the control socket, which answers no {name}: "
        f"name the status socket, {STATUS_NAME} unless it was configured otherwise"
        for name in kinds(m.StatusRequest)
    },
}
"""What is told a peer whose message, by its name, is for the daemon's other socket."""
PUSHES: Final[frozenset[Kind]] = frozenset({m.PartCopied, m.Event, m.ModeChanged, m.Order})
