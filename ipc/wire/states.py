"""The states of a connection, as tables: the messages allowed in each state, and the transitions.

                control socket                                     status socket

    FRESH ──Hello──> GREETING ──Welcome──> GREETED             FRESH ──any query──> OPEN
                                            │    ↑
                                         Attach  Error         Both end in CLOSED: the peer is gone,
                                            ↓    │             or broke the protocol, or Hello was
                     ATTACHED <─Attached─ ATTACHING            refused.

Owns: the tables, which are derived from the declarations of messages (`declared`). Does not own the state of any
connection (`connection`).

Invariant: client and daemon use the same tables. The sender makes a transition when it sends a message, the receiver
when the message arrives.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from ..messages import control as m
from ..messages.declared import Kinds, answers, declared
from ..messages.schema import Message
from ..places import CONTROL_NAME, STATUS_NAME


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
CONTROL_REQUESTS: Final = Kinds(_CONTROL)
CONTROL_ANSWERS: Final = Kinds(answers(_CONTROL))
STATUS_REQUESTS: Final = Kinds(_STATUS)
STATUS_ANSWERS: Final = Kinds(answers(_STATUS))
"""The messages of each socket by their name on the wire: requests to the daemon, answers and pushes to the client."""

# Requests that need no lane. A command-line tool can send them without attaching.
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
"""The class of the answer to each request. An Error may answer every one of them. A request not listed here gets no
answer."""
OTHER_SOCKET: Final[dict[str, str]] = {
    **{
        name: f"this is the status socket, which is read-only and does not accept {name}: "
        f"connect to the control socket, {CONTROL_NAME} unless it was configured otherwise"
        for name in CONTROL_REQUESTS
    },
    **{
        name: f"this is the control socket, which does not accept {name}: "
        f"connect to the status socket, {STATUS_NAME} unless it was configured otherwise"
        for name in STATUS_REQUESTS
    },
}
"""The text of the Error for a message that belongs to the daemon's other socket, by the message's name."""
PUSHES: Final[frozenset[Kind]] = frozenset(push for kind in (*_CONTROL, *_STATUS) for push in kind.pushes)
"""The messages that the daemon may send unasked."""
