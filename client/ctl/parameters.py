"""Arguments of commands: sizes, durations, paths, keys and namespace tags. An error names the valid form.

Owns: parsing them, and finding the one key with a given prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ...errors import BadKey
from ...ipc.quantities import read_duration, read_size, show_duration
from .daemon import Daemon

KEY_DIGITS: Final = 64
TAG_DIGITS: Final = 16
_SHOWN_MAX: Final = 3

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic in newer versions only


class _Read(_Type):
    """A value that `read` makes of the text. The text of a ValueError is the error's."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value) if isinstance(value, str) else value
        except (ValueError, OverflowError) as error:
            self.fail(str(error), param, ctx)


def _path(given: str) -> Path:
    # An empty text would mean the current folder; usually a script's variable is not set.
    if not given:
        raise ValueError("'' is not a path; give a path, or leave the option out")
    return Path(given)


def _hexadecimal(what: str, digits: str) -> _Read:
    """`digits`: how many, as in a regular expression."""
    wanted = f"{digits.replace(',', ' to ')} hexadecimal digits"

    def read(given: str) -> str:
        text = given.strip().lower()
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", text):
            raise ValueError(f"{given!r} ({len(text)} characters) is no {what}: it has {wanted}")
        return text

    return _Read(what, read)


SIZE: Final = _Read("size", read_size)
FILE: Final = _Read("file", _path)
KEY: Final = _hexadecimal("key", f"1,{KEY_DIGITS}")
namespace_tag = click.option(
    "--namespace-tag",
    type=_hexadecimal("namespace tag", f"{TAG_DIGITS}"),
    metavar="HEX",
    help="Only this namespace: the first 16 digits of its keys.",
)


def time_option(option: str, name: str, most_s: float, default: str, help: str) -> Callable[[Any], Any]:
    """An option whose value is a duration above 0 of at most `most_s`."""

    def read(given: str) -> float:
        seconds = read_duration(given)
        if not 0 < seconds <= most_s:
            raise ValueError(f"{given}: must be above 0 and at most {show_duration(most_s)}")
        return seconds

    kind = _Read("duration", read)
    return click.option(option, name, type=kind, default=default, show_default=True, metavar="TIME", help=help)


def keys_meant(daemon: Daemon, prefixes: Sequence[str]) -> list[bytes]:
    """The key for each prefix. A whole key stands for itself, stored or not. Raises BadKey: no stored key begins with a
    prefix, or several do."""
    found: dict[str, list[str]] = {prefix: [] for prefix in prefixes if len(prefix) < KEY_DIGITS}
    # One pass over the entries; over those of one namespace, if all prefixes contain the same tag.
    tags = {prefix[:TAG_DIGITS] for prefix in found}
    tag = tags.pop() if len(tags) == 1 else ""
    namespace = bytes.fromhex(tag) if len(tag) == TAG_DIGITS else None
    for entry in daemon.entries(namespace) if found else ():
        for prefix, keys in found.items():
            if entry["key"].startswith(prefix):
                keys.append(entry["key"])
    for prefix, keys in found.items():
        if not keys:
            raise BadKey(
                f"no stored key begins with {prefix}; `tensorctl ls` lists them. Give all digits of a removed one"
            )
        if len(keys) > 1:
            shown = ", ".join(keys[:_SHOWN_MAX]) + (", ..." if len(keys) > _SHOWN_MAX else "")
            raise BadKey(f"{len(keys)} keys begin with {prefix}: {shown}; give more digits")
    return [bytes.fromhex(found.get(prefix, [prefix])[0]) for prefix in prefixes]
