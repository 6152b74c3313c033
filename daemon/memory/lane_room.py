"""Reports whether there is memory for the next client's lane, while /dev/shm is full or the machine lacks memory.

Owns: the state "short of memory for lanes". It begins with the first client that is refused for lack of memory, and
ends once there is room again. Does not own the lanes.

Invariant: the start and the end of that state are logged once each.
"""

from __future__ import annotations

from typing import Final

from ...errors import NotEnoughMemory
from ...shm.ring import segments
from ...shm.ring.layout import LANE_BYTES
from ..process.logs import logger

_REMEDY: Final = (
    ": new clients are refused; remount /dev/shm with a larger size=, remove unused files from it, or let the daemon "
    "return memory with `tensorctl limit SIZE`"
)
_log = logger("store")


class LaneRoom:
    """The state of one daemon."""

    def __init__(self) -> None:
        self._short = False

    def refused(self, error: NotEnoughMemory) -> None:
        """Call when a client was refused because its lane could not be allocated."""
        if not self._short:
            self._short = True
            _log.error("new clients are refused: no memory for a lane", why=str(error))

    def made(self) -> None:
        """Call when a lane was allocated, or when there is room for one."""
        if self._short:
            self._short = False
            _log.info("new clients are accepted again: there is memory for a lane")

    def problem(self) -> str | None:
        """Why the next client would be refused; None if it would be accepted. Reads files of /proc and /sys."""
        try:
            segments.check_memory(LANE_BYTES, "the lane of the next client", _REMEDY)
        except NotEnoughMemory as error:
            return str(error)
        self.made()
        return None
