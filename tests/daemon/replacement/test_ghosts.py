"""The table of evicted keys, while it grows and when it is restored. What it remembers of a key: test_hazard.py."""

from __future__ import annotations

import numpy as np

from tensord.daemon.replacement.ghosts import PLACES_MIN, Ghosts


def add(ghosts: Ghosts, tags: list[int], uses: int, most: int) -> list[int]:
    many = len(tags)
    column = np.array(tags, np.uint32)
    numbers = np.full(many, uses)
    return [int(tag) for tag in ghosts.add(column, np.full(many, 8.0 + uses), numbers, numbers % 8, numbers, most)]


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
    assert len(dropped) + np.count_nonzero(ghosts._tags) == len(tags)
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
        assert np.count_nonzero(again._tags) == min(np.count_nonzero(ghosts._tags), most)
        found = again.find(np.array([3000], np.uint32), 100.0)
        assert found.there[0] and found.uses[0] == 60
