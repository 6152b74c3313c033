"""Which missing keys are sought in the remote store, what becomes of it when the store is slow or fails, which host
computes a key that several hosts miss, and how long the others wait for it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tensord.daemon.forms.events import RemoteEntry, Tick
from tensord.daemon.remote import fetches, link, writes
from tensord.daemon.remote.fetches import UNKNOWN_S, WAIT_TIMES
from tensord.daemon.remote.link import FAILURES_MAX
from tensord.errors import Corrupt, TierTimedOut, TierUnavailable
from tensord.ipc.messages import control as messages

from ..core.stand import key
from .stand import FOUND, REMOTE, SPAN, RemoteStand, ask, verdicts


def test_a_missing_key_that_is_found_is_a_hit_for_its_client_and_lives_for_what_was_left_of_its_time(
    stand: RemoteStand,
) -> None:
    stand.remote[key(1)] = replace(FOUND, lives_s=5.0)
    assert ask(stand).answer == "wait"
    stand.settle()
    assert verdicts(stand) == ["wait", "hit"]
    header = stand.header_of(key(1))
    assert (header.payload_bytes, header.tokens, header.cost_ms, header.owner_uid) == (64, 3, 8.0, 1001)
    assert header.checksum == 7
    assert header.ttl_s == 5.0 and header.expires_s == pytest.approx(stand.now + 5.0)
    assert (stand.counted, stand.store.counters.remote_read_bytes) == ({"fetched": 1}, 64)


def test_a_key_that_is_not_found_is_computed_by_who_asked_first(stand: RemoteStand) -> None:
    assert ask(stand).answer == ask(stand, client=2).answer == "wait"
    stand.settle()
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.last(1).token
    assert verdicts(stand, 2) == ["wait"]
    stand.put(1, claim=stand.last(1).token)
    assert verdicts(stand, 2) == ["wait", "hit"]


def test_everybody_who_waits_gets_what_is_found_though_the_first_who_asked_has_left(stand: RemoteStand) -> None:
    stand.remote[key(1)] = FOUND
    for client in (1, 2, 3):
        ask(stand, client)
    assert len(stand.seeks) == 1, "one question for all of them"
    stand.leave(1)
    stand.settle()
    assert verdicts(stand, 2) == verdicts(stand, 3) == ["wait", "hit"]


def test_a_fetch_is_not_the_one_hand_over_of_a_claim(stand: RemoteStand) -> None:
    for client in (1, 2, 3):
        ask(stand, client)
    stand.settle()
    stand.leave(1)
    assert verdicts(stand, 2) == ["wait", "compute"], "the first who computes may die once"
    stand.leave(2)
    assert verdicts(stand, 3) == ["wait", "alone"]


def test_nobody_waits_longer_than_computing_takes(stand: RemoteStand) -> None:
    stand.remote[key(1)] = FOUND
    assert ask(stand, within_s=0.3).lasts_s == pytest.approx(0.3)
    ask(stand, 2, within_s=0.3)
    stand.now += 0.31
    seek = stand.seeks.popleft()
    stand.go_on()
    assert verdicts(stand) == ["wait", "compute"]
    assert verdicts(stand, 2) == ["wait"]
    # What comes late is of use to those who still wait.
    stand.seeks.append(seek)
    stand.settle()
    assert verdicts(stand, 2) == ["wait", "hit"]
    assert stand.put(1, claim=stand.last(1).token) == "existed"
    assert stand.counted["late"] == 1


@pytest.mark.parametrize(("cost_ms", "waits_s"), [(100.0, 0.1), (0.0, UNKNOWN_S), (9000.0, 2.0)])
def test_the_wait_is_what_the_puts_of_a_namespace_took_to_compute(
    stand: RemoteStand, cost_ms: float, waits_s: float
) -> None:
    stand.put(7, cost_ms=cost_ms)
    assert ask(stand, within_s=0.0).lasts_s == pytest.approx(waits_s)


def test_a_store_that_is_slower_than_computing_is_not_asked_until_that_is_forgotten(stand: RemoteStand) -> None:
    ask(stand, number=1, within_s=1.0)
    stand.seek(answer_s=0.5)
    assert ask(stand, number=2, within_s=0.4).answer == "compute"
    assert ask(stand, number=3, within_s=0.6).answer == "wait"
    stand.settle()
    stand.now += 100
    assert ask(stand, number=4, within_s=0.4).answer == "wait"


def test_a_key_that_is_not_found_is_claimed_among_hosts_for_longer_than_computing_takes() -> None:
    stand = RemoteStand(**REMOTE)
    ask(stand, within_s=1.0)
    [seek] = stand.seeks
    assert seek.claims_s == pytest.approx(3.0)
    reads_only = RemoteStand(**{**REMOTE, "remote_writes": False})
    ask(reads_only, within_s=1.0)
    assert not reads_only.seeks[0].claims_s, "what it computes comes to nobody"


def test_while_an_answer_is_overdue_no_other_client_waits(stand: RemoteStand) -> None:
    ask(stand, number=1, within_s=0.2)
    stand.now += 0.3
    stand.go_on()
    assert ask(stand, number=2).answer == "compute"
    stand.seek()
    assert ask(stand, number=3).answer == "wait"


def test_no_more_keys_are_sought_at_once_than_may(stand: RemoteStand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "SOUGHT_MAX", 3)
    assert [ask(stand, number=number).answer for number in range(4)] == ["wait"] * 3 + ["compute"]
    assert stand.counted == {"unasked": 1}


@pytest.mark.parametrize("error", [Corrupt("its checksum is wrong"), TierTimedOut("too slow")])
def test_an_object_that_cannot_be_read_is_computed(stand: RemoteStand, error: Any) -> None:
    stand.remote[key(1)] = FOUND
    ask(stand)
    ask(stand, 2)
    stand.seek()
    stand.go_on()
    stand.read_remote(error=error)
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.find(key(1)) is None
    stand.put(1, claim=stand.last(1).token)
    assert verdicts(stand, 2) == ["wait", "hit"]
    assert stand.counted["failed"] == 1
    stand.settle()
    assert stand.used_bytes == SPAN


def test_a_put_that_overtakes_a_fetch_wins(stand: RemoteStand) -> None:
    stand.remote[key(1)] = FOUND
    ask(stand)
    stand.seek()
    assert stand.put(1, client=2, settles=False) == "stored"
    assert verdicts(stand) == ["wait", "hit"]
    stand.settle()
    assert stand.used_bytes == SPAN
    assert (stand.counted, stand.store.counters.remote_read_bytes) == ({"overtaken": 1}, 0)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("how", ["invalidated", "evicted by name"])
def test_what_is_found_after_an_invalidation_or_an_eviction_is_not_shown(
    stand: RemoteStand, how: str, copied: bool
) -> None:
    stand.remote[key(1)] = FOUND
    ask(stand)
    if copied:
        stand.seek()
        stand.go_on()
    if how == "invalidated":
        stand.send(2, messages.Invalidate(9, b"namespac", 0))
        assert verdicts(stand) == ["wait", "alone"]
    else:
        stand.send(2, messages.Evict(3, [key(1)]))
    stand.settle()
    assert stand.find(key(1)) is None
    assert stand.used_bytes == 0
    if how == "evicted by name":
        assert verdicts(stand) == ["wait", "compute"]
        assert key(1) not in stand.remote


@pytest.mark.parametrize("lacks", ["room", "a parent"])
def test_a_found_entry_without_room_or_without_its_parent_is_computed(stand: RemoteStand, lacks: str) -> None:
    stand.remote[key(1)] = FOUND if lacks == "room" else RemoteEntry(64, 16, parent=key(2))
    if lacks == "room":
        stand.press(refuse=True, reason="the host is full")
    ask(stand)
    stand.settle()
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.find(key(1)) is None and not stand.store.parts.own.grants


def test_a_host_that_has_missed_a_key_at_the_same_moment_waits_until_it_is_computed(stand: RemoteStand) -> None:
    stand.others[key(1)] = stand.now
    ask(stand, within_s=1.0)
    ask(stand, 2, within_s=1.0)
    stand.pass_time(1.1)
    assert verdicts(stand) == verdicts(stand, 2) == ["wait"]
    stand.remote[key(1)] = FOUND
    stand.pass_time(0.1)
    stand.settle()
    assert verdicts(stand) == verdicts(stand, 2) == ["wait", "hit"]
    assert stand.counted == {"waited": 1, "fetched": 1}


def test_the_wait_for_another_host_ends_a_quarter_after_it_ought_to_be_done(stand: RemoteStand) -> None:
    stand.now = 100.0
    stand.others[key(1)] = stand.now - 0.5
    ask(stand, within_s=1.0)
    stand.pass_time(WAIT_TIMES - 0.5 - 0.01)
    assert verdicts(stand) == ["wait"]
    stand.pass_time(0.02)
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.counted == {"waited": 1, "missed": 1}
    assert stand.store.next_timer() is None or not stand.seeks


@pytest.mark.parametrize(("within_s", "others_s"), [(1.0, 1.3), (700.0, 0.0)], ids=["is late", "takes too long"])
def test_a_host_that_would_wait_in_vain_computes_at_once(stand: RemoteStand, within_s: float, others_s: float) -> None:
    stand.now = 100.0
    stand.others[key(1)] = stand.now - others_s
    ask(stand, within_s=within_s)
    stand.seek()
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.counted == {"missed": 1}


@pytest.mark.parametrize("error", [None, TierUnavailable("connection refused")], ids=["gives up", "store fails"])
def test_a_host_that_waits_computes_as_soon_as_the_other_gives_up_or_the_store_fails(
    stand: RemoteStand, error: TierUnavailable | None
) -> None:
    stand.others[key(1)] = stand.now
    ask(stand, within_s=1.0)
    stand.pass_time(0.2)
    assert verdicts(stand) == ["wait"]
    stand.others.clear()
    stand.now += 0.1
    stand.do(Tick())
    stand.seek(error=error)
    assert verdicts(stand) == ["wait", "compute"]
    assert not stand.withdrawn


def test_nobody_waits_for_other_hosts_once_the_store_is_left_alone(stand: RemoteStand) -> None:
    for number in range(2 * FAILURES_MAX):
        stand.others[key(number)] = stand.now
        ask(stand, number=number, within_s=1.0)
    while stand.seeks:
        stand.seek()
    stand.now += 0.1
    stand.do(Tick())
    for _ in range(FAILURES_MAX):
        stand.seek()
    for _ in range(FAILURES_MAX):
        stand.seek(error=TierTimedOut("no answer in time"))
    stand.now += 0.3
    stand.do(Tick())
    assert not stand.seeks
    assert verdicts(stand).count("compute") == 2 * FAILURES_MAX


@pytest.mark.parametrize("how", ["abandons", "leaves", "is refused"])
def test_a_claim_of_which_nothing_comes_is_withdrawn(stand: RemoteStand, how: str) -> None:
    ask(stand)
    stand.settle()
    match how:
        case "abandons":
            stand.send(1, messages.Abandon(stand.last(1).token))
        case "leaves":
            stand.leave(1)
        case "is refused":
            assert stand.put(1, claim=stand.last(1).token, parent=key(2), settles=False) == "ParentGone"
    assert stand.withdrawn == [key(1)]
    assert stand.counted["withdrawn"] == 1


@pytest.mark.parametrize("why", ["its cost is unknown", "it is not worth it", "the queue is full", "the store fails"])
def test_a_claim_whose_entry_is_not_written_is_withdrawn(
    stand: RemoteStand, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LARGE_BYTES", 1)
    ask(stand, within_s=0.5)
    stand.seek(answer_s=0.1)
    cost_ms = {"its cost is unknown": 0.0, "it is not worth it": 1.0}.get(why, 900.0)
    if why == "the queue is full":
        monkeypatch.setattr(writes, "QUEUED_MAX", 0)
    stand.put(1, claim=stand.last(1).token, cost_ms=cost_ms, settles=False)
    if why == "the store fails":
        assert not stand.withdrawn
        stand.write_remote(error=TierTimedOut("slow"))
    assert stand.withdrawn == [key(1)]
