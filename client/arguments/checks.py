"""Checks of the callers' arguments. Each error names the field, its value and the limit; no check has another effect.

Does not own: limits, which the messages' schema declares.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import Any

from ...errors import UsageError, shown
from ...ipc.messages.governance import GAUGE_CHARS_MAX
from ...ipc.messages.schema import DURATION_S_MAX
from ...shm.index.index import bad_key
from ...shm.ring.layout import KEY_BYTES


def check_key(key: object) -> bytes:
    """Returns the key as bytes; BadKey unless it is 32 of them, also in a bytearray or a memoryview of bytes."""
    if type(key) is bytes and len(key) == KEY_BYTES:
        return key
    # A memoryview that was released raises ValueError.
    with suppress(ValueError):
        if isinstance(key, bytearray) or (isinstance(key, memoryview) and key.format == "B" and key.ndim == 1):
            key = bytes(key)
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise bad_key(key)
    return key


def check_pairs(items: object) -> Iterator[tuple[object, object]]:
    """The pairs of a key and a tree, one by one. Does not check the keys. UsageError for an item that is no such
    pair."""
    for number, item in enumerate(check_iterable("items", items, "pairs of a key and a tree")):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UsageError(
                f"item {number} is of type {type(item).__name__}; items must be pairs of a key and a tree. Of a dict, "
                "pass items()"
            )
        yield item[0], item[1]


def check_iterable(field: str, given: object, wants: str) -> Iterator[Any]:
    """Iterates over `given`; UsageError unless it is an iterable of `wants`, as a text is not."""
    # An array without dimensions has `__iter__` too.
    with suppress(TypeError):
        if not isinstance(given, str | bytes):
            return iter(given)  # type: ignore[call-overload,no-any-return]
    raise UsageError(f"{field} is {shown(given)}; it must be {wants}")


def check_name(field: str, name: object, most: int = GAUGE_CHARS_MAX, least: int = 1) -> None:
    """Checks the name of a gauge, a device …; UsageError unless it is a text of `least` to `most` characters without
    surrogates, which no message can carry."""
    if not isinstance(name, str) or not least <= len(name) <= most:
        raise UsageError(f"{field} is {shown(name)}; it must be a text of {least} to {most} characters")
    if printable(name) != name:
        raise UsageError(f"{field} is {shown(name)}; it must be a text without surrogates")


def printable(text: str) -> str:
    """The text with a question mark for each surrogate, which stands for bytes of a file name that are no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def check_socket(socket: str | os.PathLike[str]) -> Path:
    """Returns the path of a socket; UsageError if it cannot be one."""
    with suppress(ValueError, TypeError):
        if (name := os.fsencode(socket)) and b"\0" not in name:
            return Path(os.fsdecode(socket))
    raise UsageError(f"socket is {shown(socket)}; it must be the path of a socket, or None for the default")


def check_count(field: str, count: object, most: int, least: int = 0) -> int:
    """Returns `count` as an int; UsageError unless it is a whole number from `least` to `most`."""
    # Arrays and tensors have `__index__` too. It raises TypeError unless they are a single whole number.
    with suppress(TypeError):
        if hasattr(count, "__index__") and not isinstance(count, bool):
            whole = int(count.__index__())
            if least <= whole <= most:
                return whole
    raise UsageError(f"{field} is {shown(count)}; it must be a whole number from {least} to {most}")


def number(given: object) -> float:
    """Returns `given` as a float, also a tensor of one element. NaN, which is out of every range, for anything else."""
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not isinstance(given, bool | str | bytes | bytearray):
            return float(given)  # type: ignore[arg-type]
    return nan


def check_timeout(timeout_s: float | None, usual_s: float, field: str = "timeout_s") -> float:
    """Returns a time limit in seconds: `usual_s` for None, ten years for infinity; UsageError below 0."""
    if timeout_s is None:
        return usual_s
    return DURATION_S_MAX if number(timeout_s) == inf else check_seconds(field, timeout_s)


def check_seconds(field: str, seconds: object, *, above_0: bool = False) -> float:
    """Returns `seconds` as a float; UsageError unless it is from 0 (`above_0`: more than 0) to ten years."""
    value = number(seconds)
    if 0 <= value <= DURATION_S_MAX and not (above_0 and value == 0):
        return value
    least = "above 0" if above_0 else "of 0 or more"
    raise UsageError(f"{field} is {shown(seconds)}; it must be a time {least} and at most {DURATION_S_MAX:.0f} seconds")
