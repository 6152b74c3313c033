"""A scan finds every pin of what is stored, a count its lanes, in slices; made-up ids cost them no memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any, TypeVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.memory import lane_scan
from tensord.daemon.memory.lane_scan import LANES_AT_ONCE, UNCHECKED_MAX, counted, scanned
from tensord.shm.lanes.reader import LaneReader
from tensord.shm.ring.layout import PAGE_BYTES

from ..memory_bench import lane_file

STORED = np.arange(5, 5 + 3 * 40_000, 3, dtype=np.uint64)
Result = TypeVar("Result")


def _reader(pins: Any) -> LaneReader:
    fd = lane_file()
    os.pwrite(fd, np.array(pins, np.uint64).tobytes(), PAGE_BYTES)
    return LaneReader(fd, 1)


def _run(job: Generator[None, None, Result]) -> tuple[int, Result]:
    """The slices of a job, and its result."""
    slices = 0
    while True:
        try:
            next(job)
        except StopIteration as done:
            return slices, done.value
        slices += 1


SPANS = st.integers(1, 200) | st.integers(2**64 - 3, 2**64 - 1)


@given(
    lanes=st.lists(st.lists(SPANS, max_size=9), max_size=2 * LANES_AT_ONCE + 1),
    unchecked_max=st.sampled_from([0, 5, UNCHECKED_MAX]),
)
def test_all_that_is_pinned_and_stored_is_found_and_a_lane_counts_once(
    lanes: list[list[int]], unchecked_max: int
) -> None:
    readers = [_reader(pins) for pins in lanes]
    before, lane_scan.UNCHECKED_MAX = lane_scan.UNCHECKED_MAX, unchecked_max  # type: ignore[misc]
    try:
        slices, pinned = _run(scanned(readers, lambda: [STORED]))
        _, (spans, holders) = _run(counted(readers, lambda: [STORED[1::2], STORED[::2]]))
    finally:
        lane_scan.UNCHECKED_MAX = before  # type: ignore[misc]
        for reader in readers:
            reader.close()
    sets = [set(pins) for pins in lanes]
    stored = set().union(*sets) & set(STORED.tolist())
    assert stored <= pinned <= set().union(*sets)
    assert len(pinned - stored) <= unchecked_max
    asked_the_index = sum(map(len, lanes)) > unchecked_max
    assert slices == -(-len(lanes) // LANES_AT_ONCE) + asked_the_index
    assert dict(zip(spans.tolist(), holders.tolist(), strict=True)) == Counter(
        span for pins in sets for span in pins & stored
    )


def test_a_lane_that_is_forgotten_during_a_scan_pins_nothing() -> None:
    readers = [_reader([5]) for _ in range(LANES_AT_ONCE + 1)]
    scan = scanned(readers, lambda: [STORED])
    next(scan)
    for reader in readers:
        reader.close()
    assert _run(scan) == (1, {5})
