"""Every message crosses the socket unchanged, and nothing out of its range is taken for one."""

from __future__ import annotations

from typing import Any

import hypothesis
import msgpack
import msgspec.inspect as mi
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord import errors
from tensord.errors import BadMessage
from tensord.ipc.messages import control as m
from tensord.ipc.messages.control import ErrorBody, Message
from tensord.ipc.messages.declared import handlers
from tensord.ipc.wire.connection import CONTROL_ANSWERS, CONTROL_REQUESTS, STATUS_ANSWERS, STATUS_REQUESTS
from tensord.ipc.wire.frames import UnknownMessage, decode, pack

from .examples import example, fields_of, smallest

TABLES = [CONTROL_REQUESTS, CONTROL_ANSWERS, STATUS_REQUESTS, STATUS_ANSWERS]
PAIRS = [(kind, known) for known in TABLES for kind in known.values()]


def bounded(info: mi.Type) -> bool:
    """Whether a declared type has bounds, which msgspec checks."""
    match info:
        case mi.IntType(ge=least, le=most):
            return least is not None and most is not None
        case mi.FloatType(le=most):
            return most is not None
        case mi.BytesType(max_length=most) | mi.StrType(max_length=most):
            return most is not None
        case mi.ListType(max_length=most) | mi.VarTupleType(max_length=most):
            return most is not None and bounded(info.item_type)
        case mi.TupleType(item_types=types) | mi.UnionType(types=types):
            return all(map(bounded, types))
        case mi.StructType(fields=fields):
            return all(bounded(field.type) for field in fields)
    return isinstance(info, mi.BoolType | mi.NoneType | mi.LiteralType | mi.EnumType | mi.DictType)


def decoded(found: object, known: Any) -> Message:
    return decode(msgpack.packb(found), known)


@pytest.mark.parametrize(("kind", "known"), PAIRS)
def test_a_message_arrives_as_it_was_sent_and_a_field_that_is_missing_or_of_another_type_is_named(
    kind: type[Message], known: Any
) -> None:
    sent = smallest(kind)
    assert msgpack.unpackb(pack(sent))["type"] == kind.__name__
    assert decode(pack(sent), known) == sent
    good = {f.name: example(f.type) for f in fields_of(kind)} | {"type": kind.__name__}
    assert isinstance(decoded(good, known), kind)
    for field in fields_of(kind):
        assert bounded(field.type), f"{kind.__name__}.{field.name} has no bounds"
        with pytest.raises(BadMessage, match=rf"^{kind.__name__}: .*`\$\.{field.encode_name}\b"):
            decoded(good | {field.encode_name: {1: 2}}, known)
        if field.required:
            lacking = {name: value for name, value in good.items() if name != field.name}
            with pytest.raises(BadMessage, match=field.name):
                decoded(lacking, known)


def test_unknown_fields_are_ignored() -> None:
    found = {"type": "Done", "id": 3, "since": "later version", "more": [{}]}
    assert decoded(found, CONTROL_ANSWERS) == m.Done(3)


def test_an_unknown_type_is_told_apart_from_a_bad_message() -> None:
    with pytest.raises(UnknownMessage, match=r"'Frobnicate'.*AskForGrants") as caught:
        decoded({"type": "Frobnicate", "id": 7, "fds": 2}, CONTROL_REQUESTS)
    assert (caught.value.id, caught.value.fds, caught.value.code) == (7, 2, "BadMessage")


@pytest.mark.parametrize("found", [None, 1, "x", b"x", [], [{}], {}, {"type": 1}, {b"type": b"x"}])
def test_an_object_that_is_not_a_message_is_refused(found: object) -> None:
    with pytest.raises(BadMessage, match="'type'"):
        decoded(found, CONTROL_REQUESTS)


@pytest.mark.parametrize("kind", sorted(errors._BY_CODE.values(), key=str))
def test_an_error_is_raised_as_the_same_type_on_the_other_side(kind: type[errors.TensordError]) -> None:
    sent = kind("so and so, at most 3")
    for body in (ErrorBody.of(sent), m.Error.of(sent, 4)):
        found = body.to_error()
        assert type(found) is kind
        assert str(found) == str(sent)


@hypothesis.example("/no/\udcff/such")
@given(st.text(max_size=30) | st.integers(1990, 2100).map(lambda n: "é" * n))
def test_any_text_of_an_error_can_cross(text: str) -> None:
    sent = m.Error.of(BadMessage(text))
    assert decode(pack(sent), CONTROL_ANSWERS) == sent
    assert len(sent.text) <= 2000


def test_a_message_without_a_handler_is_named() -> None:
    with pytest.raises(TypeError, match="HealthQuery is declared as a DaemonQuery, and nothing here handles it"):
        handlers(m.DaemonQuery, {m.StatusQuery: "store"})
