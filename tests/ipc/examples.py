"""The smallest valid message of each kind, from its declaration, and connections past the handshake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as mi

from tensord.ipc.messages import control as m
from tensord.ipc.messages.control import PROTOCOL_VERSION, ClientLimits
from tensord.ipc.messages.schema import Message
from tensord.ipc.wire.connection import Arrival, Connection

LIMITS = ClientLimits(requests_in_flight_max=100_000)
HELLO = m.Hello(1, PROTOCOL_VERSION, "test", 42, True)
ATTACHED = m.Attached(2, 1, 0, 4096, 4096)
STEPS = ("fresh", "greeting", "greeted", "attaching", "attached")
"""How far a connection can have come."""


def welcome(limits: ClientLimits = LIMITS) -> m.Welcome:
    return m.Welcome(1, PROTOCOL_VERSION, "0.1", "i", 1, limits)


class Pair(NamedTuple):
    """A server's and a client's connection, each fed with what the other sends."""

    server: Connection
    client: Connection

    @classmethod
    def at(cls, step: str, limits: ClientLimits = LIMITS) -> Pair:
        pair = cls(Connection.control_server(limits), Connection.control_client())
        steps: tuple[Callable[[], Arrival], ...] = (
            lambda: pair.ask(HELLO),
            lambda: pair.answer(welcome(limits)),
            lambda: pair.ask(m.Attach(2)),
            lambda: pair.answer(ATTACHED, fds=(7, 8, 9)),
        )
        for go in steps[: STEPS.index(step)]:
            go()
        return pair

    def ask(self, *messages: Message, fds: tuple[int, ...] = ()) -> Arrival:
        return self.server.receive_data(self.client.send(*messages, fds=len(fds)), fds)

    def answer(self, *messages: Message, fds: tuple[int, ...] = ()) -> Arrival:
        return self.client.receive_data(self.server.send(*messages, fds=len(fds)), fds)


def fields_of(kind: type[Any]) -> tuple[mi.Field, ...]:
    info = mi.type_info(kind)
    assert isinstance(info, mi.StructType)
    return info.fields


def example(info: mi.Type) -> object:
    """The smallest thing a field may hold, as it looks unpacked."""
    match info:
        case mi.IntType():
            return info.ge
        case mi.FloatType():
            return 1.5
        case mi.BytesType():
            return b"k" * (info.min_length or 0)
        case mi.StrType():
            return "name"
        case mi.BoolType():
            return True
        case mi.LiteralType():
            return info.values[0]
        case mi.EnumType():
            return next(iter(info.cls)).value
        case mi.NoneType():
            return None
        case mi.ListType() | mi.VarTupleType():
            return [example(info.item_type)]
        case mi.TupleType():
            return [*map(example, info.item_types)]
        case mi.UnionType():
            return example(info.types[0])
        case mi.StructType():
            return {f.encode_name: example(f.type) for f in info.fields}
    return {}


def smallest(kind: type[Message], **fields: Any) -> Any:
    found = {field.encode_name: example(field.type) for field in fields_of(kind)} | {"type": kind.__name__}
    return msgspec.convert(found | fields, kind)
