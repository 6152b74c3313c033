"""The asymmetric fence between readers and the daemon: readers pay nothing, the daemon pays once per reclaim batch.

A reader stores its pin, then loads the slot's seq. The daemon stores the seq, then loads the pins. x86-64 may execute
each load before the preceding store is visible, and then neither side would see the other side's store. membarrier(2)
makes every running thread of every registered process execute a full fence between the daemon's store and its loads.
This is enough: the daemon sees every pin that a reader stored before the fence, and a reader that loads after the fence
sees the new seq.

SYNC POINT: the litmus test tests/shm/litmus.c shows the forbidden outcome without this call, and never with it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

from ...errors import NoFence

_SYS_MEMBARRIER: Final = 324  # x86-64; SYNC POINT: 283 on ARM64
_QUERY, _GLOBAL, _GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 0, 1 << 0, 1 << 1, 1 << 2

_libc = ctypes.CDLL(None, use_errno=True)


def _membarrier(command: int) -> int:
    result = int(_libc.syscall(_SYS_MEMBARRIER, command, 0, 0))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"membarrier({command}): {os.strerror(number)}")
    return result


def _may(command: int) -> bool:
    try:
        _membarrier(command)
    except OSError:
        return False
    return True


def supported() -> tuple[bool, bool]:
    """Whether the kernel offers this process (GLOBAL, GLOBAL_EXPEDITED and its registration)."""
    try:
        commands = _membarrier(_QUERY)
    except OSError:
        return False, False
    expedited = _GLOBAL_EXPEDITED | _REGISTER_GLOBAL_EXPEDITED
    return bool(commands & _GLOBAL), commands & expedited == expedited


def is_quick() -> bool:
    """Makes one expedited fence, and returns whether this process may make it."""
    return _may(_GLOBAL_EXPEDITED)


def check() -> None:
    """Makes one slow fence. Raises NoFence if the kernel or a sandbox refuses; the message says what to do."""
    try:
        fence(expedited=False)
    except OSError as error:
        raise NoFence(
            f"membarrier(2) with GLOBAL is refused ({error.strerror}), and without it no memory can be reused: run "
            "Linux 4.3 or newer, and allow the system call membarrier in the seccomp profile of the container or the "
            "service's SystemCallFilter="
        ) from error


def register() -> bool:
    """Registers this process for the expedited fence. The registration survives fork, but not exec. False if the kernel
    or a sandbox refuses; the daemon then uses the slow fence (8-16 ms) for this process."""
    return _may(_REGISTER_GLOBAL_EXPEDITED)


def fence(*, expedited: bool) -> None:
    """Orders all earlier stores of this process before all its later loads, with respect to every reader on the host.
    `expedited` takes microseconds and reaches only registered processes; else it takes 8-16 ms and reaches all."""
    _membarrier(_GLOBAL_EXPEDITED if expedited else _GLOBAL)
