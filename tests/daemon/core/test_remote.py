"""The remote store as the core sees it: which missing keys are sought there, what is written to it, and what becomes of
either when the store is slow, fails, or is overtaken by clients.

| while a key is sought …          | test                                                     |
|----------------------------------|----------------------------------------------------------|
| another client asks for it       | everybody_who_waits_gets_what_is_found                   |
| the first client leaves          | a_client_that_leaves_leaves_the_fetch_to_those_who_wait  |
| a client stores it               | a_put_that_overtakes_a_fetch_wins                        |
| its namespace is invalidated     | what_is_found_after_an_invalidation_is_not_shown         |
| … on another host                | a_host_that_is_new_follows_the_stores_number             |
| it is evicted by name            | a_key_that_is_evicted_by_name_does_not_come_back         |
| the ring is full of leased spans | a_found_entry_without_room_is_computed                   |
| puts are refused                 | a_found_entry_without_room_is_computed                   |
| the time is over                 | nobody_waits_longer_than_computing_takes                 |

| while an entry is written …      | test                                                     |
|----------------------------------|----------------------------------------------------------|
| it is evicted by name, cleared   | a_span_that_is_written_is_not_reused                     |
| others need its room             | a_span_that_is_written_is_not_reused                     |
| it is put again after that       | a_removal_waits_for_the_write_of_its_key                 |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensord.daemon.core.effects import AskGenerations
from tensord.daemon.core.events import GenerationsTold, LimitsChanged, RemoteFound, RemoteSaved, Tick
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.core.remote import speed
from tensord.daemon.core.remote.agreement import EVERY_S
from tensord.daemon.core.remote.breaker import FAILURES_MAX, FIRST_S, LONGEST_S
from tensord.daemon.core.remote.fetches import SEEKS_MAX, UNKNOWN_S
from tensord.daemon.core.remote.writes import WRITES_MAX
from tensord.errors import Corrupt, TensordError, TierFull, TierRefused, TierTimedOut, TierUnavailable
from tensord.ipc import messages

from .blocks import block
from .stand import SPAN, Make, Stand, key

REMOTE: dict[str, Any] = {"remote_s": 2.0, "remote_writes": True, "remote_queue_bytes": 1000}
FOUND = RemoteFound(64, 16, tokens=3, cost_ms=8.0)


def ask(stand: Stand, client: int = 1, number: int = 1, within_s: float = 0.5) -> messages.Claimed:
    """A client asks for the claim on a missing key. What it is answered at once."""
    request = 1000 + len(stand.answers[client])
    stand.send(client, messages.RequestClaim(request, key(number), within_s))
    answer: messages.Claimed = stand.last(client)
    assert answer.id == request
    return answer


def verdicts(stand: Stand, client: int = 1) -> list[str]:
    return [answer.answer for answer in stand.answers[client] if isinstance(answer, messages.Claimed)]


# ---- reading


def test_a_missing_key_that_is_found_is_a_hit_for_its_client(make: Make) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = FOUND
    assert ask(stand).answer == "wait"
    stand.settle()
    assert verdicts(stand) == ["wait", "hit"]
    entry = stand.store.entry(key(1))
    assert entry is not None
    assert (entry["payload_bytes"], entry["tokens"], entry["cost_ms"], entry["owner_uid"]) == (64, 3, 8.0, 1001)
    status = stand.store.status()
    assert (status["remote"], status["remote_read_bytes"]) == ({"fetched": 1}, 64)
    assert not status["puts"], "a fetched entry is no client's put"


def test_a_key_that_is_not_found_is_computed_by_who_asked_first(make: Make) -> None:
    stand = make(**REMOTE)
    assert ask(stand).answer == ask(stand, client=2).answer == "wait"
    stand.settle()
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.last(1).token
    assert verdicts(stand, 2) == ["wait"]
    stand.put(1, claim=stand.last(1).token)
    assert verdicts(stand, 2) == ["wait", "hit"]


def test_everybody_who_waits_gets_what_is_found(make: Make) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = FOUND
    for client in (1, 2, 3):
        ask(stand, client)
    assert len(stand.seeks) == 1, "one question for all of them"
    stand.settle()
    assert [verdicts(stand, client) for client in (1, 2, 3)] == [["wait", "hit"]] * 3


def test_a_fetch_is_not_the_one_hand_over_of_a_claim(make: Make) -> None:
    stand = make(**REMOTE)
    for client in (1, 2, 3):
        ask(stand, client)
    stand.settle()
    stand.leave(1)
    assert verdicts(stand, 2) == ["wait", "compute"], "the first who computes may die once"
    stand.leave(2)
    assert verdicts(stand, 3) == ["wait", "alone"]


def test_without_a_remote_store_a_missing_key_is_computed_at_once(make: Make) -> None:
    stand = make()
    assert ask(stand).answer == "compute"
    assert not stand.seeks


def test_nobody_waits_longer_than_computing_takes(make: Make) -> None:
    stand = make(**REMOTE)
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
    assert stand.store.status()["remote"]["late"] == 1


@pytest.mark.parametrize(("cost_ms", "waits_s"), [(100.0, 0.1), (0.0, UNKNOWN_S), (9000.0, 2.0)])
def test_the_wait_is_what_the_puts_of_a_namespace_took_to_compute(make: Make, cost_ms: float, waits_s: float) -> None:
    stand = make(**REMOTE)
    stand.put(7, cost_ms=cost_ms)
    assert ask(stand, within_s=0.0).lasts_s == pytest.approx(waits_s)


def test_a_host_that_only_reads_waits_for_what_its_puts_took_to_compute(make: Make) -> None:
    stand = make(**{**REMOTE, "remote_writes": False})
    stand.put(7, cost_ms=100.0)
    assert ask(stand, within_s=0.0).lasts_s == pytest.approx(0.1)


def test_a_store_that_is_slower_than_computing_is_not_asked_until_that_is_forgotten(make: Make) -> None:
    stand = make(**REMOTE)
    ask(stand, number=1, within_s=1.0)
    stand.seek(answer_s=0.5)
    assert ask(stand, number=2, within_s=0.4).answer == "compute"
    assert ask(stand, number=3, within_s=0.6).answer == "wait"
    stand.settle()
    stand.now += 100
    assert ask(stand, number=4, within_s=0.4).answer == "wait"


def test_a_payload_that_would_come_too_late_is_not_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "LARGE_BYTES", 1)
    stand = make(**REMOTE)
    stand.remote[key(1)] = stand.remote[key(2)] = FOUND
    ask(stand, number=1, within_s=2.0)
    stand.seek()
    stand.now += 1.0
    stand.settle()
    assert verdicts(stand)[-1] == "hit"
    ask(stand, number=2, within_s=0.9)
    stand.seek()
    assert not stand.copies
    assert verdicts(stand)[-1] == "compute"
    assert stand.store.status()["remote"]["slow"] == 1


def test_a_key_that_is_not_found_is_claimed_among_hosts_for_longer_than_computing_takes(make: Make) -> None:
    stand = make(**REMOTE)
    ask(stand, within_s=1.0)
    [seek] = stand.seeks
    assert [seek.claims_s, seek.waits_s] == pytest.approx([3.0, 0.9])
    reads_only = make(**{**REMOTE, "remote_writes": False})
    ask(reads_only, within_s=1.0)
    assert not reads_only.seeks[0].claims_s, "what it computes comes to nobody"


def test_while_an_answer_is_overdue_no_other_client_waits(make: Make) -> None:
    stand = make(**REMOTE)
    ask(stand, number=1, within_s=0.2)
    stand.now += 0.3
    stand.go_on()
    assert ask(stand, number=2).answer == "compute"
    stand.seek()
    assert ask(stand, number=3).answer == "wait"


def test_a_limited_number_of_keys_is_sought_at_once(make: Make) -> None:
    stand = make(**REMOTE)
    answers = [ask(stand, number=number).answer for number in range(SEEKS_MAX + 1)]
    assert answers == ["wait"] * SEEKS_MAX + ["compute"]


@pytest.mark.parametrize("error", [Corrupt("its checksum is wrong"), TierTimedOut("too slow")])
def test_an_object_that_cannot_be_read_is_computed(make: Make, error: Any) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = FOUND
    ask(stand)
    ask(stand, 2)
    stand.seek()
    stand.go_on()
    stand.copy(error=error)
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.find(key(1)) is None
    stand.put(1, claim=stand.last(1).token)
    assert verdicts(stand, 2) == ["wait", "hit"]
    assert stand.store.status()["remote"]["failed"] == 1
    stand.settle()
    assert stand.store.status()["used_bytes"] == SPAN


def test_a_client_that_leaves_leaves_the_fetch_to_those_who_wait(make: Make) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = FOUND
    ask(stand)
    ask(stand, 2)
    stand.leave(1)
    stand.settle()
    assert verdicts(stand, 2) == ["wait", "hit"]


def test_a_put_that_overtakes_a_fetch_wins(make: Make) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = FOUND
    ask(stand)
    stand.seek()
    stand.go_on()
    stand.commit(2, 5, key(1), 64, at=0)
    stand.copy(at=1)
    assert verdicts(stand) == ["wait", "hit"]
    stand.settle()
    assert stand.ended(2, 5) == "stored"
    assert stand.store.status()["used_bytes"] == SPAN
    status = stand.store.status()
    assert status["puts"] == {"stored": 1}
    assert (status["remote"], status["remote_read_bytes"]) == ({"overtaken": 1}, 0)


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_found_after_an_invalidation_is_not_shown(make: Make, copied: bool) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = FOUND
    ask(stand)
    if copied:
        stand.seek()
        stand.go_on()
    stand.send(2, messages.Invalidate(9, b"namespac", 0))
    assert verdicts(stand) == ["wait", "alone"]
    stand.settle()
    assert stand.find(key(1)) is None
    assert stand.store.status()["used_bytes"] == 0


@pytest.mark.parametrize("refused", [False, True])
def test_a_found_entry_without_room_is_computed(make: Make, refused: bool) -> None:
    stand = make(SPAN, **REMOTE)
    stand.remote[key(1)] = FOUND
    if refused:
        stand.do(Pressed(None, 0.0, True, "the host is full"))
    else:
        stand.put(7)
        stand.send(2, messages.Pin(3, key(7), 100.0))
    ask(stand)
    stand.settle()
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.find(key(1)) is None


def test_an_entry_whose_parent_is_not_here_is_computed(make: Make) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = RemoteFound(64, 16, parent=key(2))
    ask(stand)
    stand.settle()
    assert verdicts(stand) == ["wait", "compute"]


def test_a_fetched_entry_lives_for_what_was_left_of_its_time(make: Make) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = RemoteFound(64, 16, lives_s=5.0)
    ask(stand)
    stand.settle()
    assert stand.find(key(1)) is not None
    stand.pass_time(6)
    assert stand.find(key(1)) is None


# ---- writing


def test_an_entry_that_takes_longer_to_compute_than_to_read_is_written(make: Make) -> None:
    stand = make(**REMOTE)
    stand.put(1, cost_ms=5.0)
    assert set(stand.remote) == {key(1)}
    status = stand.store.status()
    assert (status["remote"], status["remote_written_bytes"]) == ({"written": 1}, 64)


def test_an_entry_of_unknown_cost_is_written_at_its_next_use(make: Make) -> None:
    stand = make(**REMOTE)
    stand.put(1)
    stand.put(2)
    assert not stand.remote
    stand.recorded.append(stand.pin(1).span_id)
    stand.drain()
    stand.settle()
    assert set(stand.remote) == {key(1)}
    stand.remote.clear()
    stand.recorded.append(stand.pin(1).span_id)
    stand.drain()
    stand.settle()
    assert not stand.remote, "it was written once"


def test_an_entry_that_is_quicker_to_compute_than_to_read_is_not_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "LARGE_BYTES", 1)
    stand = make(**REMOTE)
    stand.remote[key(1)] = FOUND
    ask(stand, within_s=2.0)
    stand.seek()
    stand.now += 0.5
    stand.settle()
    stand.put(2, cost_ms=400.0)
    assert key(2) not in stand.remote
    stand.put(3, cost_ms=600.0)
    assert key(3) in stand.remote


def test_what_came_from_the_remote_store_is_not_written_back(make: Make) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = RemoteFound(64, 16)
    ask(stand)
    stand.settle()
    stand.recorded.append(stand.pin(1).span_id)
    stand.drain()
    stand.settle()
    assert not {"written", "there"} & stand.store.status()["remote"].keys()


def test_entries_that_no_fetch_could_place_are_not_written(make: Make) -> None:
    stand = make(8192, **REMOTE)
    stand.put(1, cost_ms=9.0)
    stand.put(2, cost_ms=9.0, parent=key(1))
    stand.put_block(block([1]))
    stand.recorded += [stand.pin_block(1).span_id]
    stand.drain()
    stand.settle()
    assert set(stand.remote) == {key(1)}


def test_a_key_whose_last_bytes_are_no_generation_is_not_shared(make: Make) -> None:
    stand = make(**REMOTE)
    stand.put(1, cost_ms=9.0)
    stand.put(key(2, generation=77), cost_ms=9.0)
    stand.send(1, messages.RequestClaim(8, key(3, generation=77), 0.5))
    assert stand.last(1).answer == "compute"
    assert set(stand.remote) == {key(1)}


def test_a_daemon_that_may_only_read_writes_nothing(make: Make) -> None:
    stand = make(**{**REMOTE, "remote_writes": False})
    stand.put(1, cost_ms=50.0)
    stand.send(1, messages.Evict(3, [key(1)]))
    assert not stand.writes


def test_a_full_queue_drops_what_is_new_and_counts_it(make: Make) -> None:
    stand = make(8192, **REMOTE)
    for number in range(WRITES_MAX + 4):
        stand.commit(1, number, key(number), 400, cost_ms=9.0, at=0)
        stand.copy()
    assert len(stand.writes) == WRITES_MAX
    status = stand.store.status()
    assert (status["remote_state"]["queued"], status["remote_state"]["queued_bytes"]) == (2, 800)
    assert status["remote"]["dropped"] == 2
    stand.settle()
    assert len(stand.remote) == WRITES_MAX + 2


def test_a_lowered_limit_drops_the_newest_of_the_queue(make: Make) -> None:
    stand = make(8192, **REMOTE)
    for number in range(WRITES_MAX + 2):
        stand.commit(1, number, key(number), 400, cost_ms=9.0, at=0)
        stand.copy()
    stand.do(LimitsChanged(replace(stand.limits, remote_queue_bytes=500)))
    stand.settle()
    assert set(stand.remote) == {key(number) for number in range(WRITES_MAX + 1)}


def test_what_has_ended_before_its_turn_is_not_written(make: Make) -> None:
    stand = make(8192, **REMOTE)
    for number in range(WRITES_MAX + 1):
        stand.commit(1, number, key(number), 64, cost_ms=9.0, at=0)
        stand.copy()
    stand.send(1, messages.Clear(77))
    stand.settle()
    assert len(stand.remote) == WRITES_MAX


@pytest.mark.parametrize("how", ["evicted", "cleared", "full"])
def test_a_span_that_is_written_is_not_reused(make: Make, how: str) -> None:
    stand = make(2 * SPAN, **REMOTE)
    stand.commit(1, 1, key(1), 64, cost_ms=9.0, at=0)
    stand.copy()
    if how == "evicted":
        stand.send(1, messages.Evict(3, [key(1)]))
    elif how == "cleared":
        stand.send(1, messages.Clear(3))
    held = stand.writes.popleft()
    for number in (2, 3, 4):
        stand.commit(2, number, key(number), 64, at=0)
        stand.settle()
    stand.writes.appendleft(held)
    # `write_remote` compares the bytes.
    stand.write_remote()
    stand.settle()
    assert {"stored"} == {stand.ended(2, number) for number in (2, 3, 4)}
    stand.pass_time(1)
    stand.check()


def test_a_key_that_is_evicted_by_name_does_not_come_back(make: Make) -> None:
    stand = make(**REMOTE)
    stand.put(1, cost_ms=9.0)
    assert key(1) in stand.remote
    stand.send(1, messages.Evict(3, [key(1)]))
    assert ask(stand).answer == "compute", "its object is about to go"
    stand.settle()
    assert key(1) not in stand.remote


def test_a_removal_that_fails_is_made_again(make: Make) -> None:
    stand = make(**REMOTE)
    stand.put(1, cost_ms=9.0)
    stand.send(1, messages.Evict(3, [key(1)]))
    stand.write_remote(error=TierTimedOut("slow"))
    assert key(1) in stand.remote
    assert ask(stand).answer == "compute"
    stand.settle()
    assert key(1) not in stand.remote


@pytest.mark.parametrize("found", [False, True])
def test_what_is_fetched_while_its_key_is_evicted_by_name_is_not_shown(make: Make, found: bool) -> None:
    stand = make(**REMOTE)
    stand.remote[key(1)] = FOUND
    ask(stand)
    if found:
        stand.seek()
        stand.go_on()
    stand.send(2, messages.Evict(3, [key(1)]))
    stand.settle()
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.find(key(1)) is None
    assert key(1) not in stand.remote


def test_an_entry_that_was_dropped_is_offered_again_at_its_next_use_or_put(make: Make) -> None:
    stand = make(8192, **REMOTE)
    for number in range(WRITES_MAX + 4):
        stand.commit(1, number, key(number), 400, cost_ms=9.0, at=0)
        stand.copy()
    stand.settle()
    used, put = WRITES_MAX + 2, WRITES_MAX + 3
    assert key(used) not in stand.remote and key(put) not in stand.remote
    stand.recorded.append(stand.pin(used).span_id)
    stand.drain()
    assert stand.put(put, 400) == "existed"
    stand.settle()
    assert key(used) in stand.remote and key(put) in stand.remote


def test_a_removal_waits_for_the_write_of_its_key(make: Make) -> None:
    stand = make(**REMOTE)
    stand.commit(1, 1, key(1), 64, cost_ms=9.0, at=0)
    stand.copy()
    stand.send(1, messages.Evict(3, [key(1)]))
    assert len(stand.writes) == 1
    stand.settle()
    assert key(1) not in stand.remote


# ---- generations

TAG = b"namespac"


def invalidate(stand: Stand, client: int = 1) -> int:
    """A client invalidates the namespace. Its generation afterwards."""
    stand.send(client, messages.Invalidate(900, TAG, stand.index.generations.current(TAG)))
    return stand.index.generations.current(TAG)


def shared(stand: Stand, number: int, generation: int) -> bool:
    """Whether an entry of a generation goes to the store."""
    name = key(number, generation=generation)
    assert stand.put(name, cost_ms=50.0) == "stored"
    return name in stand.remote


def test_an_invalidation_is_told_to_the_store_and_its_number_is_shared(make: Make) -> None:
    stand = make(**REMOTE)
    assert shared(stand, 1, 0)
    assert invalidate(stand) == 1
    stand.settle()
    assert stand.remote_generations == {TAG: 1}
    assert shared(stand, 2, 1)


def test_until_the_store_has_given_out_a_number_nothing_of_the_namespace_is_shared(make: Make) -> None:
    stand = make(**REMOTE)
    ask(stand)
    stand.settle()
    invalidate(stand)
    stand.remote[key(2, generation=1)] = FOUND
    stand.send(2, messages.RequestClaim(7, key(2, generation=1), 0.5))
    assert stand.last(2).answer == "compute", "another host's first invalidation is not this one's"
    stand.commit(1, 8, key(3, generation=1), 64, cost_ms=50.0, at=0)
    stand.copy()
    assert not stand.writes


def test_hosts_that_invalidate_at_once_get_different_numbers(make: Make) -> None:
    stand = make(**REMOTE)
    assert shared(stand, 1, 0)
    stand.remote_generations[TAG] = 1  # another host was first
    assert invalidate(stand) == 1
    stand.commit(1, 8, key(2, generation=1), 64, cost_ms=50.0, at=0)
    stand.copy()
    assert stand.find(key(2, generation=1)) is not None
    stand.settle()
    assert stand.remote_generations == {TAG: 2}
    assert stand.index.generations.current(TAG) == 2
    assert stand.find(key(2, generation=1)) is None, "the number may be another host's"
    assert key(2, generation=1) not in stand.remote
    assert shared(stand, 3, 2)


def test_an_invalidation_on_another_host_ends_the_entries_of_this_one(make: Make) -> None:
    stand = make(**REMOTE)
    assert shared(stand, 1, 0)
    stand.remote_generations[TAG] = 1
    stand.pass_time(EVERY_S + 0.1)
    assert stand.index.generations.current(TAG) == 1
    assert stand.find(key(1)) is None
    assert shared(stand, 2, 1)


def test_a_host_that_is_new_follows_the_stores_number_before_it_reads(make: Make) -> None:
    stand = make(**REMOTE)
    stand.remote_generations[TAG] = 4
    stand.remote[key(1)] = FOUND
    ask(stand)
    ask(stand, 2)
    stand.settle()
    assert verdicts(stand) == ["wait", "alone"], "its key is one of before the invalidation"
    assert stand.index.generations.current(TAG) == 4
    assert not stand.stored()
    stand.remote[key(1, generation=4)] = FOUND
    stand.send(1, messages.RequestClaim(70, key(1, generation=4), 0.5))
    stand.settle()
    assert stand.last(1).answer == "hit"


def test_a_store_that_has_lost_its_numbers_gets_those_of_the_hosts_back(make: Make) -> None:
    stand = make(**REMOTE)
    invalidate(stand)
    stand.settle()
    assert shared(stand, 1, 1)
    stand.remote_generations.clear()
    stand.pass_time(EVERY_S + 0.1)
    assert stand.remote_generations == {TAG: 1}
    assert stand.index.generations.current(TAG) == 1, "clients that hold the number would share nothing any more"
    assert shared(stand, 2, 1)


def test_an_invalidation_while_the_store_fails_is_told_once_it_is_back(make: Make) -> None:
    stand = make(**REMOTE)
    assert shared(stand, 1, 0)
    for number in range(10, 10 + FAILURES_MAX):
        fail(stand, number)
    invalidate(stand)
    assert not stand.generation_requests
    name = key(2, generation=1)
    stand.send(1, messages.RequestClaim(70, name, 0.5))
    assert stand.last(1).answer == "compute"
    # The daemon probes by itself, and tells.
    stand.pass_time(2 * EVERY_S + 0.1)
    assert stand.remote_generations == {TAG: 1}
    assert shared(stand, 4, 1)


def test_an_invalidation_on_another_host_reaches_one_that_only_reads_its_own_entries(make: Make) -> None:
    """After a restart its daemon has shared nothing yet."""
    stand = make(**REMOTE)
    stand.put(1)
    assert not stand.seeks and not stand.writes
    stand.remote_generations[TAG] = 1
    stand.pass_time(2 * EVERY_S + 0.1)
    assert stand.find(key(1)) is None
    assert stand.index.generations.current(TAG) == 1


def test_an_invalidation_on_another_host_is_followed_after_an_outage_without_any_miss(make: Make) -> None:
    stand = make(**REMOTE)
    assert shared(stand, 1, 0)
    for number in range(10, 10 + FAILURES_MAX):
        fail(stand, number)
    stand.remote_generations[TAG] = 1
    stand.pass_time(2 * EVERY_S + 0.1)
    assert stand.find(key(1)) is None
    assert stand.turned[-1] == ""


def test_a_second_invalidation_is_not_taken_for_the_one_that_the_store_answers(make: Make) -> None:
    stand = make(**REMOTE)
    assert shared(stand, 1, 0)
    stand.remote_generations[TAG] = 4
    invalidate(stand)
    invalidate(stand)
    stand.answer_generations()
    assert stand.remote_generations == {TAG: 5}
    stand.send(1, messages.RequestClaim(70, key(1, generation=5), 0.5))
    assert stand.last(1).answer == "compute", "another host may have taken 5 before the second invalidation"
    stand.settle()
    assert stand.remote_generations == {TAG: 6}
    assert stand.index.generations.current(TAG) == 6


def test_an_old_answer_raises_nothing_that_the_store_has_already(make: Make) -> None:
    stand = make(**REMOTE)
    stand.commit(1, 8, key(1), 64, cost_ms=50.0, at=0)
    stand.copy()
    [(save, _)] = stand.writes
    invalidate(stand)
    stand.answer_generations()
    stand.store.link.breaker.failed("gone", stand.now, refused=True, probe=False)
    stand.now += EVERY_S
    stand.do(Tick())
    stand.writes.clear()
    stand.do(RemoteSaved(save.number, written=False, generation=0))
    stand.pass_time(4 * EVERY_S)
    assert stand.remote_generations == {TAG: 1}
    assert stand.index.generations.current(TAG) == 1


def test_an_answer_of_before_an_invalidation_changes_nothing(make: Make) -> None:
    stand = make(**REMOTE)
    assert shared(stand, 1, 0)
    stand.now += EVERY_S + 0.1
    stand.do(Tick())
    [question] = stand.generation_requests
    assert isinstance(question, AskGenerations)
    invalidate(stand)
    stand.generation_requests.rotate(-1)
    stand.answer_generations()
    assert stand.remote_generations == {TAG: 1}
    stand.do(GenerationsTold({TAG: 0}))
    stand.generation_requests.clear()
    assert stand.index.generations.current(TAG) == 1
    assert shared(stand, 2, 1)


@pytest.mark.parametrize("error", [TierUnavailable("gone"), TierTimedOut("slow")])
def test_a_number_that_cannot_be_had_is_asked_for_again(make: Make, error: Any) -> None:
    stand = make(**REMOTE)
    assert shared(stand, 1, 0)
    invalidate(stand)
    stand.answer_generations(error)
    assert not stand.remote_generations
    stand.pass_time(EVERY_S + 0.1)
    assert stand.remote_generations == {TAG: 1}


# ---- failures


def fail(stand: Stand, number: int, error: Any = None) -> None:
    assert ask(stand, number=number).answer == "wait"
    stand.seek(error=error or TierUnavailable("connection refused"))
    assert verdicts(stand)[-1] == "compute"


def test_a_store_that_fails_is_left_alone_and_probed_without_a_waiting_client(make: Make) -> None:
    stand = make(**REMOTE)
    for number in range(FAILURES_MAX):
        assert not stand.turned
        fail(stand, number)
    assert stand.turned == ["connection refused"]
    assert stand.store.status()["remote_state"]["why"] == "connection refused"
    assert ask(stand, number=20).answer == "compute"
    assert not stand.seeks
    waits_s = FIRST_S
    for number in range(21, 40):
        stand.now += waits_s * 0.99
        assert ask(stand, number=number).answer == "compute"
        assert not stand.seeks, f"after {waits_s} s, too early"
        stand.now += waits_s * 0.02
        assert ask(stand, number=100 + number).answer == "compute", "the probe is made on the side"
        assert ask(stand, number=200 + number).answer == "compute"
        assert len(stand.seeks) == 1, "one probe at a time"
        stand.seek(error=TierTimedOut("no answer"))
        waits_s = min(2 * waits_s, LONGEST_S)
    stand.now += LONGEST_S
    ask(stand, number=300)
    stand.seek()
    assert stand.turned == ["connection refused", ""], "one line when it fails, one when it is back"
    assert ask(stand, number=301).answer == "wait"


def test_a_refusal_opens_the_breaker_at_once(make: Make) -> None:
    stand = make(**REMOTE)
    fail(stand, 1, TierRefused("wrong password"))
    assert stand.turned == ["wrong password"]


def test_a_failure_now_and_then_does_not_open_the_breaker(make: Make) -> None:
    stand = make(**REMOTE)
    for number in range(0, 20, 2):
        fail(stand, number)
        ask(stand, number=number + 1)
        stand.seek()
    assert not stand.turned


def test_failed_writes_open_the_breaker_and_a_write_may_be_the_probe(make: Make) -> None:
    stand = make(8192, **REMOTE)
    for number in range(FAILURES_MAX + 2):
        stand.commit(1, number, key(number), 64, cost_ms=9.0, at=0)
        stand.copy()
    for _ in range(FAILURES_MAX):
        stand.write_remote(error=TierUnavailable("connection refused"))
    assert stand.turned == ["connection refused"]
    while stand.writes:
        stand.write_remote(error=TierUnavailable("connection refused"))
    stand.put(50, cost_ms=9.0)
    assert not stand.remote
    stand.now += FIRST_S
    stand.put(51, cost_ms=9.0)
    assert stand.turned[-1] == ""
    assert set(stand.remote) == {key(51)}


def test_a_full_store_goes_on_serving_reads(make: Make) -> None:
    stand = make(8192, **REMOTE)
    for number in range(FAILURES_MAX + 1):
        stand.commit(1, number, key(number), 64, cost_ms=9.0, at=0)
        stand.copy()
        stand.write_remote(error=TierFull("maxmemory"))
    assert not stand.turned
    assert stand.store.status()["remote"] == {"write_failed": FAILURES_MAX + 1}
    assert ask(stand, number=70).answer == "wait"


@pytest.mark.parametrize("error", [TierFull("maxmemory"), TensordError("the request failed")])
def test_a_probe_ends_however_it_ends(make: Make, error: Any) -> None:
    stand = make(**REMOTE)
    for number in range(FAILURES_MAX):
        fail(stand, number)
    stand.now += FIRST_S
    stand.commit(1, 1, key(40), 64, cost_ms=9.0, at=0)
    stand.copy()
    stand.write_remote(error=error)
    stand.now += LONGEST_S
    stand.put(41, cost_ms=9.0)
    assert set(stand.remote) == {key(41)}
    assert stand.turned[-1] == ""


def test_a_removal_outlives_a_time_in_which_the_store_fails(make: Make) -> None:
    stand = make(**REMOTE)
    stand.put(1, cost_ms=9.0)
    for number in range(10, 10 + FAILURES_MAX):
        fail(stand, number)
    stand.send(1, messages.Evict(3, [key(1)]))
    stand.settle()
    assert key(1) in stand.remote
    stand.now += FIRST_S
    ask(stand, number=30)
    stand.settle()
    stand.put(31, cost_ms=9.0)
    assert key(1) not in stand.remote
