"""Values as JSON values that are equal in all processes, and differ for different values.

Owns: this form. Does not own: the choice of values, nor what becomes of a value without a form: the caller decides.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import FunctionType
from typing import Any, NoReturn

from ...errors import UnsupportedLeaf

Other = Callable[[Any], Any]
"""Returns the form of a value that is no plain value and no collection, or raises an error."""


def refused(value: Any) -> NoReturn:
    raise UnsupportedLeaf(f"a {type(value).__qualname__} cannot be part of a name")


def described(value: Any, other: Other = refused) -> Any:
    """The value in a form that JSON can hold, with its type: True is not 1, and "1" is neither."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind in (float, complex, bytes) or (kind.__module__ == "torch" and kind.__name__ in ("dtype", "device")):
        return {kind.__name__: repr(value)}
    if isinstance(value, list):
        return [described(each, other) for each in value]
    if isinstance(value, tuple):
        return {kind.__qualname__: [described(each, other) for each in value]}
    if isinstance(value, Mapping):
        pairs = [[described(name, other), described(each, other)] for name, each in value.items()]
        return {"map": sorted(pairs, key=json.dumps)}
    if isinstance(value, AbstractSet):
        return {"set": sorted((described(each, other) for each in value), key=json.dumps)}
    return other(value)


def described_config(value: Any, left_out: Callable[[str], Collection[str]] = lambda _: ()) -> Any:
    """`described` for a configuration, with the objects in it. A value without a form gets a random one, so that it is
    shared with no other process. `left_out` returns the fields to leave out, for the name of a dataclass."""

    def other(value: Any) -> Any:
        kind = type(value)
        if hasattr(value, "to_json_string"):
            return {kind.__qualname__: json.loads(value.to_json_string(use_diff=False), object_hook=_placeless)}
        if isinstance(value, Enum):
            return {kind.__qualname__: value.name}
        if is_dataclass(value) and not isinstance(value, type):
            out = left_out(kind.__name__)
            names = [field.name for field in fields(value) if field.name not in out]
            return {kind.__qualname__: {name: described(getattr(value, name), other) for name in names}}
        if isinstance(value, PurePath):
            return {kind.__qualname__: str(value)}
        if isinstance(value, type):
            return {"class": f"{value.__module__}.{value.__qualname__}"}
        # Passes of torch's compiler have a `uuid` method that identifies them.
        uuid = None if isinstance(value, FunctionType) else getattr(value, "uuid", None)
        return {kind.__qualname__: str(uuid())} if callable(uuid) else {"unknown": secrets.token_hex(16)}

    return described(value, other)


def _placeless(given: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the path it was read from."""
    return {name: value for name, value in given.items() if name != "_name_or_path"}


def digest_of(value: Any) -> str:
    """The SHA-256 of a JSON value, as hexadecimal digits. The order of a dict's names does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    """Converts reason → names to name → reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}
