"""What was logged of a peer lately: one that tries again every second gets one line, and not one a second.

Owns: what counts as said. Invariant: it remembers at most `most` things.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

FORGOTTEN_S: Final = 600.0
MOST: Final = 1024


class Repeats:
    """Args:
    forgotten_s: what did not happen for so long is new again.
    """

    def __init__(self, forgotten_s: float = FORGOTTEN_S, most: int = MOST) -> None:
        self._forgotten_s = forgotten_s
        self._most = most
        self._last: OrderedDict[Hashable, float] = OrderedDict()

    def is_new(self, what: Hashable, now: float) -> bool:
        """Whether `what` is to be said: it happens, and had not for `forgotten_s`."""
        last = self._last.pop(what, None)
        self._last[what] = now
        if len(self._last) > self._most:
            self._last.popitem(last=False)
        return last is None or now - last > self._forgotten_s
