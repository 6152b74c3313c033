"""A stall trigger: the kernel reports when tasks have waited for memory (PSI).

Then a sample is taken at once, because the OOM killer does not wait for the next one.

The window of the trigger is 2 s. For windows of a multiple of 2 s the kernel allows triggers to unprivileged processes
(since 6.5). Each window has at most one event. Source: Documentation/accounting/psi.rst of the kernel.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .sources.host import HostSource

STALL_S: Final = 0.15
"""Seconds in which tasks waited for memory, within a window, after which a sample is taken at once."""
WINDOW_S: Final = 2.0


async def watch_stalls(callback: Callable[[], object], log: Any) -> None:
    """Calls back when some task waited for memory for STALL_S within 2 s, until it is cancelled. `callback` must not
    block. The pressure file is that of the cgroup whose limit is in use, or else the machine's. If the kernel refuses
    both, this is logged, and samples are taken at their interval only."""
    refusals = []
    for file in HostSource().pressure_files():
        try:
            fd = _armed(file)
        except OSError as error:
            refusals.append(str(error))
            continue
        log.info("stall trigger set", file=str(file), stall_s=STALL_S, window_s=WINDOW_S)
        try:
            await _events(fd, callback)
            why = "the kernel removed it"
        except OSError as error:
            why = str(error)  # no descriptor
        finally:
            os.close(fd)
        log.warning("stall trigger ended; samples at intervals only", file=str(file), why=why)
        return
    log.info("no stall trigger; samples at intervals only", why="; ".join(refusals) or "no pressure file")


async def _events(fd: int, callback: Callable[[], object]) -> None:
    """Calls back at each event of a trigger, until the kernel removes it. asyncio waits for POLLIN only. So it waits
    for an epoll, which is readable when it has an event. The kernel hands an event out once, to the wait: the epoll
    itself may have none by then."""
    loop, removed = asyncio.get_running_loop(), asyncio.Event()
    with select.epoll() as events:
        events.register(fd, select.EPOLLPRI)

        def look() -> None:
            if any(what & select.EPOLLERR for _, what in events.poll(0)):
                removed.set()
            else:
                callback()

        loop.add_reader(events.fileno(), look)
        try:
            await removed.wait()
        finally:
            loop.remove_reader(events.fileno())


def _armed(file: Path) -> int:
    """A descriptor with the trigger set: POLLPRI on it is an event."""
    fd = os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # The kernel overwrites the last byte of the text with a NUL.
        os.write(fd, f"some {round(STALL_S * 1e6)} {round(WINDOW_S * 1e6)}\0".encode())
    except BaseException:
        os.close(fd)
        raise
    return fd
