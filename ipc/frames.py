"""Framing: splits a stream of bytes into unpacked objects, and packs messages into bytes.

A message is one MessagePack map and ends where the map ends. A length prefix is not needed.

Owns: framing, and the limits on size, lengths and nesting of one message. Does not own the meaning of the objects
(`decode`).

Invariants:
- No object is built before its message is complete. An array's header alone would make a parser allocate memory for
  all announced items. So an incomplete message costs at most twice `message_bytes_max` plus one feed of memory,
  however the stream is cut into reads.
- A reader that has raised an error stays unusable, because the start of the next message is then unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgpack
from msgspec.msgpack import Encoder

from ..errors import BadMessage, MessageTooLarge
from .schema import Message

# The most bytes given to the parser at once. A longer feed is cut, so that the parser's buffer stays small.
_FEED_BYTES: Final = 65_536
_FIRST_BUFFER_BYTES: Final = 4096


def _plain(value: object) -> object:
    """The plain str or bytes for a subclass, such as numpy's scalars, which the encoder does not take."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be part of a message")


_encode = Encoder(enc_hook=_plain).encode


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The limits of one message. `depth_max` counts the map of the message itself as one level."""

    message_bytes_max: int
    text_bytes_max: int
    bin_bytes_max: int
    array_items_max: int
    map_items_max: int
    depth_max: int


CONTROL_FRAMES: Final = FrameLimits(65_536, 16_384, 4096, 4096, 64, 4)
"""Limits of requests and answers on the control socket, and of requests on the status socket."""
DOCUMENT_FRAMES: Final = FrameLimits(16 << 20, 1 << 20, 65_536, 65_536, 65_536, 12)
"""Limits of the daemon's answers and pushes on the status socket."""


def pack(message: Message) -> bytes:
    """The bytes of `message` on the wire."""
    return _encode(message)


class FrameReader:
    """Takes the bytes of a stream and returns its messages as unpacked objects, in order."""

    __slots__ = ("_at", "_ends", "_failed", "_held", "_limits")

    def __init__(self, limits: FrameLimits = CONTROL_FRAMES) -> None:
        self._limits = limits
        self._held = bytearray()  # the bytes of the incomplete message
        self._at = 0  # the position in the stream at which `_held` begins
        self._failed: str | None = None
        # Finds the ends of messages by skipping over objects. It builds no object.
        self._ends = msgpack.Unpacker(
            read_size=_FIRST_BUFFER_BYTES,
            max_buffer_size=limits.message_bytes_max + _FEED_BYTES,
        )

    @property
    def held_bytes(self) -> int:
        """How many bytes of the incomplete message have arrived."""
        return len(self._held)

    def feed(self, data: bytes) -> Iterator[object]:
        """The messages that `data` completes. Read the iterator to its end before the next feed.

        Raises:
            MessageTooLarge: a message, complete or not, is over message_bytes_max.
            BadMessage: the bytes are not MessagePack, or are over another limit.
        """
        if len(data) <= _FEED_BYTES:
            return self._feed(data)
        pieces = (data[at : at + _FEED_BYTES] for at in range(0, len(data), _FEED_BYTES))
        return chain.from_iterable(map(self._feed, pieces))

    def _feed(self, data: bytes) -> Iterator[object]:
        if self._failed is not None:
            raise BadMessage(f"nothing more can be read from this stream after an error: {self._failed}")
        begin = self._at + len(self._held)  # the position in the stream at which `data` begins
        used = 0
        self._ends.feed(data)
        while used < len(data) and self._next_end():
            stop = self._ends.tell() - begin
            if self._held:
                self._held += data[used:stop]
                frame = bytes(self._held)
                self._held.clear()
            else:
                frame = data[used:stop]
            used = stop
            self._at = begin + stop
            yield self._unpack(frame)
        if used < len(data):
            self._held += data[used:]
            if len(self._held) > self._limits.message_bytes_max:
                raise self._too_large(len(self._held))

    def _next_end(self) -> bool:
        try:
            self._ends.skip()
        except msgpack.OutOfData:
            return False
        except (ValueError, msgpack.UnpackException) as error:
            raise self._bad(_reason(error)) from None
        return True

    def _unpack(self, frame: bytes) -> object:
        limits = self._limits
        if len(frame) > limits.message_bytes_max:
            raise self._too_large(len(frame))
        try:
            found = msgpack.unpackb(
                frame,
                max_str_len=limits.text_bytes_max,
                max_bin_len=limits.bin_bytes_max,
                max_array_len=limits.array_items_max,
                max_map_len=limits.map_items_max,
                max_ext_len=0,
                ext_hook=_no_extension,
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise self._bad(_reason(error)) from None
        if _deeper_than(found, limits.depth_max):
            raise self._bad(f"nested deeper than {limits.depth_max} levels")
        return found

    def _bad(self, reason: str) -> BadMessage:
        self._failed = reason
        return BadMessage(f"the received bytes are not a message: {reason}")

    def _too_large(self, size: int) -> MessageTooLarge:
        self._held.clear()
        limit = self._limits.message_bytes_max
        self._failed = f"a message of {size} bytes or more; message_bytes_max is {limit}"
        return MessageTooLarge(f"{self._failed}: send smaller messages")


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} of {len(data)} bytes; only the standard MessagePack types are allowed")


def _reason(error: Exception) -> str:
    if isinstance(error, msgpack.FormatError):
        return "a byte that begins no MessagePack type"
    if isinstance(error, msgpack.StackError):
        return "nested too deeply"
    return str(error) or type(error).__name__


def _deeper_than(found: object, depth: int) -> bool:
    """True if `found` has more than `depth` levels. A loop, because a hostile message could exceed Python's recursion
    limit."""
    level = [found]
    for _ in range(depth):
        inner: list[object] = []
        for item in level:
            if type(item) is dict:
                inner += [v for v in item.values() if type(v) is dict or type(v) is list]
            elif type(item) is list:
                inner += [v for v in item if type(v) is dict or type(v) is list]
        if not inner:
            return False
        level = inner
    return True
