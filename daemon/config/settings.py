"""The definition of a setting: its kind, its bounds, and the text form of its values.

Owns: the kinds (sizes, durations, counts, ...). Does not own the list of settings (config.py), the sources of values
(sources.py), nor the units of sizes and durations (ipc/quantities.py).

A setting is a field of a frozen dataclass, made by `setting(...)`. Its key is its dotted path in the tree. The names of
the flag and of the variable are derived from the key:

    limits.clients_max      --limits-clients-max      TENSORD_LIMITS_CLIENTS_MAX

Invariant: the text of a value parses to the same value again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from ...errors import BadConfiguration
from ...ipc.quantities import (
    DURATION_WANTS,
    SIZE_WANTS,
    read_duration,
    read_size,
    show_duration,
    show_size,
)

PREFIX: Final = "TENSORD_"
HIDDEN: Final = "***"
"""Stands for what is not shown, as a password."""
SIZES_MAX: Final = 64
SIZES_BYTES_MAX: Final = 16 << 40

_WORDS = {"true": True, "yes": True, "on": True, "1": True,
          "false": False, "no": False, "off": False, "0": False}  # fmt: skip
_ADDRESS: Final = re.compile(r"(?:(?P<host>[^\s:\[\]/]+)|\[(?P<host6>[0-9A-Fa-f:.%\w]+)\]):(?P<port>[0-9]{1,5})")
_USER: Final = re.compile(r"//[^\s,]*@")
_PORT_MAX: Final = 65535


@dataclasses.dataclass(frozen=True)
class Kind:
    """The text form of values. `read` parses text or a TOML value, and raises ValueError. `wants`: accepted values.
    `secret`: a refused value is not shown."""

    wants: str
    read: Callable[[Any], Any]
    show: Callable[[Any], str]
    secret: bool = False


def _count(given: Any) -> int:
    if isinstance(given, bool | float):
        raise ValueError
    return given if isinstance(given, int) else int(str(given).strip())


def _share(given: Any) -> float:
    if isinstance(given, bool):
        raise ValueError
    text = str(given).strip()
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _switch(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    try:
        return _WORDS[str(given).strip().lower()]
    except KeyError:
        raise ValueError from None


def _mode(given: Any) -> int:
    # TOML has already parsed a number in its own base (0o660). A text is octal, as for chmod.
    if isinstance(given, bool):
        raise ValueError
    return given if isinstance(given, int) else int(str(given).strip().removeprefix("0o"), 8)


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given or not given.isprintable():
        raise ValueError
    return given


def host_and_port(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:9477", "metrics.example:9477" or "[::1]:9477". Raises ValueError."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > _PORT_MAX:
        raise ValueError(text)
    return found["host"] or found["host6"], int(found["port"])


def _address(given: Any) -> str:
    host_and_port(_text(given))
    return str(given)


def _loopback(given: Any) -> str:
    text = _text(given)
    if not text.startswith("/") and host_and_port(text)[0] not in ("127.0.0.1", "::1"):
        raise ValueError(text)
    return text


def _sizes(given: Any) -> tuple[tuple[str, int], ...]:
    """Sizes by name; the name is empty for a size without one."""
    if isinstance(given, bool):
        raise ValueError
    given = given if isinstance(given, str) else str(given)
    pairs = [part.rpartition("=") for part in given.split(",")]
    found = {name.strip(): read_size(size.strip()) for name, _, size in pairs}
    named = all(name.strip() or not equals for name, equals, _ in pairs)
    if not named or len(found) < len(pairs) or len(found) > SIZES_MAX or max(found.values()) > SIZES_BYTES_MAX:
        raise ValueError
    return tuple(sorted(found.items()))


def _show_sizes(value: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name}={show_size(size)}" if name else show_size(size) for name, size in value)


SIZES: Final = Kind(
    "a size such as 72GiB, or up to 64 of NAME=SIZE separated by commas, each at most 16TiB", _sizes, _show_sizes
)
SIZE: Final = Kind(SIZE_WANTS, read_size, show_size)
DURATION: Final = Kind(DURATION_WANTS, read_duration, show_duration)
COUNT: Final = Kind("a whole number", _count, str)
SHARE: Final = Kind("a share such as 0.5 or 50%", _share, lambda value: f"{Decimal(repr(value)):f}")
SWITCH: Final = Kind("true or false", _switch, lambda value: "true" if value else "false")
MODE: Final = Kind("an octal file mode such as 0660", _mode, lambda value: f"{value:04o}")
TEXT: Final = Kind("text", _text, str)
LOOPBACK: Final = Kind("127.0.0.1:PORT, [::1]:PORT or the absolute path of a Unix socket", _loopback, str)
ADDRESS: Final = Kind("HOST:PORT such as 127.0.0.1:9477 or [::1]:9477", _address, str)
PATH: Final = Kind("an absolute path", lambda given: Path(_text(given)), str)


def choice(*names: str) -> Kind:
    def read(given: Any) -> str:
        if given not in names:
            raise ValueError
        return str(given)

    return Kind("one of " + ", ".join(names), read, str)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The properties of a setting. `derived`: how a default that is not fixed is computed, in words."""

    kind: Kind
    doc: str
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


def setting(kind: Kind, doc: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A dataclass field for a setting. Without `default`, the default is computed while loading (`derived`)."""
    spec = Setting(kind, " ".join(doc.split()), **more)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata={"setting": spec})
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
