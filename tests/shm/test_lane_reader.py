"""The daemon's side of a lane: its name, and what a client may write instead of its records."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.lanes.lane import HEAD_AT, MISSES_AT, Lane
from tensord.shm.lanes.reader import LaneReader, lane_name, read_lane_name
from tensord.shm.ring.layout import LANE_LOG_WORDS

from ..memory_bench import attached, lane_file

WORD = st.integers(0, (1 << 64) - 1)


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("uid", [None, 0, 65534])
def test_a_lane_s_name_says_its_id_its_uid_and_its_fence(uid: int | None, fenced: bool) -> None:
    name = lane_name("main", 0x1234_5678_9ABC, uid=uid, fenced=fenced)
    assert read_lane_name("main", name) == (0x1234_5678_9ABC, uid, fenced)


@given(st.lists(WORD, min_size=1, max_size=4), st.lists(WORD, min_size=1, max_size=4))
def test_whatever_a_client_writes_a_drain_gives_at_most_what_the_log_holds(heads: list[int], misses: list[int]) -> None:
    lane, reader = attached()
    for head, missed in zip(heads, misses, strict=False):
        lane.words[HEAD_AT], lane.words[MISSES_AT] = head, missed
        drained = reader.drain()
        assert drained is None or (len(drained.span_ids) <= LANE_LOG_WORDS and drained.lost >= 0 <= drained.misses)
    reader.close()


def test_a_closed_or_truncated_lane_has_no_records() -> None:
    fd = lane_file(7)
    Lane(fd).log(3)
    reader = LaneReader(fd, 7)
    os.ftruncate(fd, 8 * HEAD_AT)
    assert reader.drain() is None
    reader.close()
    assert reader.drain() is None
