"""What the long runs of `make` share: their numbers are checked before anything runs, and a signal ends them cleanly.

Owns: types for argparse, whose messages name the value, the limit and what to do, and the handlers of SIGTERM, SIGINT
and SIGHUP. Does not own what a run has to clear up: its `with` blocks do.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from _thread import start_new_thread
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

MINUTES_MAX: Final = 60.0 * 24 * 30
_AGAIN_S: Final = 10.0
_LOST_S: Final = 0.01
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def whole(least: int, most: int = (1 << 63) - 1) -> Callable[[str], int]:
    """A type for argparse: a whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one from {least} up") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; give a whole number from {least} up")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is too large; give a whole number of at most {most}")
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
    """From now on a signal that would end this process raises SystemExit where it is, so that `with` blocks clear up.

    `timeout`, make and a terminal each send a signal to the whole process group, and so more than one: for ten seconds
    after the first the others pass. Where Python only prints an exception, as in a finalizer or in a hook of a fork,
    the signal is sent again until it arrives elsewhere.
    """
    first_at = -math.inf
    ending: SystemExit | None = None
    before = sys.unraisablehook

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal first_at, ending
        if time.monotonic() - first_at <= _AGAIN_S:
            return
        first_at = time.monotonic()
        while frame is not None and frame.f_code is not lost.__code__:
            frame = frame.f_back
        if frame is not None:
            # The hook loses an exception as well.
            start_new_thread(again, (number,))
            return
        ending = SystemExit(128 + number)
        raise ending

    def lost(error: sys.UnraisableHookArgs) -> None:
        if ending is None or error.exc_value is not ending:
            before(error)
            return
        # From a thread, and later: a handler that runs here is within the finalizer still. Thread.start takes a lock,
        # which the code that was interrupted may hold.
        start_new_thread(again, (int(ending.code or 0) - 128,))

    def again(number: int) -> None:
        nonlocal first_at
        time.sleep(_LOST_S)
        first_at = -math.inf
        os.kill(os.getpid(), number)

    sys.unraisablehook = lost
    for number in SIGNALS:
        signal.signal(number, leave)
