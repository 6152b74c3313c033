"""What callers hand in, checked before anything happens: a mistake is named with its field, its value and the limit."""

from __future__ import annotations

import os
from contextlib import suppress
from math import inf, nan
from pathlib import Path

from ...errors import UsageError
from ...ipc.governance import GAUGE_CHARS_MAX
from ...ipc.schema import DURATION_S_MAX
from ...shm.index import bad_key
from ...shm.layout import KEY_BYTES


def check_key(key: object) -> bytes:
    """The key as bytes, which a bytearray or a memoryview of bytes may give too.

    Raises:
        BadKey: not 32 bytes.
    """
    if isinstance(key, bytearray) or (isinstance(key, memoryview) and key.format == "B" and key.ndim == 1):
        key = bytes(key)
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise bad_key(key)
    return key


def check_name(field: str, name: object, most: int = GAUGE_CHARS_MAX, least: int = 1) -> None:
    """Raises UsageError for what is no text of `least` to `most` characters, such as a gauge's or a device's name, or
    has surrogates, which no message can carry."""
    if not isinstance(name, str) or not least <= len(name) <= most:
        raise UsageError(f"{field} is {name!r}; it is a text of {least} to {most} characters")
    if printable(name) != name:
        raise UsageError(f"{field} is {name!r}; it is a text without surrogates")


def printable(text: str) -> str:
    """The text with a question mark for each surrogate, as they stand for bytes of a file's name that are no text."""
    return text.encode("utf-8", "replace").decode("utf-8")


def check_socket(socket: str | os.PathLike[str]) -> Path:
    """The path. Raises UsageError for what no file can be called."""
    with suppress(ValueError, TypeError):
        if (name := os.fsencode(socket)) and b"\0" not in name:
            return Path(os.fsdecode(socket))
    raise UsageError(f"socket is {socket!r}; it is the path of a socket, or None for the usual one")


def check_count(field: str, count: object, most: int, least: int = 0) -> int:
    """The whole number that `count` is. Raises UsageError for what is none from `least` to `most`."""
    # Arrays and tensors have the method too, and raise unless they are a whole number.
    with suppress(TypeError):
        if hasattr(count, "__index__") and not isinstance(count, bool):
            whole = int(count.__index__())
            if least <= whole <= most:
                return whole
    raise UsageError(f"{field} is {count!r}; it is a whole number from {least} to {most}")


def number(given: object) -> float:
    """The number as a float, a tensor of one included; NaN, which is within no bounds, for everything else."""
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not isinstance(given, bool | str | bytes | bytearray):
            return float(given)  # type: ignore[arg-type]
    return nan


def check_timeout(timeout_s: float | None, usual_s: float, field: str = "timeout_s") -> float:
    """How long a call may take, in seconds: `usual_s` for None, ten years for infinity.

    Raises:
        UsageError: no number from 0 up.
    """
    if timeout_s is None:
        return usual_s
    return DURATION_S_MAX if number(timeout_s) == inf else check_seconds(field, timeout_s)


def check_seconds(field: str, seconds: object, *, above_0: bool = False) -> float:
    """The seconds as a float. Raises UsageError for what is no number from 0, or above it, to ten years."""
    value = number(seconds)
    if 0 <= value <= DURATION_S_MAX and not (above_0 and value == 0):
        return value
    from_0 = "more than 0" if above_0 else "from 0"
    raise UsageError(f"{field} is {seconds!r}; it is a time {from_0} to {DURATION_S_MAX:g} seconds")
