"""Lanes against plain sets and lists, over real shared memory; and how long a lane lives, by real kernel locks."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.errors import LayoutMismatch
from tensord.shm.lanes.lane import HEAD_AT, PINS_AT, SPARE_END, VIEW_WORDS, Lane
from tensord.shm.ring.layout import LANE_BYTES, LANE_LOG_WORDS, LANE_WORDS

from ..memory_bench import attached, lane_file, memory_file

SPANS = st.integers(1, (1 << 64) - 1)


class LaneAgainstSets(RuleBasedStateMachine):
    """`pinned` maps words to span ids; `roots` are the arrays that hold served words, `batches` those of many."""

    @initialize()
    def start(self) -> None:
        self.lane, self.reader = attached()
        self.scratch = np.empty(LANE_WORDS, np.uint64)
        self.pinned: dict[int, int] = {}
        self.roots: dict[int, np.ndarray[Any, Any]] = {}
        self.batches: list[tuple[np.ndarray[Any, Any], list[int]]] = []
        self.logged: list[int] = []
        self.drained = 0
        self.misses = 0
        self.frozen: list[int] | None = None
        self.suspended = False
        self.logged_by_freeze = 0

    def loose(self) -> list[int]:
        batched = {word for _, words in self.batches for word in words}
        return [word for word in self.pinned if word not in self.roots and word not in batched]

    @rule(span=SPANS)
    def pin(self, span: int) -> None:
        if self.suspended or len(self.pinned) == VIEW_WORDS:
            with pytest.raises(IndexError):
                self.lane.pin(span)
            return
        word = self.lane.pin(span)
        assert word not in self.pinned
        assert PINS_AT <= word < PINS_AT + LANE_WORDS
        self.pinned[word] = span

    @precondition(lambda self: self.loose())
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        word = data.draw(st.sampled_from(sorted(self.loose())))
        self.lane.unpin(word)
        del self.pinned[word]

    @precondition(lambda self: self.loose())
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        word = data.draw(st.sampled_from(sorted(self.loose())))
        root = np.zeros(3, np.uint8)
        self.lane.tie(word, root)
        self.lane.log(self.pinned[word])
        self.roots[word] = root
        self.logged.append(self.pinned[word])

    @precondition(lambda self: self.roots)
    @rule(data=st.data(), by_view=st.booleans())
    def the_last_view_dies(self, data: st.DataObject, by_view: bool) -> None:
        word = data.draw(st.sampled_from(sorted(self.roots)))
        if by_view:
            view = self.roots.pop(word)[1:]
            assert view[0] == 0
            if self.frozen is None:
                assert self.lane.words[word] == self.pinned[word]
            del view
        else:
            del self.roots[word]
        del self.pinned[word]

    @rule(wanted=st.sampled_from([0, 1, 5, 100, VIEW_WORDS - 3, VIEW_WORDS + 9]), span=st.integers(1, 1 << 60))
    def pin_many(self, wanted: int, span: int) -> None:
        free = 0 if self.suspended else VIEW_WORDS - len(self.pinned)
        words = self.lane.take_many(wanted)
        assert len(words) == len(set(words)) == min(wanted, free)
        assert not self.pinned.keys() & set(words)
        root = np.zeros(3, np.uint8)
        self.lane.tie_many(words, root)
        for i, word in enumerate(words):
            self.lane.words[word] = self.pinned[word] = span + i
        self.batches.append((root, words))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def a_batch_dies(self, data: st.DataObject) -> None:
        _, words = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        for word in words:
            del self.pinned[word]

    @rule(spans=st.lists(SPANS, max_size=5))
    def log(self, spans: list[int]) -> None:
        for span in spans:
            self.lane.log(span)
        self.logged += spans

    @rule(size=st.sampled_from([0, 1, 700, LANE_LOG_WORDS - 1, LANE_LOG_WORDS, LANE_LOG_WORDS + 5, 20_000]))
    def log_many(self, size: int) -> None:
        spans = np.arange(len(self.logged) + 1, len(self.logged) + 1 + size, dtype=np.uint64)
        self.lane.log_many(spans)
        self.logged += spans.tolist()

    @precondition(lambda self: self.frozen is None)
    @rule()
    def miss(self) -> None:
        self.lane.log_miss()
        self.misses += 1

    @rule()
    def drain(self) -> None:
        until = len(self.logged) if self.frozen is None else self.logged_by_freeze
        fresh = self.logged[self.drained : until]
        drained = self.reader.drain()
        if drained is None:
            assert not fresh
            assert not self.misses
            return
        kept = fresh[-LANE_LOG_WORDS:]
        assert drained.span_ids.tolist() == kept
        assert drained.lost == len(fresh) - len(kept)
        assert drained.misses == self.misses
        assert self.reader.hits == until
        self.drained, self.misses = until, 0

    @precondition(lambda self: self.frozen is None)
    @rule()
    def freeze(self) -> None:
        self.lane.freeze()
        self.suspended = True
        self.frozen = sorted(self.pinned.values())
        self.logged_by_freeze = len(self.logged)

    @rule()
    def suspend(self) -> None:
        self.lane.suspend()
        self.suspended = True

    @precondition(lambda self: not self.pinned)
    @rule()
    def resume(self) -> None:
        self.lane.resume()
        self.suspended = self.frozen is not None

    @invariant()
    def the_daemon_sees_exactly_the_pins(self) -> None:
        expected = sorted(self.pinned.values()) if self.frozen is None else self.frozen
        assert sorted(self.reader.pins(self.scratch).tolist()) == expected
        assert self.reader.pinned == len(expected)
        assert self.lane.in_use == len(self.pinned)

    def teardown(self) -> None:
        if not hasattr(self, "lane"):
            return
        if self.frozen is None:
            for word in self.loose():
                self.lane.unpin(word)
        self.roots.clear()
        self.batches.clear()
        self.lane.resume()
        if self.frozen is None:
            assert sorted(self.lane.free) == [*range(SPARE_END, PINS_AT + LANE_WORDS)]
            assert not len(self.reader.pins(self.scratch))
        assert not self.reader.abandoned()
        del self.lane
        assert self.reader.abandoned()
        self.reader.close()


TestLaneAgainstSets = LaneAgainstSets.TestCase
TestLaneAgainstSets.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


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
