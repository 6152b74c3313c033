"""The protocol of one connection, without I/O: which messages are allowed now, and which descriptors belong to them.

                control socket

    FRESH ──Hello, Welcome──> GREETED ──Attach, Attached──> ATTACHED

The status socket has no order. A connection ends in CLOSED: the peer is gone, or broke the protocol, or Hello was
refused. The daemon judges what comes when, and counts open requests; a client believes the daemon.

Invariants: a descriptor given to `receive_data` comes back exactly once: with its message, in `Arrival.discarded`, or
from `close`. After a failure the connection is CLOSED and accepts nothing. Descriptors that this process could not open
are a failure. A server refuses requests over the client's limits. The connection goes on after a refusal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, field

from ...errors import (
    BadMessage,
    DaemonUnavailable,
    LimitReached,
    MessageTooLarge,
    ProcessLimit,
    ProtocolError,
    TensordError,
    VersionMismatch,
)
from ..messages import control as m
from ..messages.declared import Kinds, answers, declared, id_of
from ..messages.schema import PROTOCOL_VERSION, ClientLimits, Message
from ..places import CONTROL_NAME, STATUS_NAME
from .frames import CONTROL_BYTES_MAX, DOCUMENT_BYTES_MAX, FrameReader, UnknownMessage, decode, pack, unpack

FDS_MAX: Final = 8
"""The most descriptors that may wait for the message that declares them, and the most in one sendmsg call."""

CONTROL_REQUESTS: Final = Kinds(declared(m.ControlRequest))
CONTROL_ANSWERS: Final = Kinds(answers(declared(m.ControlRequest)))
STATUS_REQUESTS: Final = Kinds(declared(m.StatusRequest))
STATUS_ANSWERS: Final = Kinds(answers(declared(m.StatusRequest)))
"""The messages of each socket by their name on the wire: requests to the daemon, answers and pushes to the client."""

Cut = ProtocolError | ProcessLimit | None
"""The error of a read that lost descriptors: ProcessLimit if this process could not open them."""
Delivery = tuple[Any, tuple[int, ...]]
"""A message and its descriptors. The receiver of the message owns the descriptors."""


class ConnectionState(StrEnum):
    """How far a connection has come. One of the status socket stays FRESH. A client's is GREETED at most."""

    FRESH = "fresh"
    GREETED = "greeted"
    ATTACHED = "attached"
    CLOSED = "closed"


class Arrival(Struct):
    """The result of one read. `messages` are valid even if a later message in the same read was the failure."""

    messages: list[Delivery] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)  # descriptors that the caller closes
    replies: bytearray = field(default_factory=bytearray)  # bytes to send to the peer before anything else
    failure: Cut = None  # if set, the connection is CLOSED: send `replies`, then close the socket


