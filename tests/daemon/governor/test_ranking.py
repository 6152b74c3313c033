"""Orders, and their beginnings: the same as sorting everything and cutting where it is enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.governor.devices import ranking
from tensord.daemon.governor.devices.ranking import Amounts, at_once, enough, first
from tensord.daemon.governor.devices.table import Table

from .registry import FINISHED, UNKNOWN, key


def plain_first(order: list[int], sizes: list[int], need: float, most: int) -> list[int]:
    taken: list[int] = []
    for place in order:
        if need <= 0 or len(taken) >= most:
            break
        taken.append(place)
        need -= sizes[place]
    return taken


def table_of(entries: list[tuple[int, int, int, float]]) -> Table:
    """Rows of (size, tokens, uses, used_at)."""
    table = Table()
    for each, (size, tokens, uses, used_at) in enumerate(entries):
        table.add(key(each), 0, size, tokens, f"agent {each % 5}", uses, used_at)
    return table


def all_first(rank: ranking.Rank, count: int) -> list[int]:
    return [int(place) for place in at_once(first(rank, np.ones(count, np.int64), count, count))]


def test_uses_are_weighed_by_tokens_and_the_heaviest_of_equals_goes_first() -> None:
    table = table_of(
        [
            (10, 10, 10, 5.0),  # one use a token
            (10, 1000, 10, 5.0),  # a hundredth
            (10, 100, 1, 5.0),  # a hundredth, of fewer tokens
            (30, 100, 1, 5.0),  # of more bytes
            (30, 100, 1, 4.0),  # used longer ago
            (10, 0, 1, 5.0),  # no tokens count as one
        ]
    )
    assert all_first(ranking.by_density(table, np.arange(6)), 6) == [1, 4, 3, 2, 0, 5]


def test_the_farthest_agents_go_first_the_finished_before_all_and_the_unknown_second() -> None:
    table = table_of([(1, 1, 1, 10.0 - each) for each in range(10)])
    # agent i has number i + 1; number 0 is nobody
    distances = np.array([UNKNOWN, 0.0, 3.0, FINISHED, 1.0, UNKNOWN])
    rank = ranking.by_distance(table, np.arange(10), distances)
    assert [each % 5 for each in all_first(rank, 10)] == [2, 2, 4, 4, 1, 1, 3, 3, 0, 0]
    assert all_first(rank, 10)[:2] == [7, 2], "least recently used first, within an agent"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 3), st.sampled_from([0.0, 1.0, 2.0]))),
    st.integers(-1, 60),
    st.integers(0, 12),
)
def test_no_more_goes_than_is_needed(entries: list[tuple[int, int, int, float]], need: int, most: int) -> None:
    table, rows = table_of(entries), np.arange(len(entries))
    order = sorted(
        rows.tolist(),
        key=lambda r: (entries[r][2] / max(entries[r][1], 1), -entries[r][1], -entries[r][0], entries[r][3], r),
    )
    sizes = table.size_bytes[rows]
    taken = at_once(first(ranking.by_density(table, rows), sizes, need, most)).tolist()
    assert taken == plain_first(order, sizes.tolist(), need, most)


@pytest.mark.parametrize("ties", ["none", "many", "all"])
@pytest.mark.parametrize("share", [0.0001, 0.5, 2.0])
@pytest.mark.parametrize("most_share", [0.001, 1.0])
def test_a_large_table_gives_the_same_rows_as_sorting_it(ties: str, share: float, most_share: float) -> None:
    count = 30_000
    chance = np.random.default_rng(7)
    kinds = {"none": 1 << 40, "many": 5, "all": 1}[ties]
    weighty, lighter = chance.integers(0, kinds, count), chance.integers(0, min(kinds, 5), count)
    sizes = (chance.pareto(1.2, count) * 1000).astype(np.int64) + 1
    need, most = float(share * sizes.sum()), int(most_share * count)
    rank = (weighty.__getitem__, lighter.__getitem__)
    taken = at_once(first(rank, sizes, need, most)).tolist()
    order = np.lexsort((np.arange(count), lighter, weighty)).tolist()
    expected = plain_first(order, sizes.tolist(), need, most)
    assert len(taken) == len(set(taken)) and set(taken) == set(expected)
    if len(expected) < count:
        assert taken[-1] == expected[-1], "the one that was enough is the last"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=12),
    st.builds(Amounts, st.integers(-1, 20), st.integers(-1, 10), st.integers(-1, 4)),
    st.integers(0, 40),
)
def test_evictions_for_a_budget_meet_it_and_spare_entries_that_must_stay(
    entries: list[tuple[int, int]], needs: Amounts, spare: int
) -> None:
    sizes = np.array([size for size, _ in entries], np.int64)
    tokens = np.array([count for _, count in entries], np.int64)
    taken = enough(sizes, tokens, needs, spare)
    beginning = next(
        (
            count
            for count in range(len(entries) + 1)
            if not Amounts(
                needs.bytes - sum(sizes[:count].tolist()),
                needs.tokens - sum(tokens[:count].tolist()),
                needs.entries - count,
            )
        ),
        None,
    )
    if beginning is not None and sum(sizes[:beginning].tolist()) <= spare:
        assert taken is not None and taken.tolist() == list(range(beginning)), "the fewest of the first"
    if taken is not None:
        assert len(set(taken.tolist())) == len(taken)
        assert sizes[taken].sum() <= spare
        assert not needs.less(sizes[taken], tokens[taken])
        assert not len(taken) or needs.less(sizes[taken[:-1]], tokens[taken[:-1]]), "the last was needed"
