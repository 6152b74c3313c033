"""What the long runs of `make` share: their numbers are checked before anything runs, and a signal ends them cleanly.

Owns: types for argparse, whose messages name the value, the limit and what to do, and the handlers of SIGTERM, SIGINT
and SIGHUP. Does not own what a run has to clear up: its `with` blocks do.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

MINUTES_MAX: Final = 60.0 * 24 * 30
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def whole(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number from `least` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one from {least} up") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; give a whole number from {least} up")
        return value

    return read


def minutes(text: str) -> float:
    """A type for argparse: minutes, more than 0 and at most 30 days."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MINUTES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to run; give minutes, above 0 and up to {MINUTES_MAX:g}")
    return value


def new_file(text: str) -> Path:
    """A type for argparse: where a file can be written at the end, in a folder that is there now."""
    path = Path(text)
    if not text or path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; give a file in a folder that is there and that you may write to"
        )
    return path


def end_cleanly() -> None:
    """From now on the first signal that would end this process raises SystemExit, so that `with` blocks clear up.

    `timeout`, make and a terminal each send a signal to the whole process group, and so more than one: the later ones
    are ignored.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in SIGNALS:
        signal.signal(number, leave)
