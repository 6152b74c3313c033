"""A client's baselines: how much of each device it holds by plan.

Owns: the declarations, and their repetition at each new daemon. Does not own: what follows from them (the daemon's).
Invariants: the daemon has the last declaration of each device, or gets it as soon as it is there.
"""

from __future__ import annotations

import os

from ...errors import Unavailable
from ...ipc.messages import control as messages
from ...ipc.messages.schema import SIZE_BYTES_MAX
from ..arguments.checks import check_count, check_name
from ..link.link import SAY_S, Connected, Link
from .modes import GovernorListener


class DeclaredBaselines:
    """The declarations of one client. The governor's listener refers to them once there is one."""

    def __init__(self, link: Link, governor: GovernorListener) -> None:
        self._link = link
        self._governor = governor
        self._declared: dict[str, int] = {}
        self._pid = os.getpid()

    def declare(self, device: str, size_bytes: int, timeout_s: float) -> None:
        """See `Client.declare_baseline`."""
        check_name("device", device)
        size_bytes = check_count("size_bytes", size_bytes, SIZE_BYTES_MAX)
        if self._pid != os.getpid():  # what the parent of a fork holds is not the child's
            self._pid, self._declared = os.getpid(), {}
        if not self._declared:
            self._governor.restore(self)
        before = self._declared.get(device)
        self._declared[device] = size_bytes
        connected = self._link.attached
        if connected is None:
            return
        asked = self._link.ask(
            lambda number: messages.DeclareBaseline(number, device, size_bytes), timeout_s, connected=connected
        )
        try:
            self._link.answers.wait(asked, timeout_s)
        except Unavailable:
            return
        except BaseException:
            if before is None:
                del self._declared[device]
            else:
                self._declared[device] = before
            raise

    def register_again(self, connected: Connected) -> None:
        """Sends all declarations to a new daemon."""
        for device, size_bytes in list(self._declared.items()):
            self._link.ask(
                lambda number, device=device, size_bytes=size_bytes: messages.DeclareBaseline(  # type: ignore[misc]
                    number, device, size_bytes
                ),
                SAY_S,
                connected=connected,
            )
