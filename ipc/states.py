"""The states of a connection, as tables: what may be said in each, and where it leads.

                control socket                                     status socket

    FRESH ──Hello──> GREETING ──Welcome──> GREETED             FRESH ──any query──> OPEN
                                            │    ↑
                                         Attach  Error         Both end in CLOSED: the peer is
                                            ↓    │             gone, or broke the rules, or
                     ATTACHED <─Attached─ ATTACHING            Hello was refused.

Owns: the tables, which follow from how messages are declared (`declared`). Does not own any connection's state
(`connection` does).

Both sides read the same tables: a message counts when it is sent, and when it arrives.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from . import messages as m
from .declared import Kinds, answers, by_name, declared
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

_CONTROL: Final = declared(m.ControlRequest)
_STATUS: Final = declared(m.StatusRequest)
CONTROL_REQUESTS: Final[Kinds] = by_name(_CONTROL)
CONTROL_ANSWERS: Final[Kinds] = by_name(answers(_CONTROL))
STATUS_REQUESTS: Final[Kinds] = by_name(_STATUS)
STATUS_ANSWERS: Final[Kinds] = by_name(answers(_STATUS))
"""What may come on each socket, by the name on the wire: requests to the daemon, answers and pushes to the client."""

# These need no lane, so that a command can send them without attaching.
UNATTACHED: Final[frozenset[Kind]] = frozenset(kind for kind in _CONTROL if not kind.needs_lane)
ATTACHED: Final[frozenset[Kind]] = frozenset(_CONTROL) - {m.Hello, m.Attach}

CONTROL_ALLOWED: Final[dict[ConnectionState, frozenset[Kind]]] = {
    ConnectionState.FRESH: frozenset({m.Hello}),
    ConnectionState.GREETING: frozenset(),
    ConnectionState.GREETED: UNATTACHED | {m.Attach},
    ConnectionState.ATTACHING: UNATTACHED,
    ConnectionState.ATTACHED: ATTACHED,
    ConnectionState.CLOSED: frozenset(),
}
QUERIES: Final[frozenset[Kind]] = frozenset(_STATUS)
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

ANSWERED_BY: Final[dict[Kind, Kind]] = {
    kind: kind.answered_by for kind in (*_CONTROL, *_STATUS) if kind.answered_by is not None
}
"""What answers a request; an Error may answer each. Who is not here gets no answer."""
OTHER_SOCKET: Final[dict[str, str]] = {
    **{
        name: f"that is the status socket, where nothing can be changed and {name} is not taken: "
        f"name the control socket, {CONTROL_NAME} unless it was configured otherwise"
        for name in CONTROL_REQUESTS
    },
    **{
        name: f"that is the control socket, which answers no {name}: "
        f"name the status socket, {STATUS_NAME} unless it was configured otherwise"
        for name in STATUS_REQUESTS
    },
}
"""What is told a peer whose message, by its name, is for the daemon's other socket."""
PUSHES: Final[frozenset[Kind]] = frozenset(push for kind in (*_CONTROL, *_STATUS) for push in kind.pushes)
"""What the daemon may send without being asked."""
