"""The definition of a setting: its kind, its bounds, its default, and its key in a tree of settings.

Owns: what can be said of any setting. Does not own the kinds (kinds.py), the list of settings (sections.py, config.py),
nor the sources of values (sources.py).

A setting is a field of a frozen dataclass, made by `setting(...)`; the string below it is its description. Its key is
its dotted path in the tree. The names of the flag and of the variable are derived from the key:

    limits.clients_max      --limits-clients-max      TENSORD_LIMITS_CLIENTS_MAX
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ...errors import BadConfiguration
from .kinds import HIDDEN, Kind

PREFIX: Final = "TENSORD_"
_USER: Final = re.compile(r"//[^\s,]*@")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The properties of a setting. `optional`: it may be none. `derived`: how a default that is not fixed is computed,
    in words."""

    kind: Kind
    low: Any = None
    high: Any = None
    optional: bool = False
    reload: bool = False
    derived: str = ""

    def parse(self, key: str, given: Any, source: str) -> Any:
        """The value of the text or TOML value `given`. Raises BadConfiguration."""
        if self.optional and isinstance(given, str) and given.strip().lower() == "none":
            return None
        try:
            value = self.kind.read(given)
        except (ValueError, OverflowError):
            raise self.refusal(key, given, source) from None
        # `not value >= low` in place of `value < low`, so that a NaN is refused too.
        too_low = self.low is not None and not value >= self.low
        if too_low or (self.high is not None and not value <= self.high):
            raise self.refusal(key, given, source)
        return value

    def refusal(self, key: str, given: Any, source: str) -> BadConfiguration:
        # Also a value that is no URL by the rules may have a user and a password.
        shown = HIDDEN if self.kind.secret else _USER.sub(f"//{HIDDEN}@", repr(given))
        return BadConfiguration(f"{key} = {shown} ({source}): {self.wants}")

    @property
    def wants(self) -> str:
        bounds = [
            f"{word} {self.kind.show(bound)}"
            for word, bound in (("at least", self.low), ("at most", self.high))
            if bound is not None
        ]
        wants = ", ".join([f"must be {self.kind.wants}", " and ".join(bounds)]).rstrip(", ")
        return wants + (", or none" if self.optional else "")

    def show(self, value: Any) -> str:
        return "none" if value is None else self.kind.show(value)


def setting(
    kind: Kind,
    default: Any = dataclasses.MISSING,
    low: Any = None,
    high: Any = None,
    *,
    reload: bool = False,
    derived: str = "",
) -> Any:
    """A dataclass field for a setting. Without `default`, the default is computed while loading (`derived`). With
    None, the setting is optional."""
    spec = Setting(kind, low, high, default is None, reload, derived)
    return dataclasses.field(default=default, metadata={"setting": spec})


_types = typing.cast(Callable[[type[Any]], dict[str, Any]], functools.cache(typing.get_type_hints))
"""The type of each field. Looked up once: it takes a tenth of what a daemon does before it serves."""


def settings_of(tree: type[Any], prefix: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """(key, setting, default) of every setting of a tree, in order. The default is MISSING if it is derived."""
    types = _types(tree)
    for field in dataclasses.fields(tree):
        if "setting" in field.metadata:
            yield prefix + field.name, field.metadata["setting"], field.default
        elif dataclasses.is_dataclass(types[field.name]):
            yield from settings_of(types[field.name], f"{prefix}{field.name}.")


def descriptions(tree: type[Any], prefix: str = "") -> dict[str, str]:
    """The description of every setting by its key: the string below the field, without its full stop."""
    (declared,) = ast.parse(inspect.getsource(tree)).body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for field, below in zip(declared.body, declared.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(below.value.value).split()).removesuffix(".")
    said: dict[str, str] = {}
    types = _types(tree)
    for each in dataclasses.fields(tree):
        if "setting" in each.metadata:
            said[prefix + each.name] = found[each.name]
        elif dataclasses.is_dataclass(types[each.name]):
            said |= descriptions(types[each.name], f"{prefix}{each.name}.")
    return said


def build(tree: type[Any], values: Mapping[str, Any], prefix: str = "", **rest: Any) -> Any:
    """The frozen tree with `values` by key. `rest`: fields of the root that are not settings."""
    types = _types(tree)
    parts = dict(rest)
    for field in dataclasses.fields(tree):
        if "setting" in field.metadata:
            parts[field.name] = values[prefix + field.name]
        elif dataclasses.is_dataclass(types[field.name]):
            parts[field.name] = build(types[field.name], values, f"{prefix}{field.name}.")
    return tree(**parts)


def flag_of(key: str) -> str:
    return "--" + re.sub(r"[._]", "-", key)


def variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "_").upper()
