"""Types of command line arguments: sizes, durations, factors, paths, keys and namespace tags. An error names the valid
form.

Owns: parsing them, and finding the one key with a given prefix. Does not own: the use of the values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from ...errors import BadKey, TensordError
from ...ipc.quantities import read_duration, read_size
from ...ipc.schema import SIZE_BYTES_MAX
from .daemon import KEY_BYTES, Daemon

TAG_BYTES: Final = 8
_SHOWN_MAX: Final = 3
_COMPLETED_MAX: Final = 50
_HEX: Final = re.compile(r"[0-9a-f]+")


if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic in newer versions only


class _Quantity(_Type):
    def __init__(self, name: str, read: Callable[[object], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value)
        except (ValueError, OverflowError) as error:
            self.fail(str(error), param, ctx)


def _bytes_on_the_wire(given: object) -> int:
    value = read_size(given)
    if value > SIZE_BYTES_MAX:
        raise ValueError(f"{given!r} is over the limit of {SIZE_BYTES_MAX} bytes")
    return value


class _File(click.Path):
    """A path. An empty text is refused, since it would mean the current folder; usually a script's variable is not
    set."""

    def __init__(self, *, allow_dash: bool = False) -> None:
        super().__init__(path_type=Path, readable=False, allow_dash=allow_dash)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("'' is not a path; give a path, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


class Factor(click.FloatRange):
    """A number within bounds. "nan" is refused, since it compares as neither below nor above the bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number from {self.min:g} to {self.max:g}", param, ctx)
        return found


class _Hexadecimal(_Type):
    """Hexadecimal digits, converted to lower case. `exact`: all of them, else any prefix."""

    def __init__(self, name: str, size_bytes: int, *, exact: bool) -> None:
        self.name = name
        self._digits_max = 2 * size_bytes
        self._exact = exact

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).strip().lower()
        wanted = f"{'' if self._exact else '1 to '}{self._digits_max} hexadecimal digits"
        if not _HEX.fullmatch(text):
            self.fail(f"{value!r} is no {self.name}: it has {wanted}", param, ctx)
        if len(text) > self._digits_max or (self._exact and len(text) < self._digits_max):
            self.fail(f"{value!r} has {len(text)} digits: a {self.name} has {wanted}", param, ctx)
        return text

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The stored keys with this prefix; none if no daemon answers."""
        if self._exact:
            return []
        try:
            found = matching(_daemon_of(ctx), [incomplete.lower()])[incomplete.lower()]
        except (TensordError, OSError):
            return []
        return [CompletionItem(key) for key in found[:_COMPLETED_MAX]]


SIZE: Final = _Quantity("size", _bytes_on_the_wire)
DURATION: Final = _Quantity("duration", read_duration)
FILE: Final = _File()
FILE_OR_DASH: Final = _File(allow_dash=True)
KEY: Final = _Hexadecimal("key", KEY_BYTES, exact=False)
TAG: Final = _Hexadecimal("namespace tag", TAG_BYTES, exact=True)


def keys_meant(daemon: Daemon, prefixes: Sequence[str]) -> list[bytes]:
    """The key for each prefix. A whole key stands for itself, stored or not.

    Raises:
        BadKey: no stored key begins with a prefix, or several do.
    """
    cut = [prefix for prefix in prefixes if len(prefix) < 2 * KEY_BYTES]
    found = matching(daemon, cut) if cut else {}
    return [bytes.fromhex(_only(prefix, found[prefix]) if prefix in found else prefix) for prefix in prefixes]


def matching(daemon: Daemon, prefixes: Sequence[str]) -> dict[str, list[str]]:
    """The stored keys that begin with each prefix, found in one pass over the entries; of one namespace, if all
    prefixes contain the same tag."""
    found: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    tags = {prefix[: 2 * TAG_BYTES] for prefix in prefixes}
    tag = tags.pop() if len(tags) == 1 else ""
    namespace = bytes.fromhex(tag) if len(tag) == 2 * TAG_BYTES else None
    for entry in daemon.entries(namespace):
        for prefix, keys in found.items():
            if entry["key"].startswith(prefix):
                keys.append(entry["key"])
    return found


def stored_or_gone(daemon: Daemon, prefix: str) -> bytes:
    """The key for a prefix: a stored key, or else the key of a removed entry. A whole key stands for itself.

    Raises:
        BadKey: there is no such key, or several.
    """
    if len(prefix) == 2 * KEY_BYTES:
        return bytes.fromhex(prefix)
    stored = matching(daemon, [prefix])[prefix]
    if stored:
        return bytes.fromhex(_only(prefix, stored))
    gone = daemon.gone(prefix)
    if not gone:
        raise BadKey(
            f"no stored key begins with {prefix}, and no recorded key of a removed entry; `tensorctl ls` lists the "
            "stored keys, and a key that was removed before the daemon started is found only by all its digits"
        )
    return bytes.fromhex(_only(prefix, gone, "keys of removed entries"))


def _only(prefix: str, keys: Sequence[str], which: str = "stored keys") -> str:
    if not keys:
        raise BadKey(f"no stored key begins with {prefix}; `tensorctl ls` lists them")
    if len(keys) > 1:
        shown = ", ".join(keys[:_SHOWN_MAX]) + (", ..." if len(keys) > _SHOWN_MAX else "")
        raise BadKey(f"{len(keys)} {which} begin with {prefix}: {shown}; give more digits")
    return keys[0]


def _daemon_of(ctx: click.Context) -> Daemon:
    # During completion the group's function has not run; only its options are parsed.
    given = ctx.find_root().params
    return Daemon(given.get("socket"), given.get("status_socket"), timeout_s=1.0)
