"""Times single hits of the program, about one a second.

A hit takes a microsecond or two, so it has no room for a clock, a counter or even a branch. Instead the view's class is
exchanged for one lookup: `arm` makes the view a TimedView, whose `get` makes it a View again and times the lookup. All
other lookups run the code of `View.get` as it stands.

Owns: which hits are timed. Does not own: the lookup (view.py), the log of times in the lane (`shm.lanes`).
Invariants: a TimedView times one lookup at most. A hit is counted once, timed or not. Nothing here waits or locks.
"""

from __future__ import annotations

import time
from typing import Final

from .lease import Lease
from .view import View

TIME_EVERY_S: Final = 1.0
SKIPPED_MAX: Final = 64
"""Lookups that pass before the timed one are fewer than this. The first lookup after a pause is slower than those that
follow it, and should not be the only one that is timed."""


class TimedView(View):
    """A View that times one of its next lookups by `get`, if it is a hit. Views become it by `arm` alone."""

    __slots__ = ()

    def get(self, key: bytes) -> Lease | None:
        """As View.get."""
        if self.skipped > 0:
            self.skipped -= 1
            return View.get(self, key)
        self.__class__ = View  # type: ignore[assignment]
        began_ns = time.perf_counter_ns()
        lease = View.get(self, key)
        took_ns = time.perf_counter_ns() - began_ns
        if lease is not None:
            self.lane.log_time(took_ns)
        return lease


def arm(view: View, skipped: int) -> None:
    """Has `view` time the lookup that follows the next `skipped` ones."""
    view.skipped = skipped
    # Last: from here on lookups run TimedView.get.
    view.__class__ = TimedView


def arm_now_and_then(view: View | None) -> None:
    """Arms `view`, unless it is armed, or the last call that armed it was less than TIME_EVERY_S ago. For a link's
    thread."""
    now = time.monotonic()
    if view is not None and type(view) is View and now >= view.time_at:
        view.time_at = now + TIME_EVERY_S
        arm(view, time.perf_counter_ns() // 1000 % SKIPPED_MAX)
