"""Turns an unpacked object into a typed message, or into an error that names field, value and limit.

Owns: the distinction of two errors. A message of an unknown type can be answered, and the connection goes on. Any
other bad message ends the connection. Does not own the ranges of fields (`schema`) nor the message classes
(`messages`).

Invariant: a returned message has every field within its range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast

from msgspec import ValidationError, convert

from ..errors import BadMessage
from .declared import Kinds
from .schema import Message


class UnknownMessage(BadMessage):
    """A message of a type that this side does not know. It can be answered, and the connection goes on.

    `id` and `fds`: the message's fields of that name, None and 0 where they are missing or out of range. `name`: the
    unknown type.
    """

    def __init__(self, text: str, id: int | None, fds: int, name: str = "") -> None:
        super().__init__(text)
        self.name = name
        self.id = id
        self.fds = fds

    @property
    def code(self) -> str:
        return BadMessage.__name__


def decode(obj: object, known: Kinds) -> Message:
    """The typed message of one unpacked object. Its class is one of `known`.

    Raises:
        UnknownMessage: the message's type is not in `known`.
        BadMessage: the object is wrong in another way. The text names field, value and limit.
    """
    if type(obj) is not dict:
        raise BadMessage(f"a message is a map with a 'type', got {_shown(obj)}")
    name = obj.get("type")
    if type(name) is not str:
        raise BadMessage(f"the 'type' of a message is a string, got {_shown(name)}")
    kind = known.get(name)
    if kind is None:
        raise UnknownMessage(
            f"unknown message type {_shown(name)}; known here: {', '.join(known)}",
            _number_or_none(obj.get("id")),
            _number_or_none(obj.get("fds")) or 0,
            name,
        )
    try:
        # With bytes as a built-in type, convert accepts only bytes for a field of bytes. Otherwise it would decode a
        # text in that place as base64.
        return convert(obj, kind, builtin_types=_BYTES)
    except ValidationError as error:
        raise BadMessage(f"{name}: {_reason(error, obj)}") from None
    except RecursionError:
        raise BadMessage(f"{name}: nested too deeply") from None


_BYTES: Final = (bytes,)
_FIELD: Final = re.compile(r" - at `\$\.(\w+)")


def _reason(error: ValidationError, obj: Mapping[object, object]) -> str:
    text = str(error)
    field = _FIELD.search(text)
    return text if field is None else f"{text}, got {_shown(obj.get(field[1]))}"


def _shown(value: object) -> str:
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, (list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str) and len(value) > 64:
        return f"{value[:64]!r}… ({len(value)} characters)"
    return repr(value)


def _number_or_none(value: object) -> int | None:
    fits = type(value) is int and 0 <= value < 1 << 63
    return cast(int, value) if fits else None
