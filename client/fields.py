"""What callers hand in, checked before anything happens: a mistake is named with its field, its value and the limit."""

from __future__ import annotations

from contextlib import suppress

from ..errors import UsageError
from ..ipc.governance import GAUGE_CHARS_MAX
from ..ipc.words import DURATION_S_MAX
from ..shm.index import bad_key
from ..shm.layout import KEY_BYTES


def check_key(key: object) -> None:
    """Raises BadKey for what is no 32 bytes."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise bad_key(key)


def check_name(field: str, name: object, most: int = GAUGE_CHARS_MAX, least: int = 1) -> None:
    """Raises UsageError for what is no text of `least` to `most` characters, such as a gauge's or a device's name."""
    if not isinstance(name, str) or not least <= len(name) <= most:
        raise UsageError(f"{field} is {name!r}; it is a text of {least} to {most} characters")


def check_count(field: str, count: object, most: int, least: int = 0) -> int:
    """The whole number that `count` is. Raises UsageError for what is none from `least` to `most`."""
    # Arrays and tensors have the method too, and raise unless they are a whole number.
    with suppress(TypeError):
        if hasattr(count, "__index__") and not isinstance(count, bool):
            whole = int(count.__index__())
            if least <= whole <= most:
                return whole
    raise UsageError(f"{field} is {count!r}; it is a whole number from {least} to {most}")


def check_seconds(field: str, seconds: object, *, above_0: bool = False) -> float:
    """The seconds as a float. Raises UsageError for what is no number from 0, or above it, to ten years."""
    if (isinstance(seconds, int | float) and not isinstance(seconds, bool)) or hasattr(seconds, "__float__"):
        value = float(seconds)
        if 0 <= value <= DURATION_S_MAX and not (above_0 and value == 0):
            return value
    from_0 = "more than 0" if above_0 else "from 0"
    raise UsageError(f"{field} is {seconds!r}; it is a time {from_0} to {DURATION_S_MAX:g} seconds")
