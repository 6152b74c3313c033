"""A signal ends a long run of `make` cleanly: its `with` blocks clear up."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
