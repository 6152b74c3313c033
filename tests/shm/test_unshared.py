"""Memory that no fork inherits, in real forks."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensord.shm.ring import unshared
from tensord.shm.ring.unshared import Unshared

from ..interruptions import interrupt
from ..memory_bench import memory_file

SIZE_BYTES = 1 << 16
ROOT = Path(__file__).parents[2]


def is_mapped(address: int) -> bool:
    return re.search(rf"^0*{address:x}-", Path("/proc/self/maps").read_text(), re.M) is not None


def child_says(act: Callable[[], object]) -> int:
    """The exit status of a child in which `act()` runs; 0 where it is true."""
    forked = os.fork()
    if not forked:
        status = 9
        try:
            unshared.after_fork_in_child()
            status = 0 if act() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])


def test_a_child_reads_what_is_there_and_its_writes_reach_nobody() -> None:
    fd = memory_file(SIZE_BYTES)
    mapped = Unshared(fd, SIZE_BYTES)
    array = np.ndarray((SIZE_BYTES,), np.uint8, mapped.memory)
    array[:] = 7

    def write() -> bool:
        right = bool((array == 7).all())
        array[:] = 9
        return right and bool((array == 9).all())

    assert child_says(write) == 0
    assert (array == 7).all()
    assert os.pread(fd, SIZE_BYTES, 0) == bytes([7]) * SIZE_BYTES
    os.close(fd)


def test_a_mapping_ends_with_its_last_array_in_parent_and_child() -> None:
    fd = memory_file(SIZE_BYTES)
    mapped = Unshared(fd, SIZE_BYTES)
    os.close(fd)
    arrays = [np.ndarray((8,), np.uint8, mapped.memory, 64)[2:]]
    address = mapped.address
    del mapped

    def drop() -> bool:
        there = is_mapped(address)
        arrays.clear()
        gc.collect()
        return there and not is_mapped(address)

    assert child_says(drop) == 0
    assert is_mapped(address)
    arrays[0][:] = 1
    assert drop()
    assert address not in unshared._mapped


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cyclic", [False, True])
def test_a_signal_handlers_exception_at_no_instruction_keeps_a_mapping_or_its_descriptor(cyclic: bool) -> None:
    fd = memory_file(SIZE_BYTES)
    # What other tests have left would be closed by a collection below.
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))

    def held() -> tuple[int, list[object]]:
        mapped = Unshared(fd, SIZE_BYTES)
        held: list[object] = [np.ndarray((8,), np.uint8, mapped.memory)]
        if cyclic:
            held.append(held)
        return mapped.address, held

    for number in range(1000):
        address, arrays = held()
        holder = [arrays]
        del arrays

        def drop(holder: list[list[object]] = holder) -> None:
            holder.clear()
            gc.collect()

        place = interrupt(number, drop)
        drop()
        assert not is_mapped(address), place
        assert address not in unshared._mapped, place
        assert len(os.listdir("/proc/self/fd")) == descriptors, place
        if not place:
            break
    assert not place
    os.close(fd)


def test_memory_that_the_collector_frees_at_any_moment_in_a_child_ends_once_and_alone() -> None:
    # A fork without Python's handlers hangs if another thread waits for the interpreter: here there is no other.
    program = f"from {__name__} import collect_in_children; collect_in_children()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=600)


def collect_in_children() -> None:
    fd = memory_file(SIZE_BYTES)

    def garbage() -> list[int]:
        """Addresses of mappings that only the collector frees, one of them without an array."""
        mappings = [Unshared(fd, SIZE_BYTES) for _ in range(3)]
        for mapped in mappings:
            cycle: list[object] = [mapped]
            cycle.append(cycle)
        cycle.append(np.ndarray((8,), np.uint8, mappings[0].memory))
        return [mapped.address for mapped in mappings]

    def collects_at(number: int, addresses: list[int]) -> int:
        """0 if there is no such moment, 1 if all is well, else 2."""
        opened: list[int] = []

        def collect() -> None:
            gc.collect()
            # Other files get the descriptors that have just been closed.
            opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(4))

        place = interrupt(number, unshared.after_fork_in_child, ("shm/ring/unshared.py",), times=3, handler=collect)
        gc.collect()
        open_yet = all(os.path.samestat(os.fstat(other), os.stat(os.devnull)) for other in opened)
        gone = not any(is_mapped(address) or address in unshared._mapped for address in addresses)
        return 2 if not (open_yet and gone) else 1 if place else 0

    gc.disable()
    try:
        for number in range(1000):
            addresses = garbage()
            forked = ctypes.PyDLL(None).fork()  # without the client's handlers
            if not forked:
                status = 9
                try:
                    status = collects_at(number, addresses)
                finally:
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
            gc.collect()
            if not status:
                break
            assert status == 1, number
        assert number > 10
    finally:
        gc.enable()
    os.close(fd)


def test_a_child_keeps_no_descriptor_of_it_which_its_program_may_close() -> None:
    fd = memory_file(SIZE_BYTES)
    mapped = Unshared(fd, SIZE_BYTES)
    own_fd = unshared._mapped[mapped.address].fd
    os.close(fd)

    def taken() -> bool:
        # As a program that becomes a service does: it closes all descriptors, opens its log, and forks again.
        log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, own_fd)
        return child_says(lambda: os.path.sameopenfile(log, own_fd)) == 0

    assert child_says(taken) == 0