class Connection:
    """The protocol of one side of one socket. `limits`: of the client that a server serves; None for a client."""

    def __init__(self, known: Kinds, received_bytes_max: int, sent_bytes_max: int, limits: ClientLimits | None) -> None:
        self.state = ConnectionState.FRESH
        self.serving = limits is not None
        self._known = known
        self._reader = FrameReader(received_bytes_max)
        self._send_bytes_max = sent_bytes_max
        self._limits = limits or ClientLimits()
        self._open: dict[int, type[Message]] = {}  # unanswered requests by id, on a server
        self._fds: deque[int] = deque()

    @classmethod
    def control_server(cls, limits: ClientLimits) -> Connection:
        return cls(CONTROL_REQUESTS, limits.message_bytes_max, CONTROL_BYTES_MAX, limits)

    @classmethod
    def control_client(cls) -> Connection:
        """Sends no longer messages than the daemon's Welcome allows."""
        return cls(CONTROL_ANSWERS, CONTROL_BYTES_MAX, CONTROL_BYTES_MAX, None)

    @classmethod
    def status_server(cls, limits: ClientLimits) -> Connection:
        return cls(STATUS_REQUESTS, CONTROL_BYTES_MAX, DOCUMENT_BYTES_MAX, limits)

    @classmethod
    def status_client(cls) -> Connection:
        return cls(STATUS_ANSWERS, DOCUMENT_BYTES_MAX, CONTROL_BYTES_MAX, None)

    @property
    def closed(self) -> bool:
        return self.state is ConnectionState.CLOSED

    # ---- what comes in

    def receive_data(self, data: bytes, fds: Sequence[int] = (), cut: Cut = None) -> Arrival:
        """Processes the result of one read, whose messages are lost if descriptors are. An error of the peer is in
        `Arrival.failure`."""
        arrival = Arrival()
        self._fds.extend(fds)
        if not self.closed:
            try:
                if cut is not None:
                    raise cut
                for frame in self._reader.feed(data):
                    self._take(frame, arrival)
                self._refuse_undeclared()
            except (ProtocolError, ProcessLimit) as failure:
                arrival.failure = failure
                self.state = ConnectionState.CLOSED
                if self.serving:
                    arrival.replies += pack(m.Error.of(failure))
        if self.closed:
            arrival.discarded += self.close()
        return arrival

    def close(self) -> list[int]:
        """Ends the connection. Returns the descriptors that no message has taken; the caller closes them."""
        self.state = ConnectionState.CLOSED
        left = [*self._fds]
        self._fds.clear()
        return left

    def _take(self, frame: bytes, arrival: Arrival) -> None:
        if self.state is ConnectionState.FRESH:
            self._check_version(unpack(frame))
        try:
            message = decode(frame, self._known)
        except UnknownMessage as unknown:
            arrival.discarded += self._fds_for("a message of unknown type", unknown.fds)
            if self.serving:
                elsewhere = _of_other_socket(unknown.name)
                arrival.replies += pack(m.Error.of(elsewhere or unknown, unknown.id))
            return
        fds = self._fds_for(type(message).__name__, getattr(message, "fds", 0))
        refusal: TensordError | None = None
        if self.serving:
            try:
                refusal = self._refusal(message)
            except ProtocolError:
                arrival.discarded += fds
                raise
        elif isinstance(message, m.Welcome):
            self.state = ConnectionState.GREETED
            self._send_bytes_max = message.limits.message_bytes_max
        if refusal is None:
            arrival.messages.append((message, fds))
            return
        arrival.discarded += fds
        number = id_of(message)
        if number is not None:  # an Error without an id would end the connection
            arrival.replies += pack(m.Error.of(refusal, number))

    def _check_version(self, found: object) -> None:
        """Raises VersionMismatch. Called before the fields are decoded: another version may have other fields."""
        if type(found) is not dict or found.get("type") != ("Hello" if self.serving else "Welcome"):
            return
        theirs = found.get("protocol")
        if type(theirs) is not int or theirs == PROTOCOL_VERSION:
            return
        peer, here = ("client", "daemon") if self.serving else ("daemon", "client")
        versions = f"the {peer} speaks protocol version {theirs}, this {here} {PROTOCOL_VERSION}"
        raise VersionMismatch(f"{versions}: install the same release of tensord on both sides")

    def _fds_for(self, name: str, count: int) -> tuple[int, ...]:
        """The descriptors of a message."""
        if count > len(self._fds):
            why = f"{name} declares {count} descriptors, {len(self._fds)} came with it"
            raise ProtocolError(f"{why}: send them in the same sendmsg call as the message's first byte")
        return tuple([self._fds.popleft() for _ in range(count)])

    def _refuse_undeclared(self) -> None:
        waiting = len(self._fds)
        if waiting > FDS_MAX:
            raise ProtocolError(f"{waiting} descriptors wait for a message that declares them; at most {FDS_MAX} may")
        if waiting and not self._reader.held:
            raise ProtocolError(f"no message declares the last {waiting} descriptors: give their number in its 'fds'")

    # ---- what goes out

    def send(self, *messages: Message, fds: int = 0) -> bytes:
        """The bytes of `messages`. The caller sends them in one call, with `fds` descriptors. Only the first message
        may bring descriptors. They travel with the first byte of the call, and the socket may take no more than the
        first message. Raises MessageTooLarge, and then none of them counts as sent, or DaemonUnavailable if the
        connection is closed."""
        if self.closed:
            raise DaemonUnavailable("the connection is closed: connect anew")
        declared_fds = [getattr(message, "fds", 0) for message in messages]
        assert fds == declared_fds[0] == sum(declared_fds) <= FDS_MAX, f"{fds} descriptors given for {messages}"
        packed = [pack(message) for message in messages]
        for message, data in zip(messages, packed, strict=True):
            if len(data) > self._send_bytes_max:
                what, most = f"{type(message).__name__} of {len(data)} bytes", self._send_bytes_max
                raise MessageTooLarge(f"{what}; message_bytes_max is {most}: send smaller messages")
        if self.serving:
            for message in messages:
                self._answered(message)
        return packed[0] if len(packed) == 1 else b"".join(packed)

    # ---- requests and their answers

    def _refusal(self, message: Any) -> LimitReached | None:
        """Why a request that has come to the daemon is not carried out. None: it is, and counts as open. Raises
        ProtocolError if it may not come now."""
        kind, limits = type(message), self._limits
        if issubclass(kind, m.ControlRequest) and (remedy := self._remedy(kind)):
            raise ProtocolError(f"{kind.__name__} on a connection that is {self.state}: {remedy}")
        keys, most = len(getattr(message, "keys", ())), limits.keys_per_request_max
        if keys > most:
            why = f"{kind.__name__} of {keys} keys; keys_per_request_max is {most}: ask in several requests"
            return LimitReached(why)
        if message.answered_by is None:
            return None
        if message.id in self._open:
            raise ProtocolError(f"{kind.__name__} with id {message.id}, which is still open: choose another id")
        if len(self._open) >= limits.requests_in_flight_max:
            most = limits.requests_in_flight_max
            return LimitReached(
                f"{kind.__name__} over requests_in_flight_max, which is {most}: wait for an answer first"
            )
        self._open[message.id] = kind
        return None

    def _remedy(self, kind: type[m.ControlRequest]) -> str:
        """What a client has to do before such a request; empty if it may come now."""
        asked = self._open.values()
        if self.state is ConnectionState.FRESH:
            greets = kind is m.Hello and m.Hello not in asked
            return "" if greets else "send Hello first, and wait for Welcome"
        if kind is m.Hello or (kind is m.Attach and (self.state is ConnectionState.ATTACHED or m.Attach in asked)):
            return "Hello and Attach are sent once; connect anew to attach again"
        if kind.needs_lane and kind is not m.Attach and self.state is not ConnectionState.ATTACHED:
            return "send Attach first, and wait for Attached"
        return ""

    def _answered(self, message: Any) -> None:
        """An answer or a push leaves the daemon."""
        number = id_of(message)
        if number is None or (isinstance(message, m.Claimed) and message.answer == "wait"):
            return
        request = self._open.pop(number, None)
        if isinstance(message, m.Error):
            if request is m.Hello:
                self.state = ConnectionState.CLOSED
        elif request is m.Hello:
            self.state = ConnectionState.GREETED
        elif request is m.Attach:
            self.state = ConnectionState.ATTACHED


def _of_other_socket(name: str) -> BadMessage | None:
    """The error for a message that belongs to the daemon's other socket."""
    if name in CONTROL_REQUESTS:
        here, there = "status socket, which is read-only and", f"control socket, {CONTROL_NAME}"
    elif name in STATUS_REQUESTS:
        here, there = "control socket, which", f"status socket, {STATUS_NAME}"
    else:
        return None
    return BadMessage(
        f"this is the {here} does not accept {name}: connect to the {there} unless it was configured otherwise"
    )
