"""The definition of a setting: its kind, its bounds, its default, and its key in a tree of settings.

Owns: what can be said of any setting. Does not own the kinds (kinds.py), the list of settings (sections.py, config.py),
nor the sources of values (sources.py).

A setting is a field of a frozen dataclass, made by `setting(...)`; the string below it is its description. Its key is
its dotted path in the tree. The names of the flag and of the variable are derived from the key:

    limits.clients_max      --limits-clients-max      TENSORD_LIMITS_CLIENTS_MAX
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from ...errors import BadConfiguration
from .kinds import HIDDEN, Kind

PREFIX: Final = "TENSORD_"
_USER: Final = re.compile(r"//[^\s,]*@")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The properties of a setting. `default`: MISSING if it is computed while loading; None if the setting may be none.
    `derived`: how a default that is not fixed is computed, in words."""

    kind: Kind
    default: Any
    low: Any = None
    high: Any = None
    reload: bool = False
    derived: str = ""

    @property
    def optional(self) -> bool:
        return self.default is None

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
    """A dataclass field for a setting."""
    spec = Setting(kind, default, low, high, reload, derived)
    return dataclasses.field(default=default, metadata={"setting": spec})


def flag_of(key: str) -> str:
    return "--" + re.sub(r"[._]", "-", key)


def variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "_").upper()
