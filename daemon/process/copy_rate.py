"""Measures how fast this machine copies memory, at the daemon's start.

Owns the measurement. Does not own what follows from it. Invariants: its memory is returned to the kernel. Where no
memory or thread is left for it, the daemon goes on with ASSUMED_BYTES_PER_S.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from mmap import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..governor.devices.copies import ASSUMED_BYTES_PER_S
from ..governor.forms.events import MemoryCopyMeasured
from .limits import NO_MEMORY_OR_THREAD
from .logs import logger

_log = logger("tensord")

COPY_BYTES: Final = 16 << 20
"""More than a core's own caches hold."""
_ROUNDS: Final = 4


async def report_memory_rate(report: Callable[[MemoryCopyMeasured], object]) -> None:
    """Measures in a thread, and reports the rate once; not at all if it cannot be measured."""
    try:
        rate = await asyncio.to_thread(memory_bytes_per_s)
    except NO_MEMORY_OR_THREAD as error:
        _log.warning(
            "cannot measure how fast memory is copied; a rate is assumed until offloads show another",
            bytes_per_s=ASSUMED_BYTES_PER_S,
            why=str(error) or type(error).__name__,
        )
    else:
        report(MemoryCopyMeasured(rate))


def memory_bytes_per_s() -> float:
    """Bytes a second of the fastest of a few copies by one thread: the others were disturbed. Takes some 50 ms."""
    with mmap(-1, 2 * COPY_BYTES) as memory:
        source, target = np.frombuffer(memory, np.uint8).reshape(2, COPY_BYTES)
        source.fill(1)  # unwritten pages are all the same page of zeros
        target.fill(0)
        fastest_s = min(_copy_s(source, target) for _ in range(_ROUNDS))
        del source, target
    return COPY_BYTES / fastest_s


def _copy_s(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    began = time.perf_counter()
    np.copyto(target, source)
    return max(time.perf_counter() - began, 1e-6)
