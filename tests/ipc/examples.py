"""The smallest valid message of each kind, from its declaration."""

from __future__ import annotations

from typing import Any

import msgspec
import msgspec.inspect as mi

from tensord.ipc.messages.schema import Message


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
    """A message of this kind, with these fields."""
    found = {field.encode_name: example(field.type) for field in fields_of(kind)} | {"type": kind.__name__}
    return msgspec.convert(found | fields, kind)
