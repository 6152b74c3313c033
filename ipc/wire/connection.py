"""The protocol of one connection, without I/O: which messages are allowed now, and which descriptors belong to them.

Owns: the open requests, and the descriptors that arrived before the message that declares them. Does not own the tables
of states (`states`), the socket (`channel`, `blocking`), nor the effect of a request.

Invariants: a descriptor given to `receive_data` comes back exactly once: with its message, in `Arrival.discarded`, or
from `close`. After a failure the connection is CLOSED and accepts nothing. A message whose descriptors this process
could not open has no effect: a server refuses it, and a client gets an Error in its place. The connection goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...errors import (
    BadMessage,
    DaemonUnavailable,
    LimitReached,
    MessageTooLarge,
    ProcessLimit,
    ProtocolError,
    UsageError,
    VersionMismatch,
)
from ..messages import control as m
from ..messages.declared import id_of
from ..messages.schema import PROTOCOL_VERSION, ClientLimits, Message
from .frames import CONTROL_BYTES_MAX, DOCUMENT_BYTES_MAX, FrameReader, UnknownMessage, decode, pack, unpack
from .states import (
    ANSWERED_BY,
    CONTROL_ALLOWED,
    CONTROL_ANSWERS,
    CONTROL_REQUESTS,
    MOVES,
    MOVES_WHEN_REFUSED,
    OTHER_SOCKET,
    PUSHES,
    REMEDIES,
    STATUS_ALLOWED,
    STATUS_ANSWERS,
    STATUS_REQUESTS,
    ConnectionState,
    Kind,
)

FDS_MAX: Final = 8
"""The most descriptors that may wait for the message that declares them, and the most in one sendmsg call."""

Cut = ProtocolError | ProcessLimit | None
"""The error of a read that lost descriptors: ProcessLimit if this process could not open them."""
_LOST: Final = -1
"""In the place of the descriptors of one call that this process could not open."""
Delivery = tuple[Any, tuple[int, ...]]
"""A message and its descriptors. The receiver of the message owns the descriptors."""


@dataclass(slots=True)
class Arrival:
    """The result of one read. `messages` are valid even if a later message in the same read was the failure."""

    messages: list[Delivery] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)  # descriptors that the caller closes
    replies: bytearray = field(default_factory=bytearray)  # bytes to send to the peer before anything else
    failure: ProtocolError | None = None  # if set, the connection is CLOSED: send `replies`, then close the socket


class Connection:
    """The protocol of one side of one socket. Create it with one of the four class methods."""

    def __init__(self, *, serving: bool, control: bool, limits: ClientLimits) -> None:
        self.state = ConnectionState.FRESH
        self.serving = serving
        self.limits = limits
        self._allowed = CONTROL_ALLOWED if control else STATUS_ALLOWED
        if serving:
            self._known = CONTROL_REQUESTS if control else STATUS_REQUESTS
        else:
            self._known = CONTROL_ANSWERS if control else STATUS_ANSWERS
        if control:
            received, sent = limits.message_bytes_max if serving else CONTROL_BYTES_MAX, CONTROL_BYTES_MAX
        else:
            received, sent = CONTROL_BYTES_MAX, DOCUMENT_BYTES_MAX
            if not serving:
                received, sent = sent, received
        self._reader = FrameReader(received)
        self._send_bytes_max = sent
        self._open: dict[int, Kind] = {}  # unanswered requests by id
        self._watched = False  # a Watch came, so that Events are allowed
        self._fds: deque[int] = deque()
        self._limit: ProcessLimit | None = None  # why descriptors were lost

    @classmethod
    def control_server(cls, limits: ClientLimits) -> Connection:
        return cls(serving=True, control=True, limits=limits)

    @classmethod
    def control_client(cls) -> Connection:
        """`limits` are the defaults until Welcome brings the daemon's limits."""
        return cls(serving=False, control=True, limits=ClientLimits())

    @classmethod
    def status_server(cls, limits: ClientLimits) -> Connection:
        return cls(serving=True, control=False, limits=limits)

    @classmethod
    def status_client(cls) -> Connection:
        return cls(serving=False, control=False, limits=ClientLimits())

    @property
    def closed(self) -> bool:
        return self.state is ConnectionState.CLOSED

    @property
    def held_bytes(self) -> int:
        return self._reader.held_bytes

    # ---- what comes in

    def receive_data(self, data: bytes, fds: Sequence[int] = (), cut: Cut = None) -> Arrival:
        """Processes the result of one read. `cut`: the error of a read that lost descriptors.

        An error of the peer is not raised: it is in `Arrival.failure`.
        """
        arrival = Arrival()
        self._fds.extend(fds)
        if isinstance(cut, ProcessLimit):
            self._fds.append(_LOST)
            self._limit, cut = cut, None
        if self.state is not ConnectionState.CLOSED:
            self._read(data, cut, arrival)
        if self.state is ConnectionState.CLOSED:
            arrival.discarded += self.close()
        return arrival

    def _read(self, data: bytes, cut: ProtocolError | None, arrival: Arrival) -> None:
        try:
            for frame in self._reader.feed(data):
                self._take(frame, arrival)
            self._refuse_undeclared()
            if cut is not None:
                raise cut
        except ProtocolError as failure:
            self._fail(failure, arrival)

    def _fail(self, failure: ProtocolError, arrival: Arrival) -> None:
        """Ends the connection for an error of the peer. A server sends the peer the error."""
        arrival.failure = failure
        arrival.discarded += self.close()
        if self.serving:
            arrival.replies += pack(m.Error.of(failure))

    def close(self) -> list[int]:
        """Ends the connection. Returns the descriptors that no message has taken; the caller closes them."""
        self.state = ConnectionState.CLOSED
        left = [fd for fd in self._fds if fd != _LOST]
        self._fds.clear()
        return left

    def _take(self, frame: bytes, arrival: Arrival) -> None:
        if self.state in (ConnectionState.FRESH, ConnectionState.GREETING):
            self._check_version(unpack(frame))
        try:
            message = decode(frame, self._known)
        except UnknownMessage as unknown:
            fds = self._fds_for("a message of unknown type", unknown.fds)
            arrival.discarded += [fd for fd in fds if fd != _LOST]
            if self.serving:
                elsewhere = OTHER_SOCKET.get(unknown.name)
                arrival.replies += pack(m.Error.of(BadMessage(elsewhere) if elsewhere else unknown, unknown.id))
            return
        kind = type(message)
        fds = self._fds_for(kind.__name__, getattr(message, "fds", 0))
        if _LOST in fds:
            arrival.discarded += fds[:-1]
            self._replace(message, arrival)
            return
        try:
            if not self.serving:
                self._answer(message)
            elif (refusal := self._refusal(message)) is not None:
                arrival.discarded += fds
                number = id_of(message)
                if number is not None:  # an Error without an id would end the connection
                    arrival.replies += pack(m.Error.of(refusal, number))
                return
            else:
                self._request(message)
        except ProtocolError:
            arrival.discarded += fds
            raise
        if isinstance(message, m.Welcome):
            self.limits = message.limits
            self._send_bytes_max = message.limits.message_bytes_max
        arrival.messages.append((message, fds))

    def _check_version(self, found: object) -> None:
        """Raises VersionMismatch. Called before the fields are decoded: another version may have other fields."""
        if type(found) is not dict or found.get("type") != ("Hello" if self.serving else "Welcome"):
            return
        theirs = found.get("protocol")
        if type(theirs) is not int or theirs == PROTOCOL_VERSION:
            return
        peer, here = ("client", "daemon") if self.serving else ("daemon", "client")
        raise VersionMismatch(
            f"the {peer} speaks protocol version {theirs}, this {here} {PROTOCOL_VERSION}: "
            "install the same release of tensord on both sides"
        )

    def _fds_for(self, name: str, count: int) -> tuple[int, ...]:
        """The descriptors of a message. If some of them were lost, the last one is _LOST."""
        there = list(self._fds)[:count]
        if _LOST in there:
            there = there[: there.index(_LOST) + 1]
        elif count > len(there):
            raise ProtocolError(
                f"{name} declares {count} descriptors, {len(there)} came with it: send them in the same "
                "sendmsg call as the message's first byte"
            )
        return tuple(self._fds.popleft() for _ in there)

    def _replace(self, message: Any, arrival: Arrival) -> None:
        """Answers a request whose descriptors were lost, or replaces such an answer, with an Error."""
        if self.serving:
            arrival.replies += pack(m.Error.of(LimitReached(f"the daemon refuses it: {self._limit}"), message.id))
            return
        error = m.Error.of(self._limit or ProcessLimit(), message.id)
        self._answer(error)
        arrival.messages.append((error, ()))

    def _refuse_undeclared(self) -> None:
        waiting = len(self._fds)
        if waiting > FDS_MAX:
            raise ProtocolError(f"{waiting} descriptors wait for a message that declares them; at most {FDS_MAX} may")
        if waiting and not self._reader.held_bytes:
            raise ProtocolError(f"no message declares the last {waiting} descriptors: give their number in its 'fds'")

    # ---- what goes out

    def send(self, *messages: Message, fds: int = 0) -> bytes:
        """The bytes of `messages`. The caller sends them in one call, with `fds` descriptors.

        Only the first message may bring descriptors.

        Raises:
            UsageError: a message is not allowed in this state, or the descriptors are not the declared ones.
            LimitReached, MessageTooLarge: a message is over a limit.
            DaemonUnavailable: the connection is closed.
        """
        if self.state is ConnectionState.CLOSED:
            raise DaemonUnavailable(f"the connection is closed: {REMEDIES[self.state]}")
        declared = 0
        packed: list[bytes] = []
        for message in messages:
            data = pack(message)
            if len(data) > self._send_bytes_max:
                raise MessageTooLarge(
                    f"{type(message).__name__} of {len(data)} bytes; message_bytes_max is "
                    f"{self._send_bytes_max}: send smaller messages"
                )
            brings = getattr(message, "fds", 0)
            if brings and packed:
                # The socket may take only the first of two messages. The descriptors travel with the first byte of
                # the call, and would wait at the receiver for a message that has not begun to arrive.
                raise UsageError(f"{type(message).__name__} brings descriptors: send it first in its call")
            packed.append(data)
            declared += brings
        if declared != fds or fds > FDS_MAX:
            raise UsageError(f"{fds} descriptors given, {declared} declared; {FDS_MAX} may go in one call")
        allowed = 0
        try:
            for message in messages:
                if self.serving:
                    self._answer(message)
                elif (refusal := self._refusal(message)) is not None:
                    raise refusal
                else:
                    self._request(message)
                allowed += 1
        except (ProtocolError, LimitReached) as error:
            self.revert_send(*messages[:allowed])
            if isinstance(error, LimitReached):
                raise
            raise UsageError(str(error)) from None
        return packed[0] if len(packed) == 1 else b"".join(packed)

    def revert_send(self, *messages: Message) -> None:
        """Reverts a `send` whose bytes were never written: its requests are no longer open. Not for Hello and Attach,
        which change the state."""
        for message in reversed(messages):
            if type(message) in ANSWERED_BY:
                self._open.pop(getattr(message, "id"), None)  # noqa: B009

    # ---- both directions

    def _refusal(self, message: Message) -> LimitReached | None:
        most = self.limits.keys_per_request_max
        keys = getattr(message, "keys", ())
        if len(keys) <= most:
            return None
        return LimitReached(
            f"{type(message).__name__} of {len(keys)} keys; keys_per_request_max is {most}: ask in several requests"
        )

    def _request(self, message: Any) -> None:
        kind = type(message)
        if kind not in self._allowed[self.state]:
            raise ProtocolError(f"{kind.__name__} on a connection that is {self.state}: {REMEDIES[self.state]}")
        if kind not in ANSWERED_BY:
            return
        number = message.id
        if number in self._open:
            raise ProtocolError(f"{kind.__name__} with id {number}, which is still open: choose another id")
        self._check_in_flight(kind)
        self._open[number] = kind
        self._watched |= kind is m.Watch
        self.state = MOVES.get((self.state, kind), self.state)

    def _check_in_flight(self, kind: Kind) -> None:
        most = self.limits.requests_in_flight_max
        if len(self._open) < most:
            return
        text = f"{kind.__name__} over requests_in_flight_max, which is {most}: wait for an answer first"
        raise ProtocolError(text) if self.serving else LimitReached(text)

    def _answer(self, message: Any) -> None:
        kind = type(message)
        if kind in PUSHES:
            if kind is m.Event and not self._watched:
                raise ProtocolError("Event to a connection that sent no Watch")
            return
        number = message.id
        request = self._open.get(number)
        if kind is m.Error:
            if request is not None:
                del self._open[number]
                self.state = MOVES_WHEN_REFUSED.get(request, self.state)
            return
        if request is None:
            raise ProtocolError(f"{kind.__name__} answers request {number}, which is not open")
        if kind is not ANSWERED_BY[request]:
            raise ProtocolError(f"{kind.__name__} does not answer {request.__name__} ({number})")
        if kind is m.Claimed and message.answer == "wait":
            return
        del self._open[number]
        self.state = MOVES.get((self.state, kind), self.state)

    def check_invariants(self) -> None:
        assert self.state is not ConnectionState.CLOSED or not self._fds
        assert len(self._fds) <= FDS_MAX
