"""`drill`: sends simulated readings of gauges, to see their effect, or the effect that they would have.

Owns: the time at which each reading is sent, and the line that shows its effect. Does not own: the file's format
(ipc/gaugefile), nor the effect (the daemon's governor).

Invariants: no reading is sent before the whole file was read and checked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import click

from ....errors import BadGaugeFile
from ....ipc.gaugefile import FILE_CHARS_MAX, DrillReading, read_drill
from ....ipc.messages import control as messages
from ....ipc.messages.modes import HOST_GAUGE
from ..daemon import Daemon, pass_daemon
from ..output import age, counted, number, printable, share, size
from ..parameters import FILE

_ROW: Final = "{:<7}  {:<14}  {:<10}  {:<7}  {:<26}  {}"
_SPEED_MIN, _SPEED_MAX = 0.001, 1e6


def readings_of(file: Path) -> list[DrillReading]:
    """The drill's readings.

    Raises:
        BadParameter: the file cannot be read, or has an invalid line; the message names the line.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            if found := read_drill(opened.read(FILE_CHARS_MAX + 1)):
                return found
        why = "no line is a reading: SECONDS NAME USED TOTAL"
    except OSError as error:
        why = str(error.strerror)
    except UnicodeDecodeError:
        why = "not UTF-8 text"
    except BadGaugeFile as error:
        why = str(error)
    raise click.BadParameter(f"{file}: {why}", param_hint="'FILE'")


def heading(readings: Sequence[DrillReading], there: Sequence[str], *, act: bool, speed: float) -> str:
    """The announcement of the drill, and the table's head. `there`: the names of the daemon's gauges."""
    gauges = sorted({reading.gauge for reading in readings})
    named = ", ".join(map(printable, gauges))
    if unknown := [printable(gauge) for gauge in gauges if gauge not in there]:
        # A user who plays the example unchanged learns the names of the gauges here.
        known = ", ".join(map(printable, there)) or "none"
        named += f" (no gauge here is called {', '.join(unknown)}; there is {known})"
    lasts = age(readings[-1].at_s / speed)
    said = f"{counted(len(readings), 'made-up reading', 'made-up readings')} of {named}, {lasts}"
    if act:
        said = (
            f"ACTING: {said}. Entries are evicted and puts refused, as if they were true. When this command ends, for "
            "any reason, the gauge's own readings apply again."
        )
    else:
        said = f"Asking only: {said}. Nothing changes without --act."
    return f"{said}\n\n{_ROW.format('AT', 'GAUGE', 'USED', 'SHARE', 'MODE', 'CONSEQUENCE')}"


def line(reading: DrillReading, drilled: messages.Drilled) -> str:
    """One reading and its effect."""
    mode = drilled.state.mode.value
    if drilled.before is not drilled.state.mode:
        mode = f"{drilled.before.value} -> {mode}"
    found = []
    if drilled.offload_entries:
        found.append(f"offload {number(drilled.offload_entries)} ({size(drilled.offload_bytes)})")
    if drilled.drop_entries:
        found.append(f"drop {number(drilled.drop_entries)} ({size(drilled.drop_bytes)})")
    if drilled.shrink_bytes:
        found.append(f"ring gives back {size(drilled.shrink_bytes)}")
    if drilled.state.refuses:
        found.append("puts refused" if drilled.state.gauge == HOST_GAUGE else "registrations refused")
    used = share(reading.used_bytes, reading.total_bytes)
    shown = (f"{reading.at_s:.1f}s", printable(reading.gauge), size(reading.used_bytes), used, mode)
    return _ROW.format(*shown, ", ".join(found) or "-")


@click.command()
@click.argument("file", type=FILE)
@click.option("--act", is_flag=True, help="Let the readings take effect until the command ends.")
@click.option(
    "--speed", type=click.FloatRange(_SPEED_MIN, _SPEED_MAX), default=1.0, metavar="N", help="Play N times as fast."
)
@pass_daemon
def drill(daemon: Daemon, file: Path, act: bool, speed: float) -> None:
    """Plays simulated readings of gauges, and shows the resulting mode and evictions.

    \b
    FILE has one reading a line, in the order of time. A fall needs two.
        # SECONDS  NAME          USED  TOTAL
        0          host          50%   64GiB
        2.5        0000:65:00.0  97%   80GiB

    Without --act nothing changes. With --act, entries are offloaded and dropped and registrations refused as if the
    readings were true, until this command ends, by Ctrl-C too.
    """
    readings = readings_of(file)
    daemon.greeted()
    there = [gauge["gauge"] for gauge in daemon.status()["governor"]["gauges"]]
    click.echo(heading(readings, there, act=act, speed=speed))
    began = time.monotonic()
    for reading in readings:
        time.sleep(max(0.0, began + reading.at_s / speed - time.monotonic()))
        make = partial(
            messages.Drill, gauge=reading.gauge, used_bytes=reading.used_bytes, total_bytes=reading.total_bytes, act=act
        )
        click.echo(line(reading, daemon.order(make, messages.Drilled)))
    if act:
        click.echo("\nThe drill has ended. The gauges' own readings apply again.")
