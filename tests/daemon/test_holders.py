"""Counting who holds what, against a plain Counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.memory.holders import Holders

# Ids of clients' making: small ones that collide, and the largest there are.
SPANS = st.one_of(st.integers(1, 9), st.integers(2**64 - 3, 2**64 - 1))
LANES = st.lists(st.lists(SPANS, max_size=6), max_size=4)


def changes(
    holders: Holders, lanes: Iterable[Sequence[int]], stored: Iterable[int] | None = None
) -> list[tuple[int, int]]:
    """One count of all lanes, in an index that has the spans `stored`: by default all that the lanes name."""
    lanes = [*lanes]
    ids = {span for lane in lanes for span in lane} if stored is None else set(stored)
    count = holders.count(lambda: [np.array(sorted(ids), np.uint64)])
    for lane in lanes:
        for _ in count.add(np.array(lane, np.uint64)):
            pass
    return [*chain.from_iterable(count.changes())]


@given(found=st.dictionaries(SPANS, st.integers(1, 5), max_size=4), rounds=st.lists(LANES, max_size=4))
def test_only_changed_counts_are_reported_and_a_lane_counts_once(
    found: dict[int, int], rounds: list[list[list[int]]]
) -> None:
    holders = Holders(np.array([*found], np.uint64), np.array([*found.values()], np.uint64))
    told = dict(found)
    for lanes in rounds:
        counted = Counter(span for lane in lanes for span in set(lane))
        changed = changes(holders, lanes)
        assert all(told.get(span, 0) != now for span, now in changed), "what has not changed was told"
        told.update(changed)
        assert {span: now for span, now in told.items() if now} == counted
        assert len(holders) == len(counted)
    assert all(type(span) is type(now) is int for span, now in told.items())


def test_a_count_beyond_the_field_is_reported_as_the_fields_maximum() -> None:
    holders = Holders(np.empty(0, np.uint64), np.empty(0, np.uint64))
    many = [[7]] * ((1 << 16) + 5)
    assert changes(holders, many) == [(7, (1 << 16) - 1)]
    assert changes(holders, many[1:]) == []


def test_spans_that_the_index_does_not_have_are_not_counted() -> None:
    holders = Holders(np.empty(0, np.uint64), np.empty(0, np.uint64))
    assert changes(holders, [[1, 2, 2**64 - 1], [2, 3]], stored=[2, 4]) == [(2, 2)]
    assert len(holders) == 1
