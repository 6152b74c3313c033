"""What commands print: a document as JSON, or text within 100 columns made of it: sizes, ages, counts and tables.

Owns: these formats. Does not own: which rows a document has (the commands).
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import click

from ...ipc.quantities import rounded_size

WIDTH: Final = 100
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

_NAME_CHARS_MAX: Final = 24
_NAMES: Final = ("client", "epoch", "lane", "owner_uid", "pid", "uid", "worth")
"""Numbers that are names or ranks, and no counts."""

size = rounded_size


def show(document: Any, as_json: bool, text: Callable[[Any], str]) -> None:
    click.echo(json.dumps(document, indent=2) if as_json else text(document))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns under `head`; to the right where a head begins with ">". None is shown as "-"."""
    lines = [[name.removeprefix(">") for name in head]]
    lines += [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    columns = []
    for name, column in zip(head, zip(*lines, strict=True), strict=True):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if name.startswith(">") else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values in two columns. A long value continues below itself; a longer word stays whole."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    lines = []
    for name, text in listed:
        said = textwrap.wrap(printable(text), WIDTH - width - 2, break_long_words=False, break_on_hyphens=False)
        lines += [f"{'' if at else name:<{width}}  {line}".rstrip() for at, line in enumerate(said or [""])]
    return "\n".join(lines)


def document(body: Mapping[str, Any]) -> str:
    """All fields of a document that have a value, each in words behind its name and those of the parts around it."""
    return pairs(_fields("", Words(body)))


def _fields(within: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Words):
        for field in value:
            if value.get(field) not in (None, ""):
                yield from _fields(f"{within} {field}".lstrip(), value[field])
    elif isinstance(value, list):
        for each in value:
            yield from _fields(within, each)
    else:
        yield within, str(value)


def age(seconds: float) -> str:
    """A duration in its two largest units, for example "3m12s"; under a second in milliseconds, for example "40 ms".
    Negative durations give "0s"."""
    if 0 < seconds < 1:
        return f"{int(1000 * seconds)} ms" if seconds >= 0.001 else "<1 ms"
    minutes, s = divmod(max(0, int(seconds)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h" if days < 1000 else f"{days}d"
    if hours:
        return f"{h}h{m:02}m"
    return f"{m}m{s:02}s" if minutes else f"{s}s"


class Words(dict[str, Any]):
    """A document's fields in words, by their names: bytes as sizes, seconds as durations, Unix seconds as local times,
    floats as shares."""

    def __init__(self, body: Mapping[str, Any], within: str = "") -> None:
        super().__init__(body)
        self._body = body
        self._within = within

    def __getitem__(self, field: str) -> Any:
        value, unit = self._body[field], field if field.endswith("_s") or "bytes" in field else self._within
        if isinstance(value, dict):
            return Words(value, unit)
        if isinstance(value, list):
            return [Words(each, unit) if isinstance(each, dict) else each for each in value]
        if value is None or isinstance(value, str) or field in _NAMES:
            return "unknown" if value in (None, "") else value
        if isinstance(value, bool):
            return "yes" if value else "no"
        if field.endswith("_unix_s"):
            return local_time(value)
        if field.endswith("_ms"):
            return f"{value:g} ms"
        if isinstance(value, float) and not unit:
            return share(value, 1)
        return size(value) if "bytes" in unit else age(value) if unit else number(value)

    def __str__(self) -> str:
        return counts(self._body)


def local_time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def words(body: Mapping[str, Any], template: str) -> str:
    """The template with the document's fields in words, for example "{entries} of {max_entries}, {used_bytes}"."""
    return template.format_map(Words(body))


def parts(body: Mapping[str, Any], templates: Mapping[str, str]) -> str:
    """The templates of those fields that are neither 0, false, empty nor missing."""
    return "".join(words(body, template) for field, template in templates.items() if body.get(field))


def number(value: int) -> str:
    return f"{value:,}"


def counted(value: int, one: str, many: str) -> str:
    """A count with its noun, for example "1 entry" or "1,200 entries"."""
    return f"{number(value)} {one if value == 1 else many}"


def share(part: float, whole: float) -> str:
    """A percentage; "-" if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def counts(by_name: Mapping[str, int]) -> str:
    """A dict of counts in one line, for example "ttl 3, explicit 1"; "none" if all are 0."""
    return ", ".join(f"{name} {number(value)}" for name, value in by_name.items() if value) or "none"


def name(text: str) -> str | None:
    """A client's name, cut to what a column has room for; None without one."""
    return text if len(text) <= _NAME_CHARS_MAX else text[: _NAME_CHARS_MAX - 3] + "..." if text else None


def printable(text: str) -> str:
    """The text with unprintable characters replaced, so that a client's name cannot control the reader's terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
