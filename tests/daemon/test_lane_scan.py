"""A scan finds every pin of what is stored, in slices, and made-up ids cost it no memory."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.memory import lane_scan
from tensord.daemon.memory.lane_scan import LANES_AT_ONCE, UNCHECKED_MAX, LaneScan
from tensord.shm.lanes.reader import LaneReader
from tensord.shm.ring.layout import PAGE_BYTES

from ..memory_bench import lane_file

STORED = np.arange(5, 5 + 3 * 40_000, 3, dtype=np.uint64)


def _reader(pins: Any) -> LaneReader:
    fd = lane_file()
    os.pwrite(fd, np.array(pins, np.uint64).tobytes(), PAGE_BYTES)
    return LaneReader(fd, 1)


@given(
    lanes=st.lists(st.lists(st.integers(1, 200), max_size=9), max_size=2 * LANES_AT_ONCE + 1),
    unchecked_max=st.sampled_from([0, 5, UNCHECKED_MAX]),
)
def test_all_that_is_pinned_and_stored_is_found(lanes: list[list[int]], unchecked_max: int) -> None:
    readers = [_reader(pins) for pins in lanes]
    before, lane_scan.UNCHECKED_MAX = lane_scan.UNCHECKED_MAX, unchecked_max  # type: ignore[misc]
    try:
        scan = LaneScan(readers, lambda: [STORED])
        slices = sum(1 for _ in scan)
    finally:
        lane_scan.UNCHECKED_MAX = before  # type: ignore[misc]
        for reader in readers:
            reader.close()
    pinned = {span for pins in lanes for span in pins}
    stored = pinned & set(STORED[:100].tolist())
    assert stored <= scan.pinned <= pinned
    assert len(scan.pinned - stored) <= unchecked_max
    asked_the_index = sum(map(len, lanes)) > unchecked_max
    assert slices == len(lanes) // LANES_AT_ONCE + asked_the_index


def test_a_lane_that_is_forgotten_during_a_scan_pins_nothing() -> None:
    readers = [_reader([5]) for _ in range(LANES_AT_ONCE + 1)]
    scan = iter(LaneScan(readers, lambda: [STORED]))
    next(scan)
    for reader in readers:
        reader.close()
    assert [*scan] == []
