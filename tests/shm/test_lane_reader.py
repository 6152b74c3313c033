"""The daemon's side of a lane: its name, and one that is cut or closed. What a client may write: tests/fuzz."""

from __future__ import annotations

import os

import pytest

from tensord.shm.lanes.lane import HEAD_AT, Lane
from tensord.shm.lanes.reader import LaneReader, lane_name, read_lane_name

from ..memory_bench import lane_file


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("uid", [None, 0, 65534])
def test_a_lane_s_name_says_its_id_its_uid_and_its_fence(uid: int | None, fenced: bool) -> None:
    name = lane_name("main", 0x1234_5678_9ABC, uid=uid, fenced=fenced)
    assert read_lane_name("main", name) == (0x1234_5678_9ABC, uid, fenced)


def test_a_closed_or_truncated_lane_has_no_records() -> None:
    fd = lane_file(7)
    Lane(fd).log(3)
    reader = LaneReader(fd, 7)
    os.ftruncate(fd, 8 * HEAD_AT)
    assert reader.drain() is None
    reader.close()
    assert reader.drain() is None
