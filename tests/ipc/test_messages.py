"""Every message crosses the socket unchanged, and nothing out of its range is taken for one."""

from __future__ import annotations

import base64
import math
from typing import Any

import hypothesis
import msgpack
import msgspec.inspect as mi
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord import errors
from tensord.errors import BadMessage
from tensord.ipc.messages import control as m
from tensord.ipc.messages.control import ErrorBody, Message
from tensord.ipc.wire.connection import CONTROL_ANSWERS, CONTROL_REQUESTS, STATUS_ANSWERS, STATUS_REQUESTS
from tensord.ipc.wire.frames import UnknownMessage, decode, pack

from .examples import example, fields_of

TABLES = [CONTROL_REQUESTS, CONTROL_ANSWERS, STATUS_REQUESTS, STATUS_ANSWERS]
PAIRS = [(kind, known) for known in TABLES for kind in known.values()]


def strategy(info: mi.Type) -> st.SearchStrategy[Any]:
    """What a field may hold, from its declared type."""
    match info:
        case mi.IntType():
            return st.integers(info.ge, info.le)
        case mi.FloatType():
            low = info.gt if info.gt is not None else info.ge
            return st.floats(low, info.le, exclude_min=info.gt is not None, allow_nan=False)
        case mi.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=info.max_length)
        case mi.StrType():
            size = info.max_length or 0
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=min(size, 20)).map(
                lambda text: text or "x"
            )
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.LiteralType():
            return st.sampled_from(info.values)
        case mi.EnumType():
            return st.sampled_from(list(info.cls))
        case mi.ListType() | mi.VarTupleType():
            lists = st.lists(strategy(info.item_type), min_size=info.min_length or 0, max_size=5)
            return lists.map(tuple) if isinstance(info, mi.VarTupleType) else lists
        case mi.TupleType():
            return st.tuples(*map(strategy, info.item_types))
        case mi.DictType():
            scalars = st.integers(-(2**63), 2**64 - 1) | st.text("ab", max_size=9) | st.booleans()
            return st.dictionaries(st.text("xyz", max_size=5), scalars | st.lists(scalars))
        case mi.UnionType():
            return st.one_of([strategy(one) for one in info.types])
        case mi.StructType():
            return st.builds(info.cls, **{f.name: strategy(f.type) for f in info.fields})
    raise AssertionError(f"no strategy for {info}")


def violations(info: mi.Type) -> list[object]:
    """Values just outside of a declared type."""
    match info:
        case mi.IntType():
            assert info.ge is not None
            assert info.le is not None
            return [info.ge - 1, info.le + 1, True, 0.5, "1", None]
        case mi.FloatType():
            assert info.le is not None
            low = [0.0, -0.0] if info.gt is not None else []
            return [*low, -1e-9, info.le * 2, math.nan, math.inf, -math.inf, "1", True]
        case mi.BytesType():
            assert info.min_length is not None
            assert info.max_length is not None
            # Text that would be of the right length once decoded as base64 is no key either.
            text = base64.b64encode(b"x" * info.min_length).decode()
            return [b"x" * (info.min_length - 1), b"x" * (info.max_length + 1), text, 1]
        case mi.StrType():
            assert info.max_length is not None
            return ["x" * (info.max_length + 1), *([""] if info.min_length else []), b"x", 1]
        case mi.BoolType():
            return [0, 1, None, "true"]
        case mi.LiteralType():
            return ["other", "", None, 0]
        case mi.EnumType():
            return ["other", "", "RELAXED", None, 0]
        case mi.ListType() | mi.VarTupleType():
            assert info.max_length is not None
            inner = [[bad] for bad in violations(info.item_type)]
            short: list[object] = [[]] if info.min_length else []
            return [[example(info.item_type)] * (info.max_length + 1), *short, *inner, {}, "x", None]
        case mi.TupleType():
            good_ones = [*map(example, info.item_types)]
            wrong: list[object] = [
                [*good_ones[:at], bad, *good_ones[at + 1 :]]
                for at, item in enumerate(info.item_types)
                for bad in violations(item)
            ]
            return [good_ones[1:], [*good_ones, 0], *wrong, {}, "x", None]
        case mi.DictType():
            return [[], "x", None, {1: 2}]
        case mi.UnionType():
            held = [one for one in info.types if not isinstance(one, mi.NoneType)]
            return [bad for one in held for bad in violations(one) if bad is not None]
        case mi.StructType():
            lacking: list[object] = [{}] if any(field.required for field in info.fields) else []
            good = {field.encode_name: example(field.type) for field in info.fields}
            bad_ones = [good | {field.encode_name: bad} for field in info.fields for bad in violations(field.type)]
            return [[], 1, "x", None, *lacking, *bad_ones]
    raise AssertionError(f"no violations for {info}")


def decoded(found: object, known: Any) -> Message:
    return decode(msgpack.packb(found), known)


@pytest.mark.parametrize(("kind", "known"), PAIRS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_message_arrives_as_it_was_sent(kind: type[Message], known: Any, data: Any) -> None:
    sent = data.draw(strategy(mi.type_info(kind)))
    assert msgpack.unpackb(pack(sent))["type"] == kind.__name__
    assert decode(pack(sent), known) == sent


@pytest.mark.parametrize(("kind", "known"), PAIRS)
def test_a_field_that_is_missing_or_out_of_its_range_is_named(kind: type[Message], known: Any) -> None:
    good = {f.name: example(f.type) for f in fields_of(kind)} | {"type": kind.__name__}
    assert isinstance(decoded(good, known), kind)
    for field in fields_of(kind):
        for bad in violations(field.type):
            with pytest.raises(BadMessage, match=rf"^{kind.__name__}: .*`\$\.{field.encode_name}\b"):
                decoded(good | {field.encode_name: bad}, known)
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
def test_an_error_is_raised_as_the_same_type_on_the_other_side(
    kind: type[errors.TensordError],
) -> None:
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
