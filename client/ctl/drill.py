"""`drill`: sends simulated readings of gauges, to see their effect, or the effect that they would have.

Owns: the time at which each reading is sent, and the line that shows its effect. Does not own: the file's format
(ipc/gaugefile), nor the effect (the daemon's governor).

Invariants: no reading is sent before the whole file was read and checked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import click

from ...errors import BadGaugeFile
from ...ipc import messages
from ...ipc.gaugefile import FILE_CHARS_MAX, DrillReading, read_drill
from ...ipc.modes import HOST_GAUGE
from .daemon import Daemon, pass_daemon, understood
from .parameters import FILE_OR_DASH, Factor
from .tables import age, counted, number, printable, share, size

_HEAD: Final = ("AT", "GAUGE", "USED", "SHARE", "MODE", "CONSEQUENCE")
_WIDTHS: Final = (7, 14, 10, 7, 26)
_SPEED_MIN, _SPEED_MAX = 0.001, 1e6
_STDIN: Final = "-"


def readings_of(file: Path) -> list[DrillReading]:
    """The drill's readings. `-` is standard input.

    Raises:
        BadParameter: the file cannot be read, or has an invalid line; the message names the line.
    """
    try:
        if str(file) == _STDIN:
            text = sys.stdin.read(FILE_CHARS_MAX + 1)
        else:
            with file.open(encoding="utf-8") as opened:
                text = opened.read(FILE_CHARS_MAX + 1)
        found = read_drill(text)
        if not found:
            raise BadGaugeFile("no line is a reading: SECONDS NAME USED TOTAL")
    except OSError as error:
        raise _refused(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _refused(f"{file}: not UTF-8 text") from None
    except BadGaugeFile as error:
        raise _refused(f"{file}: {error}") from None
    return found


def _refused(why: str) -> click.BadParameter:
    return click.BadParameter(why, param_hint="'FILE'")


def heading(readings: Sequence[DrillReading], *, act: bool, speed: float, there: Sequence[str] | None = None) -> str:
    """The announcement of the drill, and the table's head. `there`: the names of the daemon's gauges, if known."""
    gauges = sorted({reading.gauge for reading in readings})
    named = ", ".join(map(printable, gauges))
    if there is not None and (unknown := [printable(gauge) for gauge in gauges if gauge not in there]):
        # A user who plays the example unchanged learns the names of the gauges here.
        known = ", ".join(map(printable, there)) or "none"
        named += f" (no gauge here is called {', '.join(unknown)}; there is {known})"
    lasts = age(readings[-1].at_s / speed)
    count = counted(len(readings), "made-up reading", "made-up readings")
    if act:
        said = (
            f"ACTING: {count} {'replaces' if len(readings) == 1 else 'replace'} {named} for {lasts}. Entries are "
            "evicted and puts refused, as if they were true. When this command ends, for any reason, the gauge's own "
            "readings apply again."
        )
    else:
        said = f"Asking only: {count} of {named}, {lasts}. Nothing changes without --act."
    return f"{said}\n\n{_row(_HEAD)}"


def line(reading: DrillReading, drilled: messages.Drilled) -> str:
    """One reading and its effect. The line has 100 columns at most, except for the last column."""
    mode = drilled.state.mode.value
    if drilled.before is not drilled.state.mode:
        mode = f"{drilled.before.value} -> {mode}"
    return _row(
        (
            f"{reading.at_s:.1f}s",
            printable(reading.gauge),
            size(reading.used_bytes),
            share(reading.used_bytes, reading.total_bytes),
            mode,
            consequences(drilled),
        )
    )


def consequences(drilled: messages.Drilled) -> str:
    """The present or possible effect: "offload 12 (240 MiB), drop 3 (1.00 MiB)"; "-" for none."""
    found = []
    if drilled.offload_entries:
        found.append(f"offload {number(drilled.offload_entries)} ({size(drilled.offload_bytes)})")
    if drilled.drop_entries:
        found.append(f"drop {number(drilled.drop_entries)} ({size(drilled.drop_bytes)})")
    if drilled.shrink_bytes:
        found.append(f"ring gives back {size(drilled.shrink_bytes)}")
    if drilled.state.refuses:
        found.append("puts refused" if drilled.state.gauge == HOST_GAUGE else "registrations refused")
    return ", ".join(found) or "-"


def _row(cells: Sequence[str]) -> str:
    *left, last = cells
    return "  ".join([*(cell.ljust(width) for cell, width in zip(left, _WIDTHS, strict=True)), last]).rstrip()


@click.command()
@click.argument("file", type=FILE_OR_DASH)
@click.option("--act", is_flag=True, help="Let the readings take effect until the command ends.")
@click.option("--speed", type=Factor(_SPEED_MIN, _SPEED_MAX), default=1.0, metavar="N", help="Play N times as fast.")
@pass_daemon
def drill(daemon: Daemon, file: Path, act: bool, speed: float) -> None:
    """Plays simulated readings of gauges, and shows the resulting mode and evictions.

    \b
    FILE has one reading a line, in the order of time; - is standard input. A fall needs two.
        # SECONDS  NAME          USED  TOTAL
        0          host          50%   64GiB
        2.5        0000:65:00.0  97%   80GiB

    Without --act nothing changes. With --act, entries are offloaded and dropped and registrations refused as if the
    readings were true, until this command ends, by Ctrl-C too.
    """
    readings = readings_of(file)
    daemon.greeted()
    with understood("status"):
        there = [gauge["gauge"] for gauge in daemon.status()["governor"]["gauges"]]
    click.echo(heading(readings, act=act, speed=speed, there=there))
    began = time.monotonic()
    for reading in readings:
        time.sleep(max(0.0, began + reading.at_s / speed - time.monotonic()))
        make = partial(
            messages.Drill,
            gauge=reading.gauge,
            used_bytes=reading.used_bytes,
            total_bytes=reading.total_bytes,
            act=act,
        )
        click.echo(line(reading, daemon.order(make, messages.Drilled)))
    if act:
        click.echo("\nThe drill has ended. The gauges' own readings apply again.")
