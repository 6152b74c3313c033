"""What was evicted is remembered: the latest, so many at most."""

from __future__ import annotations

import random

from tensord.daemon.policy.ghosts import PLACES_MIN, WAYS, Ghost, Ghosts


def of(number: int) -> int:
    """A digest."""
    return random.Random(number).getrandbits(64) | 1 << 63


def test_an_evicted_key_is_remembered_until_a_number_of_later_evictions() -> None:
    ghosts, most = Ghosts(), 64_000
    forgotten: list[int] = []
    for number in range(3 * most):
        ghost = Ghost(float(number), 1 + number % 7, number % 192, number % 11, 5)
        forgotten.append(ghosts.add(of(number), ghost, most))
        if number % 9999 == 0:
            ghosts.check_invariants()
    ghosts.check_invariants()
    assert 0.97 * most < len(ghosts) <= most
    assert len([digest for digest in forgotten if digest]) + len(ghosts) == 3 * most
    latest = range(3 * most - most // 2, 3 * most)
    remembered = [number for number in latest if (found := ghosts.get(of(number))) and found.used_at == number]
    assert len(remembered) > 0.97 * len(latest), "a full bucket forgets a few before their time"
    last = 3 * most - 1
    assert ghosts.pop(of(last)) == Ghost(float(last), 1 + last % 7, last % 192, last % 11, 5)
    assert ghosts.get(of(last)) is None


def test_a_ghost_that_comes_again_is_remembered_as_it_was_last() -> None:
    ghosts = Ghosts()
    for number in range(10 * PLACES_MIN):
        ghosts.add(of(number % 100), Ghost(float(number), 1, 2, 3, 4), 2 * PLACES_MIN)
    assert len(ghosts) == 100
    last = max(number for number in range(10 * PLACES_MIN) if number % 100 == 7)
    assert ghosts.get(of(7)) == Ghost(float(last), 1, 2, 3, 4)


def test_no_bucket_holds_more_than_its_ways_and_the_one_evicted_first_gives_way() -> None:
    ghosts = Ghosts()
    same = [number * PLACES_MIN // WAYS + 5 for number in range(1, WAYS + 2)]
    told = [ghosts.add(digest, Ghost(float(100 - at), 1, 0, 0, 0), PLACES_MIN) for at, digest in enumerate(same)]
    assert told == [0] * WAYS + [same[0]]
    assert [ghosts.get(digest) is None for digest in same] == [True] + [False] * WAYS
