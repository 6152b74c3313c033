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
from .schema import Message


class ConnectionState(StrEnum):
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

CONTROL_ALLOWED: Final[dict[ConnectionState, frozenset[Kind]]] = {
    ConnectionState.FRESH: frozenset({m.Hello}),
    ConnectionState.GREETING: frozenset(),
    ConnectionState.GREETED: UNATTACHED | {m.Attach},
    ConnectionState.ATTACHING: UNATTACHED,
    ConnectionState.ATTACHED: ATTACHED,
    ConnectionState.CLOSED: frozenset(),
}
QUERIES: Final[frozenset[Kind]] = frozenset(kinds(m.StatusRequest).values())
STATUS_ALLOWED: Final[dict[ConnectionState, frozenset[Kind]]] = {
    ConnectionState.FRESH: QUERIES,
    ConnectionState.OPEN: QUERIES,
    ConnectionState.CLOSED: frozenset(),
}

MOVES: Final[dict[tuple[ConnectionState, Kind], ConnectionState]] = {
    (ConnectionState.FRESH, m.Hello): ConnectionState.GREETING,
    (ConnectionState.GREETING, m.Welcome): ConnectionState.GREETED,
    (ConnectionState.GREETED, m.Attach): ConnectionState.ATTACHING,
    (ConnectionState.ATTACHING, m.Attached): ConnectionState.ATTACHED,
    **{(ConnectionState.FRESH, query): ConnectionState.OPEN for query in QUERIES},
}
MOVES_WHEN_REFUSED: Final[dict[Kind, ConnectionState]] = {
    m.Hello: ConnectionState.CLOSED,
    m.Attach: ConnectionState.GREETED,
}

REMEDIES: Final[dict[ConnectionState, str]] = {
    ConnectionState.FRESH: "send Hello first, and wait for Welcome",
    ConnectionState.GREETING: "wait for Welcome",
    ConnectionState.GREETED: "send Attach first, and wait for Attached",
    ConnectionState.ATTACHING: "wait for Attached",
    ConnectionState.ATTACHED: "Hello and Attach are sent once; connect anew to attach again",
    ConnectionState.OPEN: "send queries only",
    ConnectionState.CLOSED: "connect anew",
}

COUNTS: Final[frozenset[Kind]] = frozenset({m.Counted, m.Done})
ANSWERS: Final[dict[Kind, frozenset[Kind]]] = {
    m.Hello: frozenset({m.Welcome}),
    m.Attach: frozenset({m.Attached}),
    m.OpenInbox: COUNTS,
    m.Commit: frozenset({m.Committed}),
    m.RequestClaim: frozenset({m.Claimed}),
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
