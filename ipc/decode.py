"""From an unpacked object to a typed message, or to an error that names field, value and limit.

Owns: telling a message of an unknown type, which can be answered, from a bad one, which ends a
connection. Does not own the ranges themselves (`schema`).
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
    """A message of a type this side does not know. It can be answered; the connection goes on."""

    def __init__(self, text: str, id: int | None, fds: int, name: str = "") -> None:
        super().__init__(text)
        self.name = name
        self.id = id
        self.fds = fds

    @property
    def code(self) -> str:
        return BadMessage.__name__


def decode(obj: object, known: Kinds) -> Message:
    """One unpacked object as a message of one of the classes in `known`.

    Raises:
        UnknownMessage: its type is not in `known`.
        BadMessage: anything else is wrong with it; the text names field, value and limit.
    """
    if type(obj) is not dict:
        raise BadMessage(f"a message is a map with a 'type', this is {_shown(obj)}")
    name = obj.get("type")
    if type(name) is not str:
        raise BadMessage(f"a message names its 'type' as a string, this one has {_shown(name)}")
    kind = known.get(name)
    if kind is None:
        raise UnknownMessage(
            f"unknown message type {_shown(name)}; known here: {', '.join(known)}",
            _small(obj.get("id")),
            _small(obj.get("fds")) or 0,
            name,
        )
    try:
        # As a native type, bytes stay bytes: otherwise text in their place is taken for base64.
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


def _small(value: object) -> int | None:
    fits = type(value) is int and 0 <= value < 1 << 63
    return cast(int, value) if fits else None
