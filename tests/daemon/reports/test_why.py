"""What is told of a key: how its entry stands, what is remembered once it went, and that it was never there."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.core.reports import COMPARED
from tensord.daemon.replacement import POLICIES

from ..store.rows import key_of
from .stand import SPAN, UNIX_AT_ZERO_S, LifetimesStand


def why(stand: LifetimesStand, number: int, **leased: bool) -> dict[str, Any]:
    return stand.reports.why(key_of(number), stand.now, **leased)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_why_ranks_a_stored_entry_among_the_others(policy: str) -> None:
    stand = LifetimesStand(8 * SPAN, policy=policy)
    for number in range(8):
        stand.now += 1
        stand.put(number)
    stand.now = 21.0
    stand.read(5)
    told = why(stand, 3)
    assert (told["state"], told["policy"], told["gone"]) == ("stored", policy, None)
    assert told["entry"]["key"] == key_of(3).hex()
    standing = told["standing"]
    assert (standing["age_s"], standing["idle_s"]) == (16.0, 16.0)
    assert (standing["colder"], standing["compared"]) == (3, 7)
    used = why(stand, 5)["standing"]
    assert (used["age_s"], used["idle_s"]) == (14.0, 0.0)
    assert used["worth"] > standing["worth"]
    assert why(stand, 0)["standing"]["colder"] == 0
    assert why(stand, 7)["standing"]["in_window"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_entry_that_why_names_as_next_victim_is_evicted_next_and_asking_changes_nothing(policy: str) -> None:
    stands = [LifetimesStand(20 * SPAN, policy=policy) for _ in range(2)]
    for stand in stands:
        for number in range(100):
            stand.now += 1
            if stand.row(number % 30):
                stand.read(number % 30)
            else:
                stand.put(number % 30)
    asked, other = stands
    (next_one,) = (number for number in asked.stored() if not why(asked, number)["standing"]["colder"])
    for stand in stands:
        stand.put(1000)
    assert why(asked, next_one)["state"] == "gone"
    for number in range(1001, 1010):
        for stand in stands:
            stand.put(number)
        assert asked.stored(range(2000)) == other.stored(range(2000))


def test_among_many_entries_the_share_of_colder_ones_is_estimated_from_a_sample() -> None:
    stand = LifetimesStand(1200 * SPAN, buckets=1024)
    for number in range(1000):
        stand.now += 1
        stand.put(number)
    for number in (0, 250, 500, 750, 999):
        standing = why(stand, number)["standing"]
        assert COMPARED - 1 <= standing["compared"] <= COMPARED
        assert abs(standing["colder"] / standing["compared"] - number / 1000) < 0.15


def test_an_entry_in_use_is_compared_with_none() -> None:
    stand = LifetimesStand(4 * SPAN)
    for number in range(4):
        stand.put(number)
    stand.view(0)
    stand.pin(1, 1, 60.0)
    stand.put(4)
    told = {number: why(stand, number) for number in (0, 1, 3, 4)}
    assert [each["standing"]["held"] for each in told.values()] == ["lease", "pin", None, None]
    assert told[4]["standing"]["compared"] == 1
    assert why(stand, 2)["state"] == "gone"
    held = [why(stand, 3, leased=leased)["standing"] for leased in (True, False)]
    assert [each["held"] for each in held] == ["lease", None]


@pytest.mark.parametrize(
    ("end", "reason"), [("put", "capacity"), ("evict", "explicit"), ("time", "ttl"), ("clear", "cleared")]
)
def test_why_says_when_and_why_an_entry_was_removed(end: str, reason: str) -> None:
    stand = LifetimesStand(2 * SPAN)
    stand.now = 10.0
    stand.put(1, ttl=50.0)
    stand.now = 20.0
    stand.read(1, 1)
    stand.put(2)
    stand.now = 45.0
    if end == "put":
        stand.read(2)
        stand.put(3)
    elif end == "evict":
        stand.end(1)
    elif end == "clear":
        stand.clear(1)
        stand.settle()
    else:
        stand.pass_time(15.0)
    went = stand.now
    stand.now += 5.0
    told = why(stand, 1)
    assert (told["state"], told["entry"], told["standing"]) == ("gone", None, None)
    gone = told["gone"]
    assert (gone["reason"], gone["uses"], gone["gone_s"]) == (reason, 2, 5.0)
    assert (gone["age_s"], gone["idle_s"]) == (went - 10.0, went - 20.0)
    assert gone["gone_unix_s"] == UNIX_AT_ZERO_S + went
    assert "at" not in gone, "a time of the daemon's own clock"


def test_why_shows_what_the_policy_remembers_of_an_evicted_key() -> None:
    stand = LifetimesStand(2 * SPAN, policy="hazard")
    stand.put(1)
    stand.read(1)
    for number in range(2, 6):
        stand.put(number)
    gone = next(number for number in (1, 2) if why(stand, number)["state"] == "gone")
    told = why(stand, gone)
    assert told["remembered"]["uses"] >= 1
    assert told["remembered"]["like"]
    stand.put(gone)
    back = why(stand, gone)
    assert back["state"] == "stored"
    assert back["gone"] == {**told["gone"], "gone_s": back["gone"]["gone_s"]}, "that it went before is still told"
    assert back["remembered"] is None
    assert back["standing"]["uses"] == told["remembered"]["uses"] + 1


def test_a_victim_under_scan_is_shown_as_leaving() -> None:
    stand = LifetimesStand(SPAN)
    stand.put(1)
    stand.rows.spans.hide(stand.rows.policy.victims(1), "capacity")
    assert (why(stand, 1)["state"], why(stand, 1)["reason"]) == ("leaving", "capacity")
    stand.rows.spans.begin_scan()
    assert (why(stand, 1)["state"], why(stand, 1)["reason"]) == ("leaving", "capacity")
    stand.rows.spans.scanned(set())
    assert why(stand, 1)["state"] == "gone"


def test_a_key_that_was_never_put_is_unknown() -> None:
    stand = LifetimesStand()
    told = why(stand, 1)
    assert (told["state"], told["records"]) == ("unknown", 0)
    assert told["entry"] is told["standing"] is told["gone"] is told["remembered"] is None
