"""What the learned policy remembers, and what it takes over from an earlier daemon."""

from __future__ import annotations

import random
from copy import copy

import numpy as np
import pytest

from .rows import Rows, digest_of


def skewed(requests: int = 2000) -> Rows:
    """A full store of 200 rows: half of the requests are for 50 keys, the others for new keys."""
    chance = random.Random(1)
    rows = Rows("hazard", 512)
    at: dict[int, int] = {}
    for number in range(requests):
        key = chance.randrange(50) if chance.random() < 0.5 else 1000 + number
        now = number / 10
        if key in at:
            rows.policy.used([at[key]], now)
        else:
            at[key] = rows.put(key, now)
        if len(rows.live) > 200:
            for gone in rows.evict(1):
                del at[gone]
    return rows


def again(rows: Rows, learned: bool = True) -> Rows:
    """The same rows under the policy of the next daemon."""
    data = list(rows.policy.learned())
    following = copy(rows)
    following.policy = type(rows.policy)(rows.policy._facts)
    live = np.array(list(rows.live))
    by_use, by_put = live[rows.policy.worth(live).argsort()], live[rows.policy.put_at[live].argsort()]
    for _ in following.policy.recovering(by_use, by_put, np.zeros(512, np.uint16), 0.0):
        pass
    if learned:
        following.policy.learn(data)
    following.policy.check_invariants()
    return following


def evicted(rows: Rows) -> tuple[int, int]:
    """The key of an entry in use that is evicted now, and its uses."""
    row = next(row for row, key in rows.live.items() if key < 50)
    key, uses = rows.live[row], rows.policy.explain(row).uses
    assert uses is not None and uses > 10
    rows.remove([row])
    return key, uses


def test_what_is_used_stays_among_what_is_not() -> None:
    assert sum(key < 50 for key in skewed().live.values()) >= 49


def test_an_evicted_key_keeps_its_uses_also_with_the_next_daemon() -> None:
    rows = skewed()
    key, uses = evicted(rows)
    for policy in (rows.policy, again(rows).policy):
        recalled = policy.recall(digest_of(key))
        assert recalled is not None and recalled.uses == uses
    row = rows.put(key, 500.0)
    assert rows.policy.explain(row).uses == uses + 1
    assert rows.policy.recall(digest_of(key)) is None


def test_a_key_that_ended_is_forgotten() -> None:
    rows = skewed()
    row = next(iter(rows.live))
    key = rows.live[row]
    rows.remove([row], evicted=False)
    assert rows.policy.recall(digest_of(key)) is None


def test_the_next_daemon_ranks_as_this_one() -> None:
    rows = skewed()
    following = again(rows)
    live = sorted(rows.live)
    assert [rows.policy.explain(row).uses for row in live] == [following.policy.explain(row).uses for row in live]
    colder = set(rows.policy.victims(100))
    assert len(colder & set(following.policy.victims(100))) >= 95


@pytest.mark.parametrize("damage", ["nothing", "a part is missing", "a part is short", "noise"])
def test_a_damaged_state_is_refused(damage: str) -> None:
    rows = skewed(500)
    data = list(rows.policy.learned())
    damaged = {
        "nothing": [],
        "a part is missing": data[:-1],
        "a part is short": [*data[:-1], data[-1][:-8]],
        "noise": [b"\xff" * 48 for _ in data],
    }[damage]
    following = again(rows, learned=False)
    with pytest.raises(ValueError, match="not a"):
        following.policy.learn(damaged)
    following.policy.check_invariants()


def test_entries_of_a_finished_agent_go_first() -> None:
    rows = skewed()
    theirs = [rows.put(5000 + number, 500.0, agent=7) for number in range(5)]
    for number in range(60):
        rows.put(6000 + number, 500.0)
    rows.policy.used(theirs, 500.0, 7)
    rows.policy.turn(7, "finished", 501.0)
    assert sorted(rows.policy.victims(5)) == sorted(theirs)
    rows.policy.may_go(theirs, True)
    rows.policy.turn(7, "began", 502.0)
    assert not set(theirs) & set(rows.policy.victims(5)), "it runs again"


def test_the_tail_of_a_long_sequence_must_be_worth_its_victims() -> None:
    rows = skewed()
    parent = 0
    for number in range(30):
        parent = rows.put(7000 + number, 500.0, parent=parent)
    rows.policy.may_go([parent], False)
    assert not rows.policy.admits(digest_of(8000), 6400, parent, tokens=1), "it is large, and costs nothing"
    assert rows.policy.recall(digest_of(8000)) is not None, "a refused block is remembered"
