"""A place is written only while it is the client's, and its pages are mapped together."""

from __future__ import annotations

import gc
import os
import resource

import numpy as np
import pytest

from tensord.client.writing.connection import Granted
from tensord.client.writing.memory import WritableMemory
from tensord.shm.lanes import VIEW_WORDS
from tensord.shm.layout import LANE_WORDS, PAGE_BYTES

from ...memory_bench import memory_file
from ...writing_bench import WritingBench


def test_a_place_is_pinned_until_nothing_refers_to_it() -> None:
    with WritingBench() as bench:
        granted = bench._in_ring(Granted(1, 0, 4096))
        pin = bench.memory.hold(granted)
        assert pin is not None and granted.span_id in bench.bench.pins()
        del pin
        gc.collect()
        assert granted.span_id not in bench.bench.pins()
        bench.bench.slots.release(granted.slot)


def test_a_place_that_was_taken_back_is_neither_used_nor_pinned() -> None:
    with WritingBench() as bench:
        granted = bench._in_ring(Granted(1, 0, 4096))
        bench.bench.slots.revoke(granted.slot)
        assert bench.memory.hold(granted) is None
        gc.collect()
        assert granted.span_id not in bench.bench.pins()
        bench.bench.slots.release(granted.slot)


def test_a_full_lane_gives_the_grant_back() -> None:
    with WritingBench() as bench:
        words = bench.lane.take_many(VIEW_WORDS)
        spare = [bench.lane.lend(number + 1) for number in range(LANE_WORDS - VIEW_WORDS)]
        arena = bench.writer.arena
        granted = bench._in_ring(Granted(5, 0, 4096))
        arena.granted(1, [granted])
        assert arena.take(64) is None and [each.number for each in arena._over] == [5]
        bench.lane.free.extend(words)
        del spare
        bench.bench.slots.release(granted.slot)


def test_a_place_beyond_the_ring_is_refused() -> None:
    with WritingBench() as bench:
        assert bench.memory.hold(Granted(1, len(bench.memory.bytes) - 64, 128)) is None


def test_the_pages_of_a_place_are_mapped_once_and_together() -> None:
    """A kernel before 5.14 maps them one by one."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    size_bytes = 8 << 20
    fd = memory_file(size_bytes)
    os.pwrite(fd, bytes(size_bytes), 0)
    memory = WritableMemory(fd)
    os.close(fd)
    memory.hold(Granted(1, 0, size_bytes))
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    np.frombuffer(memory.bytes, np.uint8)[:] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < size_bytes // PAGE_BYTES // 4
    assert memory._is_mapped.all()
