"""Recovers lane words that an exception of a signal handler has leaked.

Such an exception may come between any two instructions: in a get after it took a word, or in a finalizer before it gave
one back. The word, and the pin in it, would be lost for the life of the process. The code of a get cannot prevent this,
so the link's thread looks for leaked words once a second.

Invariants: a word is taken back only if two sweeps in a row found it, and no thread is in a function that holds words.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Final
from weakref import WeakKeyDictionary

from ...shm.lanes.lane import HOLDING, Lane
from ..threads import forks
from .view import View

SWEEP_EVERY_S: Final = 1.0
_CODE: Final = HOLDING | {f.__code__ for f in (View.get, View._pinned, View._pinned_many)}
_sweeping = threading.Lock()
_strays: WeakKeyDictionary[Lane, set[int]] = WeakKeyDictionary()
_sweep_at = 0.0


def sweep_now_and_then() -> None:
    """Calls `sweep`, unless the last call was less than SWEEP_EVERY_S ago. For a link's thread, which pins nothing."""
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
    """Sweeps all lanes of the process, and returns how many words were taken back. Call it from a thread that is not in
    a get. Takes back only words that the last sweep found too, so no lane is suspended for a word that is about to be
    tied."""
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
    # One call returns the frames of all threads at one moment.
    frames: dict[int, FrameType] = sys._current_frames()
    # Breaks the cycle of this frame and the table. Until the cycle collector ran, it would keep the objects in all
    # threads' frames alive.
    del frames[threading.get_ident()]
    for top in frames.values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code in _CODE:
                return False
            frame = frame.f_back
    return True
