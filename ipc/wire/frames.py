"""Splits a stream of bytes into frames, a frame into a typed message, and packs messages into bytes.

A message is one MessagePack map and ends where the map ends. A length prefix is not needed.

A message of an unknown type can be answered, and the connection goes on. Any other bad message ends the connection.

Invariants: a decoded message has every field within its range. Nothing is built of a message before it is complete and
within its size. An array's header alone would make a parser allocate memory for all announced items. So an incomplete
message costs at most twice `bytes_max` plus one feed of memory, however the stream is cut into reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgpack
from msgspec import MsgspecError
from msgspec.msgpack import Decoder, Encoder

from ...errors import BadMessage, MessageTooLarge, shown
from ..messages.declared import Kinds
from ..messages.schema import NUMBER_MAX, Message

CONTROL_BYTES_MAX: Final = 65_536
"""The most bytes of an answer on the control socket, and of a request on the status socket."""
DOCUMENT_BYTES_MAX: Final = 16 << 20
"""The most bytes of an answer or push on the status socket."""


def _plain(value: object) -> object:
    """The plain str or bytes for a subclass, such as numpy's scalars, which the encoder does not take."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be part of a message")


_encode = Encoder(enc_hook=_plain).encode
_unpack = Decoder().decode
_FIELD: Final = re.compile(r" - at `\$\.(\w+)")


def pack(message: Message) -> bytes:
    """The bytes of `message` on the wire."""
    return _encode(message)


def unpack(frame: bytes) -> object:
    """The object of a whole message, of any type. Raises BadMessage if the bytes are not MessagePack."""
    try:
        return _unpack(frame)
    except (MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise _bad(error) from None


class FrameReader:
    """Takes the bytes of a stream and returns the bytes of its messages, in order. `held`: the incomplete message."""

    __slots__ = ("_at", "_bytes_max", "_ends", "held")

    def __init__(self, bytes_max: int = CONTROL_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self.held = bytearray()
        self._at = 0  # the position in the stream at which `held` begins
        # Finds the ends of messages by skipping over objects. It builds no object.
        self._ends = msgpack.Unpacker(read_size=4096)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes. Read the iterator to its end before the next feed. Raises
        MessageTooLarge, for a message that is complete or not, or BadMessage if the bytes are no MessagePack. The start
        of the next message is unknown then: feed no more."""
        begin = self._at + len(self.held)  # the position in the stream at which `data` begins
        used = 0
        self._ends.feed(data)
        while used < len(data):
            try:
                self._ends.skip()
            except msgpack.OutOfData:
                break
            except (ValueError, msgpack.UnpackException) as error:
                raise _bad(error) from None
            stop = self._ends.tell() - begin
            frame = bytes(self.held) + data[used:stop]
            self._check(len(frame))
            self.held.clear()
            used, self._at = stop, begin + stop
            yield frame
        self.held += data[used:]
        self._check(len(self.held))

    def _check(self, size: int) -> None:
        if size > self._bytes_max:
            self.held.clear()
            raise MessageTooLarge(
                f"a message of {size} bytes or more; message_bytes_max is {self._bytes_max}: send smaller messages"
            )


def _bad(error: Exception) -> BadMessage:
    texts = {msgpack.FormatError: "a byte that begins no MessagePack type", msgpack.StackError: "nested too deeply"}
    reason = texts.get(type(error)) or str(error) or type(error).__name__
    return BadMessage(f"the received bytes are not a message: {reason}")


class UnknownMessage(BadMessage):
    """A message of the type `name`, which this side does not know. `id` and `fds`: the message's fields of that name,
    None and 0 where they are missing or out of range."""

    def __init__(self, text: str, name: str, id: object, fds: object) -> None:
        super().__init__(text)
        self.name = name
        self.id = id if type(id) is int and 0 <= id <= NUMBER_MAX else None
        self.fds = fds if type(fds) is int and 0 <= fds <= NUMBER_MAX else 0

    @property
    def code(self) -> str:
        return BadMessage.__name__


def decode(frame: bytes, known: Kinds) -> Message:
    """The typed message of one frame. Raises UnknownMessage if its class is not one of `known`, or BadMessage, which
    names field, value and limit."""
    try:
        return known.decode(frame)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(frame, known, error) from None


def _refusal(frame: bytes, known: Kinds, error: Exception) -> BadMessage:
    found = unpack(frame)
    if type(found) is not dict:
        return BadMessage(f"a message is a map with a 'type', got {_shown(found)}")
    name = found.get("type")
    if type(name) is not str:
        return BadMessage(f"the 'type' of a message is a string, got {_shown(name)}")
    if name not in known:
        why = f"unknown message type {_shown(name)}; known here: {', '.join(known)}"
        return UnknownMessage(why, name, found.get("id"), found.get("fds"))
    if isinstance(error, RecursionError):
        return BadMessage(f"{name}: nested too deeply")
    field = _FIELD.search(str(error))
    return BadMessage(f"{name}: {error}" + (f", got {_shown(found.get(field[1]))}" if field else ""))


def _shown(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else shown(value, brief=True)
