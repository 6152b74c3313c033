"""One connection to a Valkey or Redis server, with replies that are read straight into the caller's memory.

redis-py makes the connection: TCP, TLS, credentials, the database. Its parsers return a reply as new bytes, which takes
a second copy and, for large payloads, most of the time of a read. So the replies are read here, from the connection's
socket.

Owns: sending commands, and reading replies, by a deadline. Does not own: which command goes to which server
(`valkey_nodes`).

Invariant: the parser of redis-py reads nothing once the connection is made, so it holds no byte of a later reply.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ...errors import TierUnavailable
from .form import Buffer
from .store import timed_out

_SCRATCH_BYTES: Final = 4096
_LINE_BYTES_MAX: Final = 64 << 10
_JOINED_BYTES_MAX: Final = 16 << 10
_SENT_BYTES_MAX: Final = 4 << 20
_END: Final = b"\r\n"


class ServerError(NamedTuple):
    """An error that a server has answered with: its first word, such as "OOM", and all of it."""

    code: str
    text: str


class ValkeyWire:
    """`connection`: one of redis-py that is connected. `address` is its server's, for messages."""

    def __init__(self, connection: Any, address: str) -> None:
        self.address = address
        self._connection = connection
        # redis-py has no public name for it.
        self._socket: socket.socket = connection._sock
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._held = self._scratch[:0]

    def close(self) -> None:
        self._connection.disconnect()

    @property
    def usable(self) -> bool:
        """False if the server has ended the idle connection, or has sent something that nobody has asked for."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not self._held and not poll.poll(0)

    def send(self, pieces: Sequence[Buffer], deadline: float) -> None:
        """Sends commands, as `command` has packed them. Small pieces are sent together."""
        joined = bytearray()
        for piece in pieces:
            if len(joined) + len(piece) <= _JOINED_BYTES_MAX:
                joined += piece
                continue
            self._send(memoryview(joined), deadline)
            joined = bytearray()
            if len(piece) <= _JOINED_BYTES_MAX:
                joined += piece
            else:
                self._send(memoryview(piece), deadline)
        self._send(memoryview(joined), deadline)

    def answer(self, deadline: float) -> Any:
        """A short reply: a text or short bytes as bytes, a number, a list of these, None, or the server's error."""
        kind, rest = self._line(deadline)
        match kind:
            case b"+":
                return rest
            case b"-":
                return _error(rest)
            case b":":
                return self._number(rest)
        length = self._number(rest)
        if length < 0:
            return None
        if kind == b"*":
            return [self.answer(deadline) for _ in range(length)]
        if kind != b"$" or length > _SCRATCH_BYTES:
            raise self._foreign(kind + rest)
        text = memoryview(bytearray(length))
        self._read(text, deadline)
        self._end(deadline)
        return bytes(text)

    def payload(self, into: memoryview, deadline: float) -> int | ServerError | None:
        """Reads a payload to the start of `into`; its length. A payload that is longer than `into` is read to its end
        and dropped; only its length is returned. None if there is none."""
        kind, rest = self._line(deadline)
        if kind == b"-":
            return _error(rest)
        if kind != b"$":
            raise self._foreign(kind + rest)
        length = self._number(rest)
        if length < 0:
            return None
        if length <= len(into):
            self._read(into[:length], deadline)
        else:
            self._skip(length, deadline)
        self._end(deadline)
        return length

    def _send(self, piece: memoryview, deadline: float) -> None:
        while piece:
            self._socket.settimeout(self._left_s(deadline))
            try:
                piece = piece[self._socket.send(piece[:_SENT_BYTES_MAX]) :]
            except OSError as error:
                raise self._failed(error) from None

    def _line(self, deadline: float) -> tuple[bytes, bytes]:
        """The next line: its first byte, and the rest."""
        line = b""
        while True:
            if not self._held:
                self._held = self._scratch[: self._receive(self._scratch, deadline)]
            line += self._held
            end = line.find(b"\r\n")
            if end >= 0:
                self._held = self._held[len(self._held) - (len(line) - end - 2) :]
                return line[:1], line[1:end]
            if len(line) > _LINE_BYTES_MAX or line[:1] not in b"+-:$*":
                raise self._foreign(line)
            self._held = self._scratch[:0]

    def _read(self, into: memoryview, deadline: float) -> None:
        """Fills `into`."""
        at = min(len(into), len(self._held))
        into[:at] = self._held[:at]
        self._held = self._held[at:]
        while at < len(into):
            at += self._receive(into[at:], deadline)

    def _skip(self, size_bytes: int, deadline: float) -> None:
        at = min(size_bytes, len(self._held))
        self._held = self._held[at:]
        while at < size_bytes:
            at += self._receive(self._scratch[: size_bytes - at], deadline)

    def _end(self, deadline: float) -> None:
        """Reads what ends a text."""
        end = bytearray(len(_END))
        self._read(memoryview(end), deadline)
        if end != _END:
            raise self._foreign(bytes(end))

    def _receive(self, into: memoryview, deadline: float) -> int:
        self._socket.settimeout(self._left_s(deadline))
        try:
            received = self._socket.recv_into(into)
        except OSError as error:
            raise self._failed(error) from None
        if not received:
            raise TierUnavailable(
                f"{self.address} has ended the connection: it was stopped or restarted, or its port expects TLS "
                "(rediss://)"
            )
        return received

    def _left_s(self, deadline: float) -> float:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise timed_out(self.address)
        return left_s

    def _number(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._foreign(text) from None

    def _foreign(self, text: bytes) -> TierUnavailable:
        return TierUnavailable(
            f"{self.address} has sent {text[:40]!r}, which is no reply of a Valkey server; is that its port?"
        )

    def _failed(self, error: OSError) -> TierUnavailable:
        if isinstance(error, TimeoutError):
            return timed_out(self.address)
        return TierUnavailable(f"the connection to {self.address} has failed: {error}")


def command(*words: Buffer | int) -> list[Buffer]:
    """A command as the pieces to send. Payloads are not copied."""
    pieces: list[Buffer] = [b"*%d\r\n" % len(words)]
    for word in words:
        text = b"%d" % word if isinstance(word, int) else word
        pieces += (b"$%d\r\n" % len(text), text, b"\r\n")
    return pieces


def _error(line: bytes) -> ServerError:
    text = "".join(each if each.isascii() and each.isprintable() else "?" for each in line.decode("latin-1"))
    return ServerError(text.partition(" ")[0], text)
