"""Status, pages of entries, and what watchers are told."""

from __future__ import annotations

import pytest

from tensord.daemon.core.events import Accessed
from tensord.daemon.policy.registry import POLICIES
from tensord.ipc import messages

from .stand import SPAN, UNIX_AT_ZERO_S, Make, Stand, key


def test_entries_are_paged_completely_and_once(make: Make) -> None:
    stand = make(1 << 20, max_entries=3000)
    for number in range(300):
        stand.commit(1, number, key(number * 7919, b"abcdefgh" if number % 3 else b"hgfedcba"), 64)
        stand.part(1, number, 64, last=True)
        stand.settle()
    for tag, expected in ((None, 300), (b"hgfedcba", 100), (b"nobody's", 0)):
        seen: list[str] = []
        after, more = None, True
        while more:
            page, after = stand.store.entries(after, 7, tag)
            seen += [entry["key"] for entry in page]
            more = after is not None
        assert len(seen) == len(set(seen)) == expected


def test_a_page_may_begin_behind_a_key_that_is_gone(make: Make) -> None:
    stand = make()
    for number in range(8):
        stand.put(number)
    order = [entry["key"] for entry in stand.store.entries(None, 100)[0]]
    stand.send(1, messages.Evict(1, [bytes.fromhex(order[3])]))
    rest, behind = stand.store.entries(bytes.fromhex(order[3]), 100)
    assert behind is None
    assert [entry["key"] for entry in rest] == order[4:]


def test_status_and_entry_say_what_is_there(make: Make) -> None:
    stand = make()
    stand.now = 3.0
    stand.put(1, 100, tokens=5, ttl_s=10.0)
    view = stand.pin(1)
    stand.now = 4.0
    stand.do(Accessed([view.span_id, view.span_id, 12345], misses=2, lost=7))
    entry = stand.store.entry(key(1))
    assert entry is not None
    assert entry["key"] == key(1).hex()
    assert (entry["payload_bytes"], entry["span_bytes"], entry["tokens"]) == (100, 320, 5)
    assert entry["uses"] == 2
    assert entry["used_unix_s"] == UNIX_AT_ZERO_S + 4
    assert entry["expires_unix_s"] == UNIX_AT_ZERO_S + 13
    status = stand.store.status()
    assert (status["entries"], status["tokens"], status["used_bytes"]) == (1, 5, 320)
    assert status["largest_free_bytes"] == 4096 - 320
    assert (status["hits"], status["hits_unknown"], status["misses"]) == (3 + 7, 1, 2), "a lost record was a hit"
    assert status["log_lost"] == 7
    assert status["puts"] == {"stored": 1}
    assert stand.store.entry(key(2)) is None


def test_watchers_get_every_announced_event(make: Make) -> None:
    stand = make(SPAN)
    stand.put(1)
    stand.put(2)
    stand.send(1, messages.RequestClaim(1, key(3)))
    stand.send(1, messages.Limit(1, 9999))
    stand.send(1, messages.Clear(2))
    events = [event["event"] for event in stand.told]
    assert events == ["put", "evict", "put", "claim", "limit", "clear"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_removed_entry_is_announced_with_reason_age_idle_time_uses_and_worth(make: Make, policy: str) -> None:
    stand = make(4 * SPAN, policy=policy)
    stand.now = 10.0
    for number in range(4):
        stand.put(number, ttl_s=90.0 if number == 1 else None)
    stand.now = 30.0
    stand.do(Accessed([stand.pin(number).span_id for number in (1, 1, 2, 3)]))
    stand.views.clear()
    worth = {number: _worth(stand, number) for number in range(4)}
    stand.now = 50.0
    stand.put(4)
    stand.pass_time(60.0)
    stand.send(1, messages.Evict(1, [key(2)]))
    gone = {event["reason"]: event for event in stand.told if event["event"] in ("evict", "expire")}
    assert gone.keys() == {"capacity", "ttl", "explicit"}
    assert [gone["capacity"][name] for name in ("key", "age_s", "idle_s", "uses")] == [key(0).hex(), 40.0, 40.0, 0]
    assert [gone["ttl"][name] for name in ("event", "age_s", "idle_s", "uses")] == ["expire", 90.0, 70.0, 2]
    assert [gone["explicit"][name] for name in ("key", "age_s", "idle_s", "uses")] == [key(2).hex(), 100.0, 80.0, 1]
    if policy != "hazard":
        # There worth changes with age.
        assert (gone["capacity"]["worth"], gone["ttl"]["worth"]) == (worth[0], worth[1])
    assert gone["capacity"]["worth"] < gone["ttl"]["worth"]
    told = stand.store.status()["departures"]
    assert told["uses"]["ttl"]["sum"] == 2
    assert told["worth"]["ttl"]["sum"] == gone["ttl"]["worth"]


def _worth(stand: Stand, number: int) -> float:
    entry = stand.store.memory.entries.find(key(number))
    assert entry is not None
    return stand.store.memory.policy.worth(entry.span_id)


def test_status_shows_the_ages_and_idle_times_of_evicted_entries(make: Make) -> None:
    stand = make(4 * SPAN)
    assert stand.store.status()["at_eviction"]["entries"] == 0
    for number in range(8):
        stand.now = 10.0 * number
        stand.put(number)
    stand.send(1, messages.Clear(1))
    told = stand.store.status()["at_eviction"]
    assert told["entries"] == 4, "what was cleared made no room for anything"
    assert told["age_s"]["median"] == told["idle_s"]["median"] == 40.0


def test_status_shows_the_bytes_in_the_policys_window(make: Make) -> None:
    stand = make(100 * SPAN, policy="hazard")
    for number in range(100):
        stand.put(number)
    status = stand.store.status()
    assert 0.1 < status["window_bytes"] / status["used_bytes"] <= 0.14
    assert make(policy="lru").store.status()["window_bytes"] is None


def test_how_long_entries_stayed_and_were_idle_is_counted_when_they_go(make: Make) -> None:
    stand = make(4 * SPAN)
    stand.now = 10.0
    stand.put(1, ttl_s=100.0)
    stand.put(2)
    stand.now = 25.0
    stand.send(1, messages.Touch(1, [key(1)]))
    stand.now = 40.0
    stand.send(1, messages.Evict(2, [key(1), key(2)]))
    assert stand.store.entry(key(1)) is None
    told = stand.store.status()["departures"]
    assert {reason: sum(each["counts"]) for reason, each in told["residence_s"].items()} == {"explicit": 2}
    assert told["residence_s"]["explicit"]["sum"] == 60.0
    assert told["idle_s"]["explicit"]["sum"] == 45.0
