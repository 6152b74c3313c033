"""The asymmetric fence: readers pay nothing, the daemon pays once per reclaim batch.

A reader stores its pin, then loads the slot's seq; the daemon stores the seq, then loads the pins. x86-64 may let
each load overtake the store before it, and then both sides would miss the other. membarrier(2) makes every running
thread of every registered process execute a full fence between the daemon's store and its loads, which is enough:
whatever a reader stored before it is seen, and whatever it loads after it is new.

SYNC POINT: the C litmus in tests/shm shows the forbidden outcome without this call, and none with it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

from ..errors import NoFence

_SYS_MEMBARRIER: Final = 324  # x86-64; SYNC POINT: 283 on ARM64
_QUERY, _GLOBAL, _GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 0, 1 << 0, 1 << 1, 1 << 2

_libc = ctypes.CDLL(None, use_errno=True)


def _membarrier(command: int) -> int:
    result = int(_libc.syscall(_SYS_MEMBARRIER, command, 0, 0))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"membarrier({command}): {os.strerror(number)}")
    return result


def supported() -> tuple[bool, bool]:
    """(GLOBAL, GLOBAL_EXPEDITED with its registration): what this kernel offers this process."""
    try:
        commands = _membarrier(_QUERY)
    except OSError:
        return False, False
    expedited = _GLOBAL_EXPEDITED | _REGISTER_GLOBAL_EXPEDITED
    return bool(commands & _GLOBAL), commands & expedited == expedited


def check(*, expedited: bool) -> None:
    """Makes one fence of the kind, for nothing but to see that it can be made.

    Raises:
        NoFence: the kernel or a sandbox refuses; the message says what is missing and what to do.
    """
    try:
        fence(expedited=expedited)
    except OSError as error:
        kind, since = ("GLOBAL_EXPEDITED", "4.16") if expedited else ("GLOBAL", "4.3")
        raise NoFence(
            f"membarrier(2) with {kind} is refused ({error.strerror}), and without it no memory can be "
            f"reused: run Linux {since} or newer, and allow the system call membarrier in the seccomp profile of the "
            "container or the service's SystemCallFilter="
        ) from error


def works(*, expedited: bool) -> bool:
    """Whether `check` passes."""
    try:
        check(expedited=expedited)
    except NoFence:
        return False
    return True


def register() -> bool:
    """Makes this process one that an expedited fence reaches. Survives fork, not exec.

    Returns:
        False where the kernel or a sandbox refuses; the daemon then uses the slow fence (8-16 ms) for us.
    """
    try:
        _membarrier(_REGISTER_GLOBAL_EXPEDITED)
    except OSError:
        return False
    return True


def fence(*, expedited: bool) -> None:
    """Orders all our stores so far before all our loads from here on, as every reader on the host sees them.

    Args:
        expedited: microseconds, and reaches only processes that registered; False waits 8-16 ms for all of them.
    """
    _membarrier(_GLOBAL_EXPEDITED if expedited else _GLOBAL)
