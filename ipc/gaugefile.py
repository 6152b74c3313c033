"""Gauges as they stand in a file: how full each is now, or a drill's readings over time.

    # NAME         USED    TOTAL              # SECONDS  NAME          USED    TOTAL
    host           12GiB   64GiB              0          0000:65:00.0  70%     80GiB
    0000:65:00.0   87.5%   80GiB              2.5        0000:65:00.0  97%     80GiB

Owns: the two formats and their limits. Does not own any file, nor what follows from a reading.

Invariant: what is returned is what the wire takes too; of a text with one bad line nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NoReturn

from ..errors import BadGaugeFile
from .governance import GAUGE_CHARS_MAX, GAUGES_MAX
from .quantities import DURATION_WANTS, SIZE_WANTS, read_duration, read_size
from .schema import DURATION_S_MAX, SIZE_BYTES_MAX

FILE_CHARS_MAX: Final = 1 << 20
"""Whoever reads a file reads no more than this and one, so that a wrong file costs no memory."""
READINGS_MAX: Final = 16_384
LINE_CHARS_MAX: Final = 512
OVERFULL_MAX: Final = 2
"""A driver may show more used than there is, for shared or swapped memory, but hardly more than twice as much."""

USED_WANTS: Final = f"{SIZE_WANTS}, or a share of TOTAL such as 75%"

_SHARE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)%")
_SHOWN_CHARS_MAX = 64


@dataclass(frozen=True, slots=True)
class DrillReading:
    """At `at_s` seconds after a drill's begin, `gauge` shows `used_bytes` of `total_bytes`."""

    at_s: float
    gauge: str
    used_bytes: int
    total_bytes: int


def read_gauges(text: str) -> dict[str, tuple[int, int]]:
    """(used_bytes, total_bytes) by gauge, in the order of the lines; none for a text without lines.

    Raises BadGaugeFile, which names line, field, value and what is wanted.
    """
    gauges: dict[str, tuple[int, int]] = {}
    for number, fields in _lines(text, ("NAME", "USED", "TOTAL"), GAUGES_MAX):
        name = _name(number, fields[0])
        if name in gauges:
            _refuse(number, "NAME", name, "a gauge that stands in no line before")
        gauges[name] = _reading(number, fields[1], fields[2])
    return gauges


def read_drill(text: str) -> list[DrillReading]:
    """A drill's readings, in the order of the lines, which is that of time; none for a text without lines.

    Readings of several gauges may stand at the same second, one of each.

    Raises BadGaugeFile, which names line, field, value and what is wanted.
    """
    readings: list[DrillReading] = []
    together: set[str] = set()  # gauges that have a reading at the last second
    for number, fields in _lines(text, ("SECONDS", "NAME", "USED", "TOTAL"), READINGS_MAX):
        at_s = _seconds(number, fields[0])
        name = _name(number, fields[1])
        if readings and at_s < readings[-1].at_s:
            _refuse(number, "SECONDS", fields[0], f"no less than the {readings[-1].at_s:g} of the line before")
        if not readings or at_s > readings[-1].at_s:
            together.clear()
        if name in together:
            _refuse(number, "NAME", name, f"a gauge that has no reading at {at_s:g} s yet")
        together.add(name)
        readings.append(DrillReading(at_s, name, *_reading(number, fields[2], fields[3])))
    return readings


def _lines(text: str, wanted: tuple[str, ...], lines_max: int) -> Iterator[tuple[int, list[str]]]:
    """The lines that say something, by number, in fields."""
    if len(text) > FILE_CHARS_MAX:
        raise BadGaugeFile(f"a gauge file of more than {FILE_CHARS_MAX} characters: is it the right one?")
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        fields = line[: LINE_CHARS_MAX + 1].split("#", 1)[0].split()
        if not fields:
            continue
        if len(line) > LINE_CHARS_MAX:
            raise BadGaugeFile(f"line {number}: {len(line)} characters; at most {LINE_CHARS_MAX} may stand in one")
        if len(fields) != len(wanted):
            shown = _shown(" ".join(fields))
            raise BadGaugeFile(f"line {number}: {shown} has {len(fields)} fields; wanted: {' '.join(wanted)}")
        count += 1
        if count > lines_max:
            raise BadGaugeFile(f"line {number}: more than {lines_max} readings")
        yield number, fields


def _name(number: int, given: str) -> str:
    if len(given) > GAUGE_CHARS_MAX or not given.isprintable():
        _refuse(number, "NAME", given, f"a gauge's name: printable, {GAUGE_CHARS_MAX} characters at most")
    return given


def _seconds(number: int, given: str) -> float:
    try:
        at_s = read_duration(given)
    except (ValueError, OverflowError):
        at_s = -1.0
    if not 0 <= at_s <= DURATION_S_MAX:
        _refuse(number, "SECONDS", given, f"{DURATION_WANTS}, {DURATION_S_MAX:.0f} s at most")
    return at_s


def _reading(number: int, used: str, total: str) -> tuple[int, int]:
    total_bytes = _size(number, "TOTAL", total, SIZE_WANTS)
    if not 1 <= total_bytes <= SIZE_BYTES_MAX:
        _refuse(number, "TOTAL", total, f"from 1 to {SIZE_BYTES_MAX} bytes")
    share = _SHARE.fullmatch(used)
    if share is not None:
        used_bytes = round(Decimal(share[1]) * total_bytes / 100)
    else:
        used_bytes = _size(number, "USED", used, USED_WANTS)
    most = min(OVERFULL_MAX * total_bytes, SIZE_BYTES_MAX)
    if used_bytes > most:
        _refuse(number, "USED", used, f"{most} bytes at most, for a TOTAL of {total}")
    return used_bytes, total_bytes


def _size(number: int, field: str, given: str, wants: str) -> int:
    try:
        return read_size(given)
    except (ValueError, OverflowError):  # of hundreds of digits
        _refuse(number, field, given, wants)


def _refuse(number: int, field: str, given: str, wants: str) -> NoReturn:
    raise BadGaugeFile(f"line {number}: {field} = {_shown(given)}; wanted: {wants}")


def _shown(given: str) -> str:
    return repr(given) if len(given) <= _SHOWN_CHARS_MAX else f"{given[:_SHOWN_CHARS_MAX]!r}…"
