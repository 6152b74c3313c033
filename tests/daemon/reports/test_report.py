"""Status, pages of entries, what watchers are told, and what is told of a key: how its entry stands, what is remembered
once it went, and that it was never there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.core import reports as described
from tensord.daemon.replacement import POLICIES
from tensord.daemon.reports.counters import BOUNDS_S, Histogram
from tensord.ipc.messages import control as messages

from ..store.rows import TAG, key_of
from .stand import SPAN, UNIX_AT_ZERO_S, LifetimesStand

OTHER = b"other ns"


def pages(stand: LifetimesStand, count: int, tag: bytes | None = None) -> list[str]:
    seen: list[str] = []
    after, more = None, True
    while more:
        page, after = stand.reports.page(after, count, tag, stand.now)
        seen += [entry["key"] for entry in page]
        more = after is not None
        assert after is None or len(after) == 32
    return seen


@pytest.mark.parametrize("looks", [1 << 18, 64])
def test_entries_are_paged_completely_and_once(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    monkeypatch.setattr(described, "LOOKS_MAX", looks)
    stand = LifetimesStand(1 << 18)
    for number in range(300):
        stand.put(key_of(number, TAG if number % 3 else OTHER))
    stand.end(1, 299)
    for tag, expected in ((None, 298), (OTHER, 100), (b"nobody's", 0)):
        seen = pages(stand, 7, tag)
        assert len(seen) == len(set(seen)) == expected


def test_a_page_may_begin_behind_an_entry_that_is_gone_and_any_cursor_is_taken() -> None:
    stand = LifetimesStand()
    for number in range(8):
        stand.put(number)
    order = pages(stand, 100)
    _, behind = stand.reports.page(None, 4, None, stand.now)
    stand.end(*(number for number in range(8) if key_of(number).hex() == order[3]))
    rest, end = stand.reports.page(behind, 100, None, stand.now)
    assert ([entry["key"] for entry in rest], end) == (order[4:], None)
    assert stand.reports.page(b"\xff" * 32, 100, None, stand.now) == ([], None)


def test_status_and_entry_say_what_is_there() -> None:
    stand = LifetimesStand(4096)
    stand.now = 3.0
    stand.put(0)
    agent = stand.rows.agents.named("planner")
    said = next(said for said, number in stand.rows.agents.numbers.items() if number == agent)
    stand.put(1, 100, tokens=5, ttl=10.0, cost=12.3, agent=said, parent=0, uid=1000, client=2)
    view = stand.view(1)
    stand.now = 4.0
    stand.read(1, 1, others=[12345], misses=2, lost=7)
    stand.pin(1, 1, 9.0)
    entry = stand.entry(1)
    assert (entry["key"], entry["namespace"], entry["span_id"]) == (key_of(1).hex(), TAG.hex(), view)
    assert (entry["payload_bytes"], entry["span_bytes"], entry["tree_bytes"], entry["tokens"]) == (100, SPAN, 64, 5)
    assert (entry["uses"], entry["cost_ms"], entry["agent"], entry["owner_uid"]) == (2, 12.3, "planner", 1000)
    assert entry["created_unix_s"] == UNIX_AT_ZERO_S + 3
    assert entry["used_unix_s"] == UNIX_AT_ZERO_S + 4
    assert entry["expires_unix_s"] == pytest.approx(UNIX_AT_ZERO_S + 13)
    assert (entry["pinned_by_message"], entry["prefix"], entry["children"]) == (True, None, 0)
    assert (entry["parent"], stand.entry(0)["children"]) == (key_of(0).hex(), 1)
    assert stand.reports.why(key_of(0), stand.now)["standing"]["children"] == 1
    assert (stand.entry(0)["expires_unix_s"], stand.entry(0)["parent"]) == (None, None)
    assert stand.rows.lend(640) is not None
    status = stand.status()
    assert (status["entries"], status["tokens"], status["used_bytes"]) == (2, 5, 2 * SPAN + 640)
    assert (status["lent_bytes"], status["grants"]) == (640, 1)
    assert status["largest_free_bytes"] == 4096 - 2 * SPAN - 640
    assert (status["hits"], status["hits_unknown"], status["misses"]) == (3 + 7, 1, 2), "a lost record was a hit"
    assert (status["puts"], status["put_bytes"], status["namespaces"]) == ({"stored": 2}, 200, 1)
    assert status["prefix_blocks"] == 0
    assert stand.reports.why(key_of(2), stand.now)["entry"] is None
    rows = stand.reports.by_uid({7})
    assert rows[0] | rows[1000] == rows[1000]
    assert (rows[0]["span_bytes"], rows[0]["lent_bytes"], rows[0]["entries"]) == (SPAN + 640, 640, 1)
    assert (rows[1000]["span_bytes"], rows[1000]["tokens"], rows[1000]["entries"]) == (SPAN, 5, 1)
    assert set(rows[7].values()) == {0}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_removed_entry_is_announced_with_reason_age_idle_time_uses_and_worth(policy: str) -> None:
    stand = LifetimesStand(4 * SPAN, policy=policy)
    stand.now = 10.0
    for number in range(4):
        stand.put(number, ttl=90.0 if number == 1 else 0.0)
    stand.now = 30.0
    stand.read(1, 1, 2, 3)
    worth = {number: float(stand.rows.policy.worth([stand.row(number)])[0]) for number in range(4)}
    stand.now = 50.0
    stand.put(4)
    stand.pass_time(60.0)
    stand.end(2)
    gone = {event["reason"]: event for event in stand.told if event["event"] in ("evict", "expire")}
    assert gone.keys() == {"capacity", "ttl", "explicit"}
    numbers = ("age_s", "idle_s", "uses")
    assert [gone["capacity"][name] for name in ("key", *numbers)] == [key_of(0).hex(), 40.0, 40.0, 0]
    assert [gone["ttl"][name] for name in ("event", *numbers)] == ["expire", 90.0, 70.0, 2]
    assert [gone["explicit"][name] for name in ("key", *numbers)] == [key_of(2).hex(), 100.0, 80.0, 1]
    if policy != "hazard":
        # There worth changes with age.
        assert (gone["capacity"]["worth"], gone["ttl"]["worth"]) == (worth[0], worth[1])
    assert gone["capacity"]["worth"] < gone["ttl"]["worth"]
    told = stand.status()["idle_at_eviction_s"]
    assert {reason: each["sum"] for reason, each in told.items()} == {"capacity": 40.0, "ttl": 70.0, "explicit": 80.0}


@settings(max_examples=100)
@given(st.lists(st.floats(min_value=-10, max_value=1e9) | st.sampled_from(BOUNDS_S)))
def test_every_amount_is_in_the_one_bucket_that_it_fits(amounts: list[float]) -> None:
    histogram = Histogram()
    half = len(amounts) // 2
    histogram.count_all(np.array(amounts[:half], np.float64))
    for amount in amounts[half:]:
        histogram.count(amount)
    told = histogram.as_dict()
    lows = [float("-inf"), *BOUNDS_S]
    highs = [*BOUNDS_S, float("inf")]
    # What the clock says is less than nothing is nothing.
    expected = [sum(low < max(0.0, a) <= high for a in amounts) for low, high in zip(lows, highs, strict=True)]
    assert told["counts"] == expected
    assert told["sum"] == pytest.approx(sum(max(0.0, amount) for amount in amounts))


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
        stand.outbox.now = stand.now
        stand.sweeps.clear(1, messages.Clear(1, None))
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


def test_a_key_that_was_never_put_is_unknown() -> None:
    stand = LifetimesStand()
    told = why(stand, 1)
    assert (told["state"], told["records"]) == ("unknown", 0)
    assert told["entry"] is told["standing"] is told["gone"] is told["remembered"] is None
