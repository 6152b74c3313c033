"""Parses and formats sizes and durations, for configuration files and command lines.

Invariant: a formatted value parses to the same value again; a rounded one is for people.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

SIZE_WANTS: Final = "a size in bytes such as 4GiB, 512MiB or 1048576"
DURATION_WANTS: Final = "a duration such as 10m, 1h30m, 250ms or 5"

_BYTES = {
    "": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,  # as service managers read them
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)")


def read_size(given: object) -> int:
    """The bytes of a number or of a text such as "4GiB". Raises ValueError, also for a fraction of a byte."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    match = _SIZE.fullmatch(str(given).strip())
    if match is None or match[2].upper() not in _BYTES:
        raise ValueError(f"{given!r} is not {SIZE_WANTS}")
    unit_bytes = _BYTES[match[2].upper()]
    if unit_bytes == 1 and "." in match[1]:
        raise ValueError(f"{given!r} is a fraction of a byte; wanted: {SIZE_WANTS}")
    return round(float(match[1]) * unit_bytes) if "." in match[1] else int(match[1]) * unit_bytes


def show_size(value: int) -> str:
    """The size in the largest unit that divides it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _BYTES[unit.upper()] == 0:
            return f"{value // _BYTES[unit.upper()]}{unit}"
    return str(value)


def rounded_size(value_bytes: int) -> str:
    """Bytes in the unit that gives a number from 1 to 1023, for example "1.50 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value_bytes >= _BYTES[unit.upper()]:
            amount = value_bytes / _BYTES[unit.upper()]
            return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {unit}"
    return f"{value_bytes} B"


def read_duration(given: object) -> float:
    """The seconds of a number or of a text such as "1h30m". Raises ValueError."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    text = str(given).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not text or re.sub(r"\s", "", _DURATION.sub("", text)):
        raise ValueError(f"{given!r} is not {DURATION_WANTS}")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def show_duration(value: float) -> str:
    """The duration in the largest unit that divides it."""
    for unit in ("d", "h", "m", "s", "ms"):
        if value and value >= _SECONDS[unit] and (value / _SECONDS[unit]).is_integer():
            return f"{int(value / _SECONDS[unit])}{unit}"
    return f"{Decimal(repr(value)):f}s"
