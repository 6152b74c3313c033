"""What is told of a key: how its entry stands, what is remembered once it went, and that it was never there."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tensord.daemon.core.events import Accessed
from tensord.daemon.core.why import COMPARED
from tensord.daemon.policy.registry import POLICIES
from tensord.ipc import messages
from tensord.shm.keys import make_key

from .blocks import name
from .stand import SPAN, UNIX_AT_ZERO_S, Make, Stand, key


def digest(number: int) -> bytes:
    """A key as clients make them."""
    return make_key(b"namespac", hashlib.sha256(b"%d" % number).digest()[:24], 0)


def why(stand: Stand, of: bytes) -> dict[str, Any]:
    return stand.store.why(of, stand.now)


def use(stand: Stand, *keys: bytes) -> None:
    found = [stand.store.memory.entries.find(each) for each in keys]
    stand.do(Accessed([entry.span_id for entry in found if entry is not None]))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_why_lists_the_entries_that_would_be_evicted_before_a_stored_one(make: Make, policy: str) -> None:
    stand = make(8 * SPAN, policy=policy)
    for number in range(8):
        stand.now += 1
        stand.put(number)
    stand.now = 20.0
    use(stand, key(5))
    told = why(stand, key(3))
    assert (told["state"], told["policy"], told["gone"]) == ("stored", policy, None)
    assert told["entry"]["key"] == key(3).hex()
    standing = told["standing"]
    assert (standing["place"], standing["before"]) == (4, [key(number).hex() for number in range(3)])
    assert (standing["age_s"], standing["idle_s"]) == (16.0, 16.0)
    assert (standing["colder"], standing["compared"]) == (3, 7)
    used = why(stand, key(5))["standing"]
    assert (used["age_s"], used["idle_s"], used["colder"]) == (14.0, 0.0, 7 if policy != "hazard" else used["colder"])
    assert used["worth"] > standing["worth"]
    assert why(stand, key(0))["standing"]["before"] == []
    assert why(stand, key(0))["standing"]["place"] == 1


def test_the_entry_that_why_names_as_next_victim_is_evicted_next(make: Make) -> None:
    stand = make(20 * SPAN, policy="hazard")
    for number in range(100):
        stand.now += 1
        if stand.store.memory.entries.find(key(number % 30)):
            use(stand, key(number % 30))
        else:
            stand.put(number % 30)
    stored = [number for number in range(30) if stand.store.memory.entries.find(key(number))]
    (next_one,) = (number for number in stored if why(stand, key(number))["standing"]["place"] == 1)
    stand.put(1000)
    assert why(stand, key(next_one))["state"] == "gone"


def test_among_many_entries_the_share_of_colder_ones_is_estimated_from_a_sample(make: Make) -> None:
    stand = make(1200 * SPAN, max_entries=2000)
    for number in range(1000):
        stand.now += 1
        stand.put(digest(number))
    for number in (0, 250, 500, 750, 999):
        standing = why(stand, digest(number))["standing"]
        assert COMPARED - 1 <= standing["compared"] <= COMPARED + 1
        assert abs(standing["colder"] / standing["compared"] - number / 1000) < 0.15
        assert standing["place"] == (1 if number == 0 else None)


def test_an_entry_in_use_has_no_place_in_the_order_and_is_compared_with_none(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in range(4):
        stand.put(number)
    stand.pin(0)
    stand.send(1, messages.Pin(1, key(1), 60.0))
    stand.put(4)
    told = {number: why(stand, key(number)) for number in (0, 1, 3, 4)}
    assert [each["standing"]["held"] for each in told.values()] == ["lease", "pin", None, None]
    assert told[4]["standing"]["before"] == [key(3).hex()]
    assert told[4]["standing"]["compared"] == 1
    assert why(stand, key(2))["state"] == "gone"


def test_the_lanes_read_for_a_question_count_more_than_the_last_scan(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in range(4):
        stand.put(number)
    stand.pin(0)
    stand.put(4)
    held = [stand.store.why(key(0), stand.now, leased=leased)["standing"]["held"] for leased in (None, True, False)]
    assert held == ["lease", "lease", None]
    standing = stand.store.why(key(2), stand.now, leased=True)["standing"]
    assert (standing["held"], standing["place"]) == ("lease", None)


def test_why_counts_a_blocks_children_and_names_descendants_evicted_first(make: Make) -> None:
    stand = make(1 << 16)
    stand.put_sequence(1, 2, 3)
    root = why(stand, name((1,)))["standing"]
    assert root["children"] == 1
    assert root["before"] == [name((1, 2, 3)).hex(), name((1, 2)).hex()]


@pytest.mark.parametrize(
    ("end", "reason"), [("put", "capacity"), ("evict", "explicit"), ("time", "ttl"), ("clear", "cleared")]
)
def test_why_says_when_and_why_an_entry_was_removed(make: Make, end: str, reason: str) -> None:
    stand = make(2 * SPAN)
    stand.now = 10.0
    stand.put(1, ttl_s=50.0)
    stand.now = 20.0
    use(stand, key(1), key(1))
    stand.put(2)
    stand.now = 45.0
    if end == "put":
        use(stand, key(2))
        stand.put(3)
    elif end == "evict":
        stand.send(1, messages.Evict(1, [key(1)]))
    elif end == "clear":
        stand.send(1, messages.Clear(1))
        stand.go_on()
    else:
        stand.pass_time(15.0)
    went = stand.now
    stand.now += 5.0
    told = why(stand, key(1))
    assert (told["state"], told["entry"], told["standing"]) == ("gone", None, None)
    gone = told["gone"]
    assert (gone["reason"], gone["uses"], gone["gone_s"]) == (reason, 2, 5.0)
    assert (gone["age_s"], gone["idle_s"]) == (went - 10.0, went - 20.0)
    assert gone["gone_unix_s"] == UNIX_AT_ZERO_S + went
    assert "at" not in gone, "a time of the daemon's own clock"
    assert gone["worth"] > 0


def test_why_shows_what_the_policy_remembers_of_an_evicted_key(make: Make) -> None:
    stand = make(2 * SPAN, policy="hazard")
    stand.put(1)
    use(stand, key(1))
    for number in range(2, 6):
        stand.put(number)
    told = why(stand, key(1)) if why(stand, key(1))["state"] == "gone" else why(stand, key(2))
    assert told["remembered"]["uses"] >= 1
    assert told["remembered"]["like"]
    stand.put(bytes.fromhex(told["key"]))
    back = why(stand, bytes.fromhex(told["key"]))
    assert back["state"] == "stored"
    assert back["gone"] == {**told["gone"], "gone_s": back["gone"]["gone_s"]}, "that it went before is still told"
    assert back["remembered"] is None
    assert back["standing"]["uses"] == told["remembered"]["uses"] + 1


def test_a_victim_under_scan_is_shown_as_leaving(make: Make) -> None:
    stand = make(SPAN)
    stand.put(1)
    stand.begin(1, 1, key(2), 64)
    assert stand.scans == 1
    told = why(stand, key(1))
    assert (told["state"], told["reason"]) == ("leaving", "capacity")
    stand.settle(copies=False)
    assert why(stand, key(1))["state"] == "gone"


def test_a_key_that_was_never_put_is_unknown(make: Make) -> None:
    stand = make()
    told = why(stand, key(1))
    assert (told["state"], told["records"], told["records_max"]) == ("unknown", 0, stand.limits.max_entries)
    assert told["entry"] is told["standing"] is told["gone"] is told["remembered"] is None


def test_removed_keys_are_found_by_their_first_digits(make: Make) -> None:
    stand = make(SPAN)
    for number in range(3):
        stand.put(digest(number))
    gone = [digest(1), digest(0)]
    assert stand.store.gone(digest(2), 16, 8) == gone
    assert stand.store.gone(digest(0), 64, 8) == [digest(0)]
    assert stand.store.gone(digest(2), 64, 8) == []


def test_questions_change_nothing(make: Make) -> None:
    stand = make(4 * SPAN, policy="hazard")
    for number in range(6):
        stand.put(number)
    before = (list(stand.store.memory.policy.coldest()), stand.store.status())
    for number in range(8):
        why(stand, key(number))
    assert (list(stand.store.memory.policy.coldest()), stand.store.status()) == before
