"""The kernel tells when tasks have stood still, waiting for memory: the OOM killer does not wait for the next sample.

Owns: one trigger on a pressure file (PSI), and the thread that waits for it. Does not own what is done then.

A trigger's window is 2 s: of such windows the kernel lets an unprivileged process have its own (since 6.5). At most one
event comes in each. Source: Documentation/accounting/psi.rst of the kernel.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from .host import HostSource

WINDOW_S: Final = 2.0
_JOIN_S: Final = 5.0


class StallTrigger:
    """Calls back when some task stood still for `stall_s` within 2 s.

    Where the kernel or its permissions refuse, the log says so and samples come at their pace alone.

    Args:
        stall_s: at most 2 s; 0: no trigger.
        callback: called in a thread of this object's; must not block.
        log: a structlog logger.
        files: pressure files, the first that can be had counts; None: that of the cgroup whose limit counts, then the
            machine's.
        arm: opens one and sets the trigger (its stall in µs); what polls urgent counts as an event.
    """

    def __init__(
        self,
        stall_s: float,
        callback: Callable[[], object],
        log: Any,
        files: Sequence[Path] | None = None,
        arm: Callable[[Path, int], int] | None = None,
    ) -> None:
        self._stall_s = stall_s
        self._callback = callback
        self._log = log
        self._files = files
        self._arm = _armed if arm is None else arm
        self._stop: int | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Sets the trigger, and begins to wait for it."""
        if self._stall_s <= 0 or self._thread is not None:
            return
        refusals = []
        for file in HostSource().pressure_files() if self._files is None else self._files:
            try:
                fd = self._arm(file, max(1, round(self._stall_s * 1e6)))
            except OSError as error:
                refusals.append(str(error))
                continue
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = threading.Thread(
                target=self._wait, args=(fd, self._stop, file), name="tensord-stalls", daemon=True
            )
            self._thread.start()
            self._log.info("stall trigger set", file=str(file), stall_s=self._stall_s, window_s=WINDOW_S)
            return
        self._log.info("no stall trigger", why="; ".join(refusals) or "there is no pressure file")

    def stop(self) -> None:
        """Ends the trigger; no call comes after this. Again, or without start, it does nothing."""
        thread, stop = self._thread, self._stop
        if thread is None or stop is None:
            return
        self._thread = self._stop = None
        os.eventfd_write(stop, 1)
        thread.join(_JOIN_S)
        if not thread.is_alive():
            os.close(stop)

    def _wait(self, fd: int, stop: int, file: Path) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLPRI)
        poll.register(stop, select.POLLIN)
        try:
            while True:
                ready = dict(poll.poll())
                if stop in ready:
                    return
                if ready[fd] & (select.POLLERR | select.POLLNVAL):
                    self._log.warning("stall trigger gone", file=str(file), why="the kernel took it away")
                    return
                self._callback()
        except Exception as error:
            self._log.warning("stall trigger gone", file=str(file), why=f"{type(error).__name__}: {error}")
        finally:
            os.close(fd)


def _armed(file: Path, stall_us: int) -> int:
    fd = os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # The kernel overwrites the last byte with a NUL of its own.
        os.write(fd, f"some {stall_us} {round(WINDOW_S * 1e6)}\0".encode())
    except BaseException:
        os.close(fd)
        raise
    return fd
