"""The mapping of the ring: what it holds ends with it."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from mmap import MAP_SHARED, PROT_READ
from typing import Any, cast

import numpy as np
import pytest

from tensord.client.reading.ring_mapping import RingMapping

from ...interruptions import interrupt
from ...memory_bench import memory_file

SIZE_BYTES = 1 << 16


def descriptors_of(fd: int) -> int:
    """How many descriptors this process has of a file. Threads that other tests have left open and close others."""
    about, found = os.fstat(fd), 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.path.samestat(os.stat(f"/proc/self/fd/{name}"), about)
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cyclic", [False, True])
def test_a_signal_handlers_exception_at_no_instruction_keeps_the_rings_descriptor(cyclic: bool) -> None:
    fd = memory_file(SIZE_BYTES)
    descriptors = descriptors_of(fd)

    def held() -> list[Any]:
        ring = RingMapping(fd, SIZE_BYTES, MAP_SHARED, PROT_READ)
        ring.begin(cast(Any, object()), fd, 1, cast(Any, None))
        held: list[Any] = [np.frombuffer(ring, np.uint8)]
        if cyclic:
            held.append(held)
        return held

    number, place = 0, "not begun"
    while place:
        holder = [held()]

        def drop(holder: list[list[Any]] = holder) -> None:
            holder.clear()
            gc.collect()

        place = interrupt(number, drop)
        drop()
        assert descriptors_of(fd) == descriptors, place
        number += 1
    os.close(fd)
