"""Lanes over real shared memory, and how long a lane lives, by real kernel locks."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.errors import LayoutMismatch
from tensord.shm.lanes.lane import HEAD_AT, VIEW_WORDS, Lane
from tensord.shm.ring.layout import LANE_BYTES, LANE_LOG_WORDS, LANE_WORDS

from ..daemon_process import some
from ..memory_bench import attached, lane_file, memory_file


def test_the_daemon_sees_the_pins_of_views_of_batches_and_of_nobody_else() -> None:
    lane, reader = attached()
    scratch = np.empty(LANE_WORDS, np.uint64)

    def pins(lane: Lane) -> list[int]:
        found = sorted(reader.pins(scratch).tolist())
        assert reader.pinned == len(found) == lane.in_use
        return found

    word = lane.pin(7)
    root, several = np.zeros(3, np.uint8), np.zeros(3, np.uint8)
    words = lane.take_many(LANE_WORDS)
    for number, each in enumerate(words):
        lane.words[each] = 100 + number
    lane.tie_many(words, several)
    assert pins(lane) == [7, *range(100, 100 + len(words))]
    lane.tie(word, root)
    view = root[1:]
    del root
    assert len(pins(lane)) == VIEW_WORDS
    del view, several
    assert pins(lane) == []
    loose = lane.pin(8)
    lane.freeze()
    with pytest.raises(IndexError):
        lane.pin(9)
    assert lane.take_many(3) == []
    lane.unpin(loose)
    assert reader.pins(scratch).tolist() == [8], "nobody clears words that a forked process has too"
    assert not reader.abandoned()
    del lane
    assert reader.abandoned()
    reader.close()


@given(st.lists(st.sampled_from([1, 5, 700, LANE_LOG_WORDS - 1, LANE_LOG_WORDS, 20_000]), max_size=6), st.booleans())
def test_hits_come_in_their_order_and_those_that_were_overwritten_are_counted(sizes: list[int], often: bool) -> None:
    lane, reader = attached()
    logged: list[int] = []
    drained = misses = 0
    for size in (*sizes, 0):
        spans = range(len(logged) + 1, len(logged) + 1 + size)
        lane.log_many(np.array(spans, np.uint64))
        logged += spans
        lane.log(len(logged) + 1)
        logged.append(len(logged) + 1)
        lane.log_miss()
        misses += 1
        if often or not size:
            found = some(reader.drain())
            kept = logged[drained:][-LANE_LOG_WORDS:]
            assert (found.span_ids.tolist(), found.misses) == (kept, misses)
            assert found.lost == len(logged) - drained - len(kept)
            drained, misses = len(logged), 0
    assert reader.drain() is None and reader.hits == len(logged)
    reader.close()


def test_a_file_that_is_not_a_lane_is_refused() -> None:
    for size_bytes, message in [(100, "100 bytes"), (LANE_BYTES, "magic 0x0")]:
        fd = memory_file(size_bytes)
        with pytest.raises(LayoutMismatch, match=message):
            Lane(fd)
        os.close(fd)


def test_heads_stored_in_the_wrong_order_lose_nothing_for_long() -> None:
    lane, reader = attached()
    for span in (1, 2, 3):
        lane.log(span)
    assert reader.drain() is not None
    # A thread that took its head before another one stores it after.
    lane.words[HEAD_AT] = 2
    assert reader.drain() is None
    lane.log(4)
    drained = reader.drain()
    assert drained is not None
    assert drained.span_ids.tolist() == [4]
    reader.close()


def test_a_suspended_lane_counts_every_word_that_any_thread_has() -> None:
    lane, reader = attached()
    held: list[list[int]] = [[] for _ in range(3)]
    begun = threading.Barrier(4)

    def work(words: list[int]) -> None:
        begun.wait()
        # Ends when the lane hands out no more: suspended, or full.
        with suppress(IndexError):
            while True:
                words.append(lane.pin(len(words) + 1))
                if len(words) % 3:
                    lane.unpin(words.pop())

    threads = [threading.Thread(target=work, args=(words,)) for words in held]
    for thread in threads:
        thread.start()
    begun.wait()
    lane.suspend()
    for thread in threads:
        thread.join()
    words = [word for own in held for word in own]
    assert len(words) == len(set(words)) == lane.in_use
    for word in words:
        lane.unpin(word)
    assert lane.in_use == 0
    with pytest.raises(IndexError):
        lane.pin(1)
    lane.resume()
    assert lane.pin(1)
    reader.close()


def test_views_leave_words_for_grants_also_once_grants_have_ended() -> None:
    fd = lane_file()
    try:
        lane = Lane(fd)
    finally:
        os.close(fd)
    views = lane.take_many(LANE_WORDS)
    assert len(views) == VIEW_WORDS
    for _ in range(2):
        held = [lane.lend(number + 1) for number in range(LANE_WORDS - VIEW_WORDS)]
        with pytest.raises(IndexError):
            lane.lend(99)
        assert lane.in_use_by_views == VIEW_WORDS
        with pytest.raises(IndexError):
            lane.pin(99)
        assert held
        del held
    lane.freeze()
    with pytest.raises(IndexError):
        lane.lend(99)
