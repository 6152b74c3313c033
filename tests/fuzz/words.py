"""Draws the input of a hostile peer: messages, altered bytes and descriptors of every kind.

The values of fields lie within, at or beyond their limits, or have another type.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgpack
import msgspec
import numpy as np

from tensord.shm.payloads.packing import pack
from tensord.shm.ring.segments import INBOX_SEALS, create_inbox

INBOX_BYTES: Final = 1 << 17
KEYS: Final = [b"fuzzfuzz" + bytes([number]) * 24 for number in range(6)]
TREES: Final[tuple[Any, ...]] = (
    np.arange(24),
    {"ids": [*range(100)], "times": (0.5,) * 70, "text": "x" * 300, "rest": [None, True, -1, 1 << 63, b"k"]},
    [np.zeros((2, 3), np.float32), {"a": (), "b": [[]]}],
    ["x" * 60] * 1500,  # its header is a leaf
)
"""Of every kind of node and header that a payload may have."""
_INTEGERS: Final = (0, 1, 2, 7, 63, 64, 4095, 4096, 65_535, 65_536, 1 << 20, 1 << 31, 1 << 47, 1 << 48, (1 << 63) - 1)
_BEYOND: Final = (-1, -(1 << 63), 1 << 63, (1 << 64) - 1)
_FLOATS: Final = (0.0, -0.0, 1e-9, 0.5, 1.0, 30.0, 1e9, 1e300, -1.0, float("nan"), float("inf"), float("-inf"))

Info = msgspec.inspect.Type


def message(chance: random.Random, kind: type[Any]) -> dict[str, Any]:
    """A message of `kind` in its wire form. Most fields are valid; some are missing or unknown."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    said: dict[str, Any] = {"type": kind.__name__}
    for field in info.fields:
        if chance.random() < 0.04 or (not field.required and chance.random() < 0.3):
            continue
        said[field.encode_name] = value(chance, field.type)
    if chance.random() < 0.03:
        said["other"] = anything(chance)
    return said


def value(chance: random.Random, info: Info) -> Any:
    """A value for a field, in most cases a valid one."""
    if chance.random() < 0.04:
        return anything(chance)
    match info:
        case msgspec.inspect.IntType(ge=least, le=most):
            low, high = least or 0, most if most is not None else (1 << 63) - 1
            within = [number for number in _INTEGERS if low <= number <= high]
            choices = [low, high, chance.randint(low, min(high, low + 20)), *within]
            return chance.choice([*choices, *_BEYOND] if chance.random() < 0.1 else choices)
        case msgspec.inspect.FloatType():
            return chance.choice(_FLOATS)
        case msgspec.inspect.BoolType():
            return chance.random() < 0.5
        case msgspec.inspect.BytesType(min_length=least, max_length=most):
            if least == 32 and chance.random() < 0.9:
                return chance.choice(KEYS)
            if least == 8 and chance.random() < 0.9:
                return b"fuzzfuzz"
            return chance.randbytes(least or min(most or 16, 16))
        case msgspec.inspect.StrType(min_length=least, max_length=most):
            return chance.choice(["", "a", "host", "card", "w", "é" * 40, "x" * min(most or 64, 200), "a\0b"])
        case msgspec.inspect.ListType(item_type=item, max_length=most):
            return [value(chance, item) for _ in range(chance.choice([0, 1, 1, 2, 5, min(most or 9, 9)]))]
        case msgspec.inspect.UnionType(types=types):
            return value(chance, chance.choice(types))
        case msgspec.inspect.LiteralType(values=values):
            return chance.choice(values)
        case msgspec.inspect.EnumType(cls=cls):
            return chance.choice([each.value for each in cls])
        case msgspec.inspect.StructType(fields=fields):
            return {field.encode_name: value(chance, field.type) for field in fields if chance.random() < 0.95}
        case _:
            return None


def anything(chance: random.Random, depth: int = 0) -> Any:
    simple = [None, True, chance.choice([*_INTEGERS, *_BEYOND]), chance.choice(_FLOATS), chance.randbytes(9), "text"]
    if depth > 2:
        return chance.choice(simple)
    inner = anything(chance, depth + 1)
    return chance.choice([*simple, [inner] * 3, {"a": inner}, {1: inner}])


def packed(chance: random.Random, said: Any) -> bytes:
    """The packed message. Now and then some bytes are changed, removed or duplicated."""
    data = bytearray(msgpack.packb(said))
    while data and chance.random() < 0.08:
        at = chance.randrange(len(data))
        match chance.randrange(3):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.randrange(1, 9)]
            case _:
                data[at:at] = data[at : at + 16]
    return bytes(data)


def conversation(chance: random.Random, requests: Sequence[type[Any]]) -> list[Any]:
    return [message(chance, chance.choice(requests)) for _ in range(chance.randrange(1, 10))]


def stored_tree(chance: random.Random) -> tuple[bytes, int]:
    """A payload of at most INBOX_BYTES, and the length of its header. Often its header is altered, or drawn anew."""
    payload = pack(chance.choice(TREES))
    written = np.zeros(payload.payload_bytes, np.uint8)
    payload.write(written.data, 0)
    header_bytes = len(payload.header)
    if chance.random() < 0.3:
        drawn = b"\x01" + b"".join(
            msgpack.packb(chance.choice([chance.randrange(14), "<i8", "<f4", "k", None, 0.5, 1 << 47]))
            for _ in range(chance.choice([3, 30, 8000]))
        )
        # A long header is the first leaf.
        at = 64 if header_bytes == 7 and chance.random() < 0.7 else 0
        drawn = drawn[: len(written) - at]
        written[at : at + len(drawn)] = np.frombuffer(drawn, np.uint8)
        header_bytes = header_bytes if at else len(drawn)
    while chance.random() < 0.3:
        written[chance.choice([chance.randrange(min(200, len(written))), chance.randrange(len(written))])] ^= 1 << (
            chance.randrange(8)
        )
    return written.tobytes(), header_bytes


@contextmanager
def descriptor(chance: random.Random, inbox: bytes = b"") -> Iterator[int]:
    """A descriptor, in most cases of a valid inbox that holds `inbox`, else of any other kind."""
    opened: list[int] = []
    kept: list[socket.socket] = []
    kind = chance.choice(["inbox", "inbox", "inbox", "unsealed", "short", "null", "zero", "folder", "pipe", "socket"])
    try:
        match kind:
            case "inbox" | "short":
                fd = create_inbox(INBOX_BYTES if kind == "inbox" else chance.choice([0, 1, 4096]))
                os.pwrite(fd, inbox[: os.fstat(fd).st_size], 0)
            case "unsealed":
                fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
                os.ftruncate(fd, INBOX_BYTES)
                seals = chance.choice([0, fcntl.F_SEAL_GROW, INBOX_SEALS & ~fcntl.F_SEAL_SEAL])
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            case "pipe":
                fd, other = os.pipe()
                opened.append(other)
            case "socket":
                ours, theirs = socket.socketpair()
                kept += [ours, theirs]
                fd = os.dup(ours.fileno())
            case _:
                fd = os.open({"null": "/dev/null", "zero": "/dev/zero", "folder": "/"}[kind], os.O_RDONLY)
        opened.append(fd)
        yield fd
    finally:
        for each in opened:
            os.close(each)
        for sock in kept:
            sock.close()
