"""The daemon's side of a lane: its name; its hit times, against a plain list and what a client may write instead."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.lane_reader import LaneReader, lane_name, read_lane_name
from tensord.shm.lanes import HEAD_AT, MISSES_AT, TIMED_AT, TIMES, TIMES_AT, Lane
from tensord.shm.layout import LANE_HEADER_WORDS
from tensord.shm.segments import segment_name

from ..memory_bench import attached, lane_file

WORD = st.integers(0, (1 << 64) - 1)


@pytest.fixture
def ends() -> Iterator[tuple[Lane, LaneReader]]:
    lane, reader = attached()
    yield lane, reader
    reader.close()


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("uid", [None, 0, 65534])
def test_a_lane_s_name_says_its_id_its_uid_and_its_fence(uid: int | None, fenced: bool) -> None:
    name = lane_name("main", 0x1234_5678_9ABC, uid=uid, fenced=fenced)
    assert read_lane_name("main", name) == (0x1234_5678_9ABC, uid, fenced)


@pytest.mark.parametrize("part", ["lane.", "lane.xyz", "lane.1.fence", "lane.1.fenced.", "lane.11111111111111111"])
def test_names_that_are_not_lane_names_are_recognised(part: str) -> None:
    assert read_lane_name("main", segment_name("main", part)) is None


def times(reader: LaneReader) -> list[int]:
    drained = reader.drain()
    return [] if drained is None else drained.times_ns


@given(st.lists(st.lists(st.integers(0, 1 << 40), max_size=2 * TIMES), max_size=5))
def test_each_drain_gives_the_times_since_the_last_one_at_most_as_many_as_the_log_holds(
    rounds: list[list[int]],
) -> None:
    lane, reader = attached()
    for written in rounds:
        for took_ns in written:
            lane.log_time(took_ns)
        assert times(reader) == written[-TIMES:]
        assert times(reader) == []
    reader.close()


def test_times_that_come_without_a_further_hit_are_read(ends: tuple[Lane, LaneReader]) -> None:
    lane, reader = ends
    lane.log(3)
    assert times(reader) == []
    lane.log_time(1500)
    drained = reader.drain()
    assert drained is not None
    assert (drained.span_ids.tolist(), drained.misses, drained.lost, drained.times_ns) == ([], 0, 0, [1500])


def test_a_lane_that_is_found_again_gives_no_time_twice() -> None:
    fd = lane_file(7)
    lane = Lane(fd)
    lane.log_time(1)
    reader = LaneReader(fd, 7)
    lane.log_time(2)
    assert times(reader) == [2]
    reader.close()


@given(st.lists(WORD, max_size=4), st.lists(WORD, min_size=TIMES, max_size=TIMES))
def test_whatever_a_client_writes_a_drain_gives_few_times_and_its_hits_all_the_same(
    counts: list[int], words: list[int]
) -> None:
    lane, reader = attached()
    for span, timed in enumerate([*counts, (1 << 64) - 1], 1):
        lane.words[TIMED_AT] = timed
        for number, word in enumerate(words):
            lane.words[TIMES_AT + number] = word
        lane.log(span)
        drained = reader.drain()
        assert drained is not None and drained.span_ids.tolist() == [span]
        assert len(drained.times_ns) <= TIMES and set(drained.times_ns) <= set(words)
    # The client itself goes on too.
    lane.log_time(5)
    reader.close()


def test_the_log_has_words_of_its_own() -> None:
    assert {TIMED_AT, *range(TIMES_AT, TIMES_AT + TIMES)}.isdisjoint({0, 1, 2, HEAD_AT, MISSES_AT})
    assert TIMES_AT + TIMES <= LANE_HEADER_WORDS
    # Each in cache lines that no other field has: 8 words.
    assert len({HEAD_AT // 8, MISSES_AT // 8, TIMED_AT // 8, TIMES_AT // 8}) == 4


def test_a_closed_or_truncated_lane_has_no_times(ends: tuple[Lane, LaneReader]) -> None:
    fd = lane_file(7)
    reader = LaneReader(fd, 7)
    os.ftruncate(fd, 8 * TIMED_AT)
    assert reader.drain() is None
    reader.close()
    assert reader.drain() is None
    lane, other = ends
    assert np.frombuffer(lane.words, "u8")[TIMED_AT] == 0 and times(other) == []
