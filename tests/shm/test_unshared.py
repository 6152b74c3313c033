"""Memory that no forked child shares, in real forks."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensord.shm.ring import unshared
from tensord.shm.ring.segments import address_of

from .. import processes
from ..interruptions import interrupt
from ..memory_bench import memory_file

SIZE_BYTES = 1 << 16


def is_mapped(address: int) -> bool:
    """Whether it is. Neighbours of a kind are one mapping."""
    ranges = re.findall(r"^(\w+)-(\w+) ", Path("/proc/self/maps").read_text(), re.M)
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def child_says(act: Callable[[], object]) -> int:
    def handled() -> object:
        unshared.after_fork_in_child()
        return act()

    return processes.child_says(handled)


def test_what_a_child_writes_on_into_the_memory_reaches_nobody_and_its_own_memory_is_its_own() -> None:
    fd = memory_file(SIZE_BYTES)
    array = np.frombuffer(unshared.unshared(fd, SIZE_BYTES), np.uint8)
    array[:] = 7

    def write() -> bool:
        array[:] = 9
        own = np.frombuffer(unshared.unshared(fd, SIZE_BYTES), np.uint8)
        unshared.after_fork_in_child()  # again, as after an exception of a signal handler
        own[0] = 8
        return bool((array == 9).all()) and child_says(lambda: own[0] == 0) == 0

    assert child_says(write) == 0
    assert array[0] == 8 and (array[1:] == 7).all()
    os.close(fd)


def descriptors_of(fd: int) -> int:
    """How many descriptors this process has of the file. A child's fork handlers may close others."""
    target = f"/proc/self/fd/{fd}"
    return sum(os.path.samefile(path, target) for path in Path("/proc/self/fd").iterdir() if path.exists())


def test_a_mapping_ends_with_its_last_array_in_parent_and_child() -> None:
    fd = memory_file(SIZE_BYTES)
    descriptors = descriptors_of(fd)
    mapped = unshared.unshared(fd, SIZE_BYTES)
    arrays = [np.ndarray((8,), np.uint8, mapped, 64)[2:]]
    address = address_of(mapped)
    del mapped

    def drop() -> bool:
        there = is_mapped(address)
        arrays.clear()
        gc.collect()
        return there and not is_mapped(address) and descriptors_of(fd) == descriptors

    assert child_says(drop) == 0
    assert is_mapped(address)
    arrays[0][:] = 1
    assert drop()
    os.close(fd)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cyclic", [False, True])
def test_a_signal_handlers_exception_at_no_instruction_keeps_a_descriptor(cyclic: bool) -> None:
    class Holder:
        """Holds itself, if it is cyclic."""

    # What other tests have left would be closed by a collection below.
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        holders = [Holder()]
        unshared.close_with(holders[0], os.dup(0))
        if cyclic:
            vars(holders[0])["own"] = holders[0]

        def drop(holders: list[Holder] = holders) -> None:
            holders.clear()
            gc.collect()

        place = interrupt(number, drop)
        drop()
        assert len(os.listdir("/proc/self/fd")) == descriptors, place
        if not place:
            break
    assert not place
