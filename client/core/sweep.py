"""Takes lane words back that an exception of a signal handler's has lost.

A handler's exception may be raised between any two instructions, within a get after it took a word, or in a finalizer
before it gave one back. Such a word would be used up for ever, and what it pins with it. No code of a get can prevent
that; so a link's thread looks once a second for words that nobody has.

Owns: when lanes are swept, and the look at what other threads are in. Does not own how a lane finds such words.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Final
from weakref import WeakKeyDictionary

from ...shm.lanes import HOLDING, Lane
from . import forks
from .view import View

SWEEP_EVERY_S: Final = 1.0
_CODE: Final = HOLDING | {f.__code__ for f in (View.get, View._pinned, View._pinned_many)}
_sweeping = threading.Lock()
_strays: WeakKeyDictionary[Lane, set[int]] = WeakKeyDictionary()
_sweep_at = 0.0


def sweep_now_and_then() -> None:
    """`sweep`, unless one was made less than SWEEP_EVERY_S ago. For a link's thread, which pins nothing itself."""
    global _sweep_at
    now = time.monotonic()
    if now < _sweep_at or not _sweeping.acquire(blocking=False):
        return
    try:
        _sweep_at = now + SWEEP_EVERY_S
        sweep()
    finally:
        _sweeping.release()


def sweep() -> int:
    """Looks at all lanes of the process; one call at a time, from a thread that is in no get.

    Only words that the sweep before has found already are taken back, so that a lane is not suspended for words that a
    thread is about to tie.

    Returns:
        How many words were taken back.
    """
    found = 0
    for lane in forks.lanes():
        strays = lane.strays() if lane.in_use and not lane.frozen else set()
        lost = strays & _strays.get(lane, set())
        _strays[lane] = strays
        if lost:
            with forks.none_under_way() as quiet:
                found += lane.reclaim(lost, _nobody_holds_words) if quiet else 0
    return found


def _nobody_holds_words() -> bool:
    # One call gives the frames of all threads as they are at one moment.
    frames: dict[int, FrameType] = sys._current_frames()
    # This function's frame would hold the table, and the table the frame: until the cycle collector ran, whatever the
    # other threads' frames hold would live.
    del frames[threading.get_ident()]
    for top in frames.values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code in _CODE:
                return False
            frame = frame.f_back
    return True
