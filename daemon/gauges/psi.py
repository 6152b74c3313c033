"""A stall trigger: the kernel reports when tasks have waited for memory (PSI).

Then a sample is taken at once, because the OOM killer does not wait for the next one.

Owns: one trigger on a pressure file, and the thread that waits for it. Does not own the reaction (the callback).

The window of the trigger is 2 s. For windows of a multiple of 2 s the kernel allows triggers to unprivileged processes
(since 6.5). Each window has at most one event. Source: Documentation/accounting/psi.rst of the kernel.

Invariant: no callback runs after `stop` has returned, unless the thread did not end within 5 s.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from .sources.host import HostSource

STALL_S: Final = 0.15
"""Seconds in which tasks waited for memory, within a window, after which a sample is taken at once."""
WINDOW_S: Final = 2.0
_JOIN_S: Final = 5.0


class StallTrigger:
    """Calls back when some task waited for memory for STALL_S within 2 s.

    If the kernel refuses the trigger, this is logged, and samples are taken at their interval only.

    Args:
        callback: called in this object's thread. Must not block.
        log: a structlog logger.
        files: pressure files; the first usable one is taken. None: that of the cgroup whose limit is in use, then the
            machine's.
        arm: opens a pressure file and sets the trigger (the stall in µs). POLLPRI on the descriptor is an event.
    """

    def __init__(
        self,
        callback: Callable[[], object],
        log: Any,
        files: Sequence[Path] | None = None,
        arm: Callable[[Path, int], int] | None = None,
    ) -> None:
        self._callback = callback
        self._log = log
        self._files = files
        self._arm = _armed if arm is None else arm
        self._stop: int | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Sets the trigger and starts the thread that waits for it."""
        if self._thread is not None:
            return
        refusals = []
        for file in HostSource().pressure_files() if self._files is None else self._files:
            try:
                fd = self._arm(file, round(STALL_S * 1e6))
            except OSError as error:
                refusals.append(str(error))
                continue
            try:
                self._begin(fd, file)
            except (OSError, RuntimeError) as error:
                # No descriptor, or no thread.
                os.close(fd)
                refusals.append(str(error))
                break
            self._log.info("stall trigger set", file=str(file), stall_s=STALL_S, window_s=WINDOW_S)
            return
        self._log.info("no stall trigger; samples at intervals only", why="; ".join(refusals) or "no pressure file")

    def stop(self) -> None:
        """Ends the trigger. The callback is not called after this. Does nothing if the trigger is not set."""
        thread, stop = self._thread, self._stop
        if thread is None or stop is None:
            return
        self._thread = self._stop = None
        os.eventfd_write(stop, 1)
        thread.join(_JOIN_S)
        if not thread.is_alive():
            os.close(stop)

    def _begin(self, fd: int, file: Path) -> None:
        """Starts the thread, which owns `fd` from then on."""
        stop = os.eventfd(0, os.EFD_CLOEXEC)
        thread = threading.Thread(target=self._wait, args=(fd, stop, file), name="tensord-stalls", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            os.close(stop)
            raise
        self._stop, self._thread = stop, thread

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
                    self._log.warning(
                        "stall trigger ended; samples at intervals only", file=str(file), why="the kernel removed it"
                    )
                    return
                self._callback()
        except Exception as error:
            self._log.warning(
                "stall trigger ended; samples at intervals only",
                file=str(file),
                why=f"{type(error).__name__}: {error}",
            )
        finally:
            os.close(fd)


def _armed(file: Path, stall_us: int) -> int:
    fd = os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # The kernel overwrites the last byte of the text with a NUL.
        os.write(fd, f"some {stall_us} {round(WINDOW_S * 1e6)}\0".encode())
    except BaseException:
        os.close(fd)
        raise
    return fd
