"""What a restarted daemon finds again, and what it must not touch yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensord.daemon.core.events import Accessed, Tick
from tensord.daemon.core.recovery import Recovered
from tensord.daemon.policy.registry import POLICIES
from tensord.ipc import messages
from tensord.shm.allocator import SpanAllocator
from tensord.shm.index import IndexWriter
from tensord.shm.layout import SLOT_BYTES, SLOT_WORDS, SPAN_HEADER_BYTES, span_bytes

from .stand import SPAN, Make, Stand, View, key

RING = 64 * SPAN


def restart(stand: Stand, *, epoch: int = 2, now: float = 0.0) -> None:
    """A new store over the same index and bytes; of the old one only those are left."""
    records = [
        Recovered(slot.number, header, slot.published, stand.piece_at(slot.offset, header))
        for slot in stand.index.slots()
        for header in [stand.headers.get(slot.offset)]
    ]
    records.reverse()
    stand.now = now
    stand.store = stand.make(SpanAllocator(len(stand.bytes)), epoch)
    stand.copies.clear()
    stand.moves.clear()
    stand.scans = 0
    stand.seen = None
    stand.answers.clear()
    stand.store.recover(records, stand.now)
    stand.check()
    stand.join(1, 2)


def finish(stand: Stand) -> None:
    """Nothing may be left behind once everything is cleared and unpinned."""
    stand.check()
    stand.views.clear()
    stand.send(1, messages.Clear(77_777))
    stand.pass_time(10)
    assert stand.store.memory.ring.used_bytes == 0
    assert list(stand.index.slots()) == []


def test_a_span_that_a_client_writes_is_taken_away_by_the_next_daemon_once_it_is_not_pinned() -> None:
    stand = Stand(RING)
    stand.join(1, 2)
    for client in (1, 2):
        stand.take_span(client, client)
    assert stand.write(2, 2) is not None
    told = {client: list(stand.answers[client]) for client in (1, 2)}
    restart(stand)
    stand.answers.update(told)
    assert stand.write(1, 1) is None, "a client of the former daemon would write into the span, and nobody would know"
    stand.settle()
    for number in range(10, 40):
        stand.put(number, client=2)
    stand.check()
    stand.views.clear()
    stand.settle()
    finish(stand)


def test_a_daemon_killed_while_a_written_span_gets_its_key_leaves_no_damage() -> None:
    stand = Stand(RING)
    stand.join(1)
    stand.take_span(1, 1)
    assert stand.write(1, 1) is not None
    [slot] = stand.index.slots()
    assert stand.index.reserve(key(1), slot.span_id, slot.offset, 16, 64) is not None
    restart(stand)
    stand.settle()
    assert stand.store.counters.found_corrupt == 0
    for number in range(10, 80):
        stand.put(number, client=1)
    stand.check()
    stand.views.clear()
    stand.settle()
    finish(stand)


def test_an_entry_in_a_bucket_that_is_not_its_keys_is_not_taken_over() -> None:
    """No reader would find it, and no put could store its key again."""
    stand = Stand()
    stand.join(1)
    stand.put(1, 100)
    [slot] = stand.index.slots()
    elsewhere = next(n for n in range(stand.index.geometry.slot_count) if n not in stand.index.slots_for(slot.key))
    words = stand.index._words
    there, here = stand.index._slot_at(slot.number), stand.index._slot_at(elsewhere)
    words[here : here + SLOT_WORDS] = words[there : there + SLOT_WORDS]
    words[there : there + SLOT_WORDS] = memoryview(bytes(SLOT_BYTES)).cast("Q")
    stand.index = IndexWriter(stand.index._memory, stand.index.geometry)
    restart(stand)
    assert stand.store.entry(key(1)) is None
    assert stand.store.status()["found_corrupt"] == 1
    assert stand.put(1, 100) == "stored"
    finish(stand)


def test_published_entries_are_there_again_with_all_that_is_known_of_them() -> None:
    stand = Stand()
    stand.join(1)
    stand.now = 1.0
    stand.put(1, 100, tokens=3)
    stand.put(2, 200, ttl_s=10.0)
    before = {number: stand.find(key(number)) for number in (1, 2)}
    restart(stand, now=4.0)
    assert {number: stand.find(key(number)) for number in (1, 2)} == before
    entry = stand.store.entry(key(1))
    assert entry is not None
    assert (entry["tokens"], entry["owner_uid"], entry["payload_bytes"]) == (3, 1001, 100)
    status = stand.store.status()
    assert (status["recovered"], status["found_corrupt"]) == (2, 0)
    assert stand.put(1) == "existed"
    stand.pass_time(6.9)
    assert stand.stored() == {1, 2}
    stand.pass_time(0.2)
    assert stand.stored() == {1}
    finish(stand)


def test_uses_go_on_after_a_restart() -> None:
    stand = Stand()
    stand.join(1)
    stand.put(1)
    span_id = stand.pin(1).span_id
    stand.views.clear()
    stand.do(Accessed([span_id] * 3, misses=1))
    restart(stand, now=stand.now)
    stand.do(Accessed([span_id]))
    entry = stand.store.entry(key(1))
    assert entry is not None and entry["uses"] == 4
    assert stand.store.status()["hits"] == 1
    finish(stand)


def test_reads_before_a_restart_count_as_of_then_so_what_was_put_after_them_is_newer(make: Make) -> None:
    stand = make(policy="lru")
    spans = {}
    for number in (1, 2, 3):
        stand.pass_time(1.0)
        stand.put(number)
        spans[number] = stand.pin(number).span_id
    stand.views.clear()
    stand.pass_time(1.0)
    stand.do(Accessed([spans[1]]))
    stand.pass_time(1.0)
    stand.put(4)
    for _ in range(2):
        restart(stand, epoch=2, now=stand.now)
        memory = stand.store.memory
        order = [entry.key for entry in memory.order.coldest()]
        assert order == [key(2), key(3), key(1), key(4)]
        read = memory.entries.find(key(1))
        assert read is not None and stand.now - read.used_at == pytest.approx(1.0, abs=0.2)
    finish(stand)


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if not policy.new_may_go_first])
def test_what_was_just_put_into_a_full_ring_stays_after_a_restart_though_others_were_read_since(policy: str) -> None:
    ring = 200
    stand = Stand(ring * SPAN, policy=policy)
    stand.join(1)
    for number in range(ring + 40):
        stand.now += 0.1
        assert stand.put(number, cost_ms=1000.0) == "stored"
    stand.now += 0.1
    assert stand.put(1000, cost_ms=0.001) == "stored"
    for number in sorted(stand.stored())[-61:-1]:
        stand.now += 0.1
        stand.do(Accessed([stand.pin(number).span_id]))
    stand.views.clear()
    restart(stand, now=stand.now + 1)
    for number in range(2000, 2000 + ring // 20):
        stand.now += 0.1
        assert stand.put(number, cost_ms=1000.0) == "stored"
        assert stand.find(key(1000)) is not None, f"gone after {number - 1999} puts"


def test_span_ids_are_not_used_again() -> None:
    stand = Stand()
    stand.join(1)
    stand.put(1)
    restart(stand)
    stand.put(2)
    ids = {slot.span_id >> 48 for slot in stand.index.slots()}
    assert ids == {1, 2}
    finish(stand)


def test_a_put_unfinished_at_a_restart_publishes_nothing_and_its_span_is_freed() -> None:
    stand = Stand()
    stand.join(1)
    stand.put(1)
    stand.commit(1, 1, key(2), 200)
    stand.part(1, 1, 100, last=False)
    stand.copy()
    restart(stand)
    assert stand.stored() == {1}
    assert stand.store.memory.ring.used_bytes == SPAN + span_bytes(200)
    stand.pass_time(0.1)
    assert stand.store.memory.ring.used_bytes == SPAN
    finish(stand)


def test_a_span_viewed_since_before_the_restart_is_not_reused() -> None:
    stand = Stand(2 * SPAN)
    stand.join(1)
    stand.put(1)
    stand.put(2)
    stand.pin(1)
    stand.pin(2)
    stand.send(1, messages.Evict(1, [key(1)]))
    restart(stand)
    assert stand.put(3) == "StoreFull"
    stand.check()
    del stand.views[0]
    assert stand.put(4) == "stored"
    finish(stand)


def test_entries_go_in_the_order_of_their_creation() -> None:
    stand = Stand(4 * SPAN)
    stand.join(1)
    for number in (9, 4, 3, 2):
        stand.now += 1
        stand.put(number)
    stand.send(1, messages.Evict(1, [key(9)]))
    stand.settle()
    stand.now += 1
    stand.put(1)
    first = stand.find(key(1))
    assert first is not None
    assert first.offset == SPAN_HEADER_BYTES, "the newest stands first in the ring"
    restart(stand, now=10.0)
    stand.put(5)
    assert stand.stored() == {1, 2, 3, 5}
    finish(stand)


def test_a_store_that_came_back_over_its_budget_is_brought_under_it() -> None:
    stand = Stand()
    stand.join(1)
    for number in range(8):
        stand.put(number)
    stand.limits = replace(stand.limits, max_entries=3)
    restart(stand)
    stand.pass_time(1)
    assert len(stand.stored()) == 3
    finish(stand)


def test_an_entry_whose_slot_disagrees_with_its_header_is_not_published() -> None:
    stand = Stand()
    stand.join(1)
    for number in (1, 2, 3):
        stand.put(number)
    offsets = sorted(stand.headers)
    stand.headers[offsets[0]] = stand.headers[offsets[1]]
    del stand.headers[offsets[2]]
    restart(stand)
    assert stand.stored() == {2}
    assert stand.store.status()["found_corrupt"] == 2
    stand.do(Tick())
    stand.settle()
    assert stand.store.memory.ring.used_bytes == SPAN
    finish(stand)


def test_two_slots_that_claim_the_same_bytes_do_not_both_get_them() -> None:
    stand = Stand()
    stand.join(1)
    stand.put(1)
    slot = next(stand.index.slots())
    liar = stand.index.reserve(key(9), 99 << 48 | 1, slot.offset, 16, 64)
    assert liar is not None
    stand.index.publish(liar)
    restart(stand)
    assert len(stand.stored()) <= 1
    assert stand.store.status()["found_corrupt"] >= 1
    finish(stand)


def test_entries_of_a_past_generation_that_were_to_be_dropped_are_not_published_again() -> None:
    stand = Stand()
    stand.join(1)
    for generation in (0, 1, 2):
        stand.put(key(1, generation=generation))
        stand.put(key(2, b"other ns", generation))
    view = stand.pin(1)
    # What the former daemon did last.
    stand.index.generations.raise_to(b"namespac", 2)
    restart(stand)
    found = [g for g in (0, 1, 2) if stand.find(key(1, generation=g)) is not None]
    assert found == [2]
    assert all(stand.find(key(2, b"other ns", generation)) is not None for generation in (0, 1, 2))
    assert stand.store.status()["found_corrupt"] == 0
    stand.settle()
    # Nothing is placed where somebody still looks.
    assert stand.store.memory.spans.find(view.span_id) is not None
    stand.send(1, messages.Invalidate(1, b"namespac", 1))
    assert stand.last() == messages.Generation(1, 2, 0)
    assert stand.put(key(1, generation=1)) == "Invalidated"
    finish(stand)


def test_a_time_to_live_that_was_renewed_is_what_the_next_daemon_goes_by() -> None:
    stand = Stand()
    stand.join(1)
    stand.put(1, ttl_s=10.0)
    stand.put(2, ttl_s=10.0)
    stand.pass_time(8)
    stand.send(1, messages.Touch(1, [key(1)]))
    restart(stand, now=8.0)
    stand.pass_time(3)
    assert stand.stored() == {1}
    restart(stand, epoch=3, now=11.0)
    # What is renewed is the time that the put asked for.
    stand.send(1, messages.Touch(1, [key(1)]))
    stand.pass_time(9.5)
    assert stand.stored() == {1}
    stand.pass_time(1)
    assert stand.stored() == set()
    finish(stand)


@pytest.mark.parametrize("stepped_s", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_was_set_between_two_daemons_moves_no_time_to_live(stepped_s: float) -> None:
    stand = Stand()
    stand.join(1)
    stand.now = 5.0
    stand.put(1, ttl_s=10.0)
    stand.unix_at_zero_s += stepped_s
    restart(stand, now=10.0)
    stand.pass_time(4.5)
    assert stand.stored() == {1}
    stand.pass_time(1)
    assert stand.stored() == set()
    finish(stand)


def test_an_entry_that_expired_between_two_daemons_ends_with_the_first_tick() -> None:
    stand = Stand()
    stand.join(1)
    stand.put(1, ttl_s=10.0)
    stand.put(2)
    restart(stand, now=50.0)
    assert stand.store.next_timer() is not None
    stand.pass_time(0)
    assert stand.stored() == {2}
    finish(stand)


def test_a_new_span_never_gets_the_id_of_a_damaged_slot() -> None:
    stand = Stand()
    stand.join(1)
    stand.put(1)
    for counter in (1, 2, 4):
        offset = 3 * SPAN * counter
        liar = stand.index.reserve(key(90 + counter), 2 << 48 | counter, offset, 16, 64)
        assert liar is not None
        stand.index.publish(liar)
        # A reader that found it before the restart.
        start = offset + SPAN_HEADER_BYTES
        stand.views.append(View(2 << 48 | counter, start, bytes(stand.bytes[start : start + 64])))
    restart(stand)
    for number in range(2, 8):
        assert stand.put(number) == "stored"
        stand.check()
    ids = [slot.span_id for slot in stand.index.slots()]
    assert len(ids) == len(set(ids)) == 10
    assert stand.stored() == set(range(1, 8))
    stand.send(1, messages.Evict(1, [key(7)]))
    stand.settle()
    stand.put(8)
    assert stand.pin(8).span_id not in ids
    finish(stand)


@pytest.mark.parametrize("published", [False, True])
def test_the_slot_that_the_ring_confirms_keeps_a_duplicate_id(published: bool) -> None:
    stand = Stand(8 * SPAN)
    stand.join(1)
    stand.put(1)
    stand.put(2)
    stand.send(1, messages.Evict(1, [key(1)]))
    stand.settle()
    stand.pin(2)
    [slot] = stand.index.slots()
    # It stands first in the ring.
    liar = stand.index.reserve(key(9), slot.span_id, 0, 16, 64)
    assert slot.offset > 0 and liar is not None
    if published:
        stand.index.publish(liar)
    restart(stand)
    assert stand.stored() == {2}
    for number in range(20, 40):
        assert stand.put(number) == "stored"
    assert 2 in stand.stored(), "a view of it is there"
    finish(stand)


def test_a_damaged_slot_does_not_get_the_bytes_of_a_sound_one_behind_it() -> None:
    stand = Stand()
    stand.join(1)
    stand.put(1)
    stand.put(2)
    stand.send(1, messages.Evict(1, [key(1)]))
    stand.settle()
    liar = stand.index.reserve(key(9), 1 << 48 | 99, 0, 16, 1024)
    assert liar is not None
    stand.index.publish(liar)
    restart(stand)
    assert stand.stored() == {2}
    finish(stand)
