"""Values of configurations as JSON values that are equal in all processes, and differ for different values.

Owns: this form. Does not own: the choice of values. Invariants: a value without such a form gets a random one, so that
it is shared with no other process.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import FunctionType
from typing import Any

Fields = Callable[[Any], list[str]]
"""The names of the attributes to describe, for an instance of a dataclass."""


def described(value: Any, chosen: Fields | None = None) -> Any:
    """The value in a form that JSON can hold, with its type: True is not 1, and "1" is neither.

    Args:
        chosen: returns the fields of a dataclass's instance to include; by default all.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": repr(value)}
    if type(value) in (list, tuple):
        return [described(each, chosen) for each in value]
    if hasattr(value, "to_json_string"):
        return {type(value).__qualname__: json.loads(value.to_json_string(use_diff=False), object_hook=_placeless)}
    if isinstance(value, Mapping):
        pairs = [[described(name, chosen), described(each, chosen)] for name, each in value.items()]
        return {"map": sorted(pairs, key=json.dumps)}
    if isinstance(value, AbstractSet):
        return {"set": sorted((described(each, chosen) for each in value), key=json.dumps)}
    if isinstance(value, Enum):
        return {type(value).__qualname__: value.name}
    if is_dataclass(value) and not isinstance(value, type):
        names = chosen(value) if chosen is not None else [field.name for field in fields(value)]
        return {type(value).__qualname__: {name: described(getattr(value, name), chosen) for name in names}}
    if isinstance(value, PurePath | bytes) or type(value).__module__ == "torch":
        return {type(value).__qualname__: str(value)}
    if isinstance(value, type):
        return {"class": f"{value.__module__}.{value.__qualname__}"}
    # Passes of torch's compiler have a `uuid` method that identifies them.
    uuid = None if isinstance(value, FunctionType) else getattr(value, "uuid", None)
    if callable(uuid):
        return {type(value).__qualname__: str(uuid())}
    return {"unknown": secrets.token_hex(16)}


def digest_of(value: Any) -> str:
    """The SHA-256 of a JSON value, as hexadecimal digits. The order of a dict's names does not count.

    Raises:
        TypeError: a part of the value has no JSON form. `described` gives one to every value.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _placeless(given: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the path it was read from."""
    return {name: value for name, value in given.items() if name != "_name_or_path"}
