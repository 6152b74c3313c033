"""Suppresses repeated log lines: a peer that retries every second gets one line, not one a second.

Owns: the record of recent events. Does not own the log. Invariant: it remembers at most `most` events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

FORGOTTEN_S: Final = 600.0
MOST: Final = 1024


class Repeats:
    """The recent events.

    Args:
        forgotten_s: an event that did not happen for this time is new again.
        most: the most events that are remembered. The oldest are forgotten first.
    """

    def __init__(self, forgotten_s: float = FORGOTTEN_S, most: int = MOST) -> None:
        self._forgotten_s = forgotten_s
        self._most = most
        self._last: OrderedDict[Hashable, float] = OrderedDict()

    def is_new(self, what: Hashable, now: float) -> bool:
        """Records that the event `what` happens now. Returns True if it did not happen in the last `forgotten_s`."""
        last = self._last.pop(what, None)
        self._last[what] = now
        if len(self._last) > self._most:
            self._last.popitem(last=False)
        return last is None or now - last > self._forgotten_s
