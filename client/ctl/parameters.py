"""Types of command line arguments: sizes, durations, paths, keys and namespace tags. An error names the valid form.

Owns: parsing them, and finding the one key with a given prefix. Does not own: the use of the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ...errors import BadKey
from ...ipc.messages.schema import SIZE_BYTES_MAX
from ...ipc.quantities import read_duration, read_size
from .daemon import KEY_BYTES, Daemon

TAG_BYTES: Final = 8
_SHOWN_MAX: Final = 3
_HEX: Final = re.compile(r"[0-9a-f]+")


if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic in newer versions only


class _Read(_Type):
    """A value that `read` makes of the text; the text of its ValueError is the error's."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value) if isinstance(value, str) else value
        except (ValueError, OverflowError) as error:
            self.fail(str(error), param, ctx)


def _size(given: str) -> int:
    value = read_size(given)
    if value > SIZE_BYTES_MAX:
        raise ValueError(f"{given!r} is over the limit of {SIZE_BYTES_MAX} bytes")
    return value


def _path(given: str) -> Path:
    # An empty text would mean the current folder; usually a script's variable is not set.
    if not given:
        raise ValueError("'' is not a path; give a path, or leave the option out")
    return Path(given)


def _hexadecimal(what: str, least: int, most: int) -> Callable[[str], str]:
    wanted = f"{most} hexadecimal digits" if least == most else f"{least} to {most} hexadecimal digits"

    def read(given: str) -> str:
        text = given.strip().lower()
        if not _HEX.fullmatch(text) or not least <= len(text) <= most:
            raise ValueError(f"{given!r} ({len(text)} characters) is no {what}: it has {wanted}")
        return text

    return read


SIZE: Final = _Read("size", _size)
DURATION: Final = _Read("duration", read_duration)
FILE: Final = _Read("file", _path)
KEY: Final = _Read("key", _hexadecimal("key", 1, 2 * KEY_BYTES))
TAG: Final = _Read("namespace tag", _hexadecimal("namespace tag", 2 * TAG_BYTES, 2 * TAG_BYTES))

namespace_tag = click.option(
    "--namespace-tag", type=TAG, metavar="HEX", help="Only this namespace: the first 16 digits of its keys."
)


def keys_meant(daemon: Daemon, prefixes: Sequence[str]) -> list[bytes]:
    """The key for each prefix. A whole key stands for itself, stored or not.

    Raises:
        BadKey: no stored key begins with a prefix, or several do.
    """
    found: dict[str, list[str]] = {prefix: [] for prefix in prefixes if len(prefix) < 2 * KEY_BYTES}
    # One pass over the entries; over those of one namespace, if all prefixes contain the same tag.
    tags = {prefix[: 2 * TAG_BYTES] for prefix in found}
    tag = tags.pop() if len(tags) == 1 else ""
    namespace = bytes.fromhex(tag) if len(tag) == 2 * TAG_BYTES else None
    for entry in daemon.entries(namespace) if found else ():
        for prefix, keys in found.items():
            if entry["key"].startswith(prefix):
                keys.append(entry["key"])
    for prefix, keys in found.items():
        if not keys:
            raise BadKey(f"no stored key begins with {prefix}; `tensorctl ls` lists them")
        if len(keys) > 1:
            shown = ", ".join(keys[:_SHOWN_MAX]) + (", ..." if len(keys) > _SHOWN_MAX else "")
            raise BadKey(f"{len(keys)} keys begin with {prefix}: {shown}; give more digits")
    return [bytes.fromhex(found.get(prefix, [prefix])[0]) for prefix in prefixes]
