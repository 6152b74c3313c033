"""Parses gauge files: the current readings of gauges.

    # NAME         USED    TOTAL
    host           12GiB   64GiB
    0000:65:00.0   87.5%   80GiB

Owns: the format and its limits. Does not own the files, nor the consequences of a reading.

Invariants: every returned value is valid in a message too. A text with one bad line returns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Final, NoReturn

from ..errors import BadGaugeFile
from .messages.governance import GAUGE_CHARS_MAX, GAUGES_MAX
from .messages.schema import SIZE_BYTES_MAX
from .quantities import SIZE_WANTS, read_size

FILE_CHARS_MAX: Final = 1 << 20
"""The most characters of a gauge file. A caller reads at most one character more, so that a wrong file costs little
memory."""
LINE_CHARS_MAX: Final = 512
OVERFULL_MAX: Final = 2
"""The most that USED may be, as a multiple of TOTAL. A driver may report more than TOTAL for shared or swapped memory,
but hardly more than twice as much."""

USED_WANTS: Final = f"{SIZE_WANTS}, or a share of TOTAL such as 75%"

_SHARE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)%")
_FRACTION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")
_SHOWN_CHARS_MAX = 64
_FIELDS = ("NAME", "USED", "TOTAL")


def read_gauges(text: str) -> dict[str, tuple[int, int]]:
    """(used_bytes, total_bytes) by gauge, in the order of the lines. Empty for a text without readings.

    Raises BadGaugeFile, which names the line, the field, the value and the accepted values.
    """
    gauges: dict[str, tuple[int, int]] = {}
    for number, fields in _lines(text):
        name = _name(number, fields[0])
        if name in gauges:
            _refuse(number, "NAME", name, "a gauge that no earlier line has")
        gauges[name] = _reading(number, fields[1], fields[2])
    return gauges


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the fields of each line that is not empty or a comment."""
    if len(text) > FILE_CHARS_MAX:
        raise BadGaugeFile(f"the gauge file has more than {FILE_CHARS_MAX} characters: check that it is the right file")
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        fields = line[: LINE_CHARS_MAX + 1].split("#", 1)[0].split()
        if not fields:
            continue
        if len(line) > LINE_CHARS_MAX:
            raise BadGaugeFile(f"line {number}: {len(line)} characters; a line may have at most {LINE_CHARS_MAX}")
        if len(fields) != len(_FIELDS):
            shown = _shown(" ".join(fields))
            raise BadGaugeFile(f"line {number}: {shown} has {len(fields)} fields; wanted: {' '.join(_FIELDS)}")
        count += 1
        if count > GAUGES_MAX:
            raise BadGaugeFile(f"line {number}: more than {GAUGES_MAX} readings; remove some")
        yield number, fields


def _name(number: int, given: str) -> str:
    if len(given) > GAUGE_CHARS_MAX or not given.isprintable():
        _refuse(number, "NAME", given, f"a gauge's name: printable, {GAUGE_CHARS_MAX} characters at most")
    return given


def _reading(number: int, used: str, total: str) -> tuple[int, int]:
    total_bytes = _size(number, "TOTAL", total, SIZE_WANTS)
    if not 1 <= total_bytes <= SIZE_BYTES_MAX:
        _refuse(number, "TOTAL", total, f"from 1 to {SIZE_BYTES_MAX} bytes")
    share = _SHARE.fullmatch(used)
    if share is not None:
        used_bytes = round(Decimal(share[1]) * total_bytes / 100)
    else:
        meant = f"; a share of {used} is {float(used) * 100:.9g}%" if _FRACTION.fullmatch(used) else ""
        used_bytes = _size(number, "USED", used, USED_WANTS + meant)
    most = min(OVERFULL_MAX * total_bytes, SIZE_BYTES_MAX)
    if used_bytes > most:
        _refuse(number, "USED", used, f"{most} bytes at most, for a TOTAL of {total}")
    return used_bytes, total_bytes


def _size(number: int, field: str, given: str, wants: str) -> int:
    try:
        return read_size(given)
    except (ValueError, OverflowError):  # OverflowError: a number of hundreds of digits
        _refuse(number, field, given, wants)


def _refuse(number: int, field: str, given: str, wants: str) -> NoReturn:
    raise BadGaugeFile(f"line {number}: {field} = {_shown(given)}; wanted: {wants}")


def _shown(given: str) -> str:
    return repr(given) if len(given) <= _SHOWN_CHARS_MAX else f"{given[:_SHOWN_CHARS_MAX]!r}…"
