"""Formatting for people: sizes, ages, counts, and tables that fit 100 columns.

Owns: these formats. Does not own: JSON for programs. Pure: text in, text out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from ...ipc.quantities import rounded_size

WIDTH: Final = 100
_DAYS_ALONE: Final = 1000
_COUNTED_IN_FULL: Final = 10_000
_ROUNDED_UP: Final = 999.95

size = rounded_size


def age(seconds: float) -> str:
    """A duration in its two largest units, for example "3m12s"; under a second in milliseconds, for example "40 ms".
    Negative durations give "0s"."""
    if 0 < seconds < 1:
        return f"{int(1000 * seconds)} ms" if seconds >= 0.001 else "<1 ms"
    left = max(0, int(seconds))
    days, left = divmod(left, 86400)
    hours, left = divmod(left, 3600)
    minutes, left = divmod(left, 60)
    if days:
        return f"{days}d{hours:02}h" if days < _DAYS_ALONE else f"{days}d"
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{left:02}s"
    return f"{left}s"


def number(value: int) -> str:
    """A count with separated thousands."""
    return f"{value:,}"


def counted(value: int, one: str, many: str) -> str:
    """A count with its noun, for example "1 entry" or "1,200 entries"."""
    return f"{number(value)} {one if value == 1 else many}"


def short(value: int) -> str:
    """A count in at most six characters, for columns: 9999, 12.3k, 1.2M."""
    if value < _COUNTED_IN_FULL:
        return str(value)
    for unit, times in (("k", 10**3), ("M", 10**6), ("G", 10**9)):
        if value < _ROUNDED_UP * times:
            return f"{value / times:.1f}{unit}"
    return f"{value / 10**12:.1f}T"


def share(part: float, whole: float) -> str:
    """A percentage; "-" if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def counts(by_name: dict[str, Any]) -> str:
    """A dict of counts in one line, for example "ttl 3, explicit 1"; "none" if all are 0."""
    return ", ".join(f"{name} {number(value)}" for name, value in by_name.items() if value) or "none"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns under `head`. Columns whose number is in `right` are right-aligned."""
    lines = [tuple(head), *(tuple(printable(cell) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values in two columns. A long value continues below itself."""
    listed = [(name, printable(text)) for name, text in rows]
    width = max((len(name) for name, _ in listed), default=0)
    lines = []
    for name, text in listed:
        first, *rest = wrapped(text, WIDTH - width - 2)
        lines.append(f"{name:<{width}}  {first}".rstrip())
        lines += [f"{'':<{width}}  {line}" for line in rest]
    return "\n".join(lines)


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most `width`, broken at blanks. A longer word stays whole. Returns at least one line."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def cut(text: str, chars_max: int, ending: str) -> str:
    """The printable text in at most `chars_max` characters. A longer text is cut, and ends with `ending`."""
    shown = printable(text)
    return shown if len(shown) <= chars_max else shown[: chars_max - len(ending)] + ending


def printable(text: str) -> str:
    """The text with unprintable characters replaced, so that a client's name cannot control the reader's terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
