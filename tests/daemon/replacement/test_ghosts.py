"""The table of evicted keys against a plain dict, while it grows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.replacement.ghosts import PLACES_MIN, Ghosts

BATCHES = st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=40, unique=True), min_size=1, max_size=12)


def add(ghosts: Ghosts, tags: list[int], uses: int, most: int) -> list[int]:
    many = len(tags)
    column = np.array(tags, np.uint32)
    numbers = np.full(many, uses)
    return [int(tag) for tag in ghosts.add(column, np.full(many, 8.0 + uses), numbers, numbers % 8, numbers, most)]


@given(batches=BATCHES, taken=st.lists(st.integers(1, 400), max_size=40, unique=True))
@settings(deadline=None)
def test_it_is_a_dict_as_long_as_no_bucket_is_full(batches: list[list[int]], taken: list[int]) -> None:
    ghosts, model = Ghosts(4 * PLACES_MIN), dict[int, int]()
    for uses, tags in enumerate(batches, 1):
        # Tags that share no bucket with more than a few others.
        for dropped in add(ghosts, tags, uses, PLACES_MIN * (1 + uses // 4)):
            del model[dropped]
        model.update(dict.fromkeys(tags, uses))
    ghosts.check_invariants()
    assert len(ghosts) == len(model)
    if taken:
        found = ghosts.find(np.array(taken, np.uint32), 30.0, take=True)
        for at, tag in enumerate(taken):
            uses = model.pop(tag, 0)
            assert found.there[at] == (uses > 0) and found.uses[at] == uses
            assert found.unused[at] == (22.0 - uses if uses else 0)
    ghosts.check_invariants()
    assert len(ghosts) == len(model)


def test_it_grows_step_by_step_and_drops_the_oldest_of_a_full_bucket() -> None:
    ghosts = Ghosts(8 * PLACES_MIN)
    chance = np.random.default_rng(1)
    tags = np.unique(chance.integers(1, 1 << 32, 20_000, dtype=np.uint32))
    chance.shuffle(tags)
    dropped: list[int] = []
    sizes = []
    for first in range(0, len(tags), 64):
        some = tags[first : first + 64].tolist()
        dropped += add(ghosts, some, 1 + first // 64, 6 * PLACES_MIN)
        sizes.append(ghosts.places)
    ghosts.check_invariants()
    assert max(np.diff(sizes)) <= 64 * 8 and sizes[-1] == 6 * PLACES_MIN
    assert len(dropped) + len(ghosts) == len(tags)
    recent = ghosts.find(tags[-4000:], 0.0).there
    old = ghosts.find(tags[:4000], 0.0).there
    assert recent.mean() > 0.9 > 0.5 > old.mean()


def test_a_saved_table_is_restored_also_into_a_smaller_one() -> None:
    ghosts = Ghosts(4 * PLACES_MIN)
    for batch in range(60):
        add(ghosts, list(range(1 + 50 * batch, 51 + 50 * batch)), batch + 1, 2 * PLACES_MIN)
    for most in (4 * PLACES_MIN, PLACES_MIN):
        again = Ghosts(4 * PLACES_MIN)
        again.restore(ghosts.saved(), most)
        again.check_invariants()
        assert len(again) == min(len(ghosts), most)
        found = again.find(np.array([3000], np.uint32), 100.0)
        assert found.there[0] and found.uses[0] == 60
