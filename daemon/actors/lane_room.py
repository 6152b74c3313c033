"""Whether the next client gets a lane: what is said while /dev/shm is full, or the machine short of memory.

Owns: the episode, from the first client refused for want of memory to the first moment with room: logged once at either
end. Does not own the lanes.
"""

from __future__ import annotations

from typing import Final

from ...errors import NotEnoughMemory
from ...shm import segments
from ...shm.layout import LANE_BYTES
from ..logs import logger

_REMEDY: Final = (
    ": new clients are refused; remount /dev/shm with a larger size=, free what others left there, or have the daemon "
    "give memory back with `tensorctl limit SIZE`"
)
_log = logger("store")


class LaneRoom:
    """One daemon's."""

    def __init__(self) -> None:
        self._short = False

    def refused(self, error: NotEnoughMemory) -> None:
        """A client was refused."""
        if not self._short:
            self._short = True
            _log.error("a client is refused for want of memory", why=str(error))

    def made(self) -> None:
        """A lane was made, or there is room for one."""
        if self._short:
            self._short = False
            _log.info("there is memory for clients again")

    def problem(self) -> str | None:
        """Why the next client would be refused; None where it would not. Reads files of /proc and /sys."""
        try:
            segments.check_memory(LANE_BYTES, "the lane of the next client", _REMEDY)
        except NotEnoughMemory as error:
            return str(error)
        self.made()
        return None
