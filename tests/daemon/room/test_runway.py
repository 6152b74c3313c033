"""Room that is made: ahead of puts and for a large one, around pins and with moves; and limits that are lowered."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tensord.daemon.core.effects import Allocate, Punch
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.core.outbox import StoreOutbox
from tensord.daemon.host_memory.host_memory import HostMemory
from tensord.daemon.room.stretches import Stretches
from tensord.daemon.store.commit import NOT_WORTH_IT
from tensord.daemon.store.details import Details
from tensord.daemon.store.table import ENDED, LIVE
from tensord.errors import StoreFull, UnderPressure
from tensord.ipc.messages import Answer
from tensord.shm.layout import SPAN_HEADER_BYTES, SpanHeader, span_bytes
from tensord.shm.records import NO_KEY

from ..host_memory.host import Remote
from ..store.rows import key_of
from .room import RoomStore


def filled(ring_bytes: int = 64 << 10, payload_bytes: int = 1000, **how: Any) -> RoomStore:
    """A store that is full of entries of one size, put in the order of their numbers."""
    store = RoomStore(ring_bytes, **how)
    for number in range(ring_bytes // span_bytes(payload_bytes)):
        assert store.store(number, payload_bytes)
    return store


def test_a_full_ring_of_equal_sizes_keeps_what_was_put_last_and_little_free() -> None:
    store = filled(1 << 20, buckets=256)
    for number in range(2000, 3000):
        assert store.store(number, 1000)
    free = store.holes.total_bytes + store.runway.places.ready_bytes
    assert free <= store.ring_bytes // 64, "a few places are free"
    assert all(store.read(key_of(number)) for number in range(2200, 3000))
    assert store.counters.scans < 400, "a round makes room for several puts"
    store.check_invariants()


@pytest.mark.parametrize("policy", ["lru", "lfu", "sieve", "hazard"])
def test_room_for_later_puts_takes_nothing_that_was_just_put(policy: str) -> None:
    store = filled(policy=policy)
    span_ids, by_key = store.table.span_ids, store.table.by_key
    # All but the first entry that a put asks to evict are held.
    store.pinned = {span_ids[row] for row in by_key.values()}
    store.pinned.discard(next(iter(store.pinned)))
    stored = 0
    for number in range(1000, 1010):
        store.now += 1
        row = store.store(number, 1000)
        stored += bool(row)
        store.ask([span_bytes(1000)] * 4, ahead=True)
        store.now += 10
        store.work()
        assert not row or store.read(key_of(number)) is not None, f"{number} was put and went"
    assert stored
    store.check_invariants()


@pytest.mark.parametrize("policy", ["lru", "lfu", "sieve", "hazard"])
def test_entries_of_many_sizes_are_stored_without_end_and_read_as_they_were_put(policy: str) -> None:
    store, random_ = RoomStore(256 << 10, policy=policy), random.Random(1)
    sizes = {}
    for number in range(600):
        store.now += 0.01
        sizes[number] = random_.choice([100, 500, 1000, 5000, 20_000])
        assert store.store(number, sizes[number]), store.refusals
        if not number % 20:
            store.check_invariants()
            for each, size in sizes.items():
                payload = store.read(key_of(each))
                assert payload is None or payload == key_of(each)[8:9] * size
    assert store.counters.moves, "survivors move"


def test_a_large_place_takes_neighbours_where_all_entries_are_as_cold() -> None:
    store = filled(1 << 20, buckets=256, policy="hazard")
    for number in range(2000, 2010):
        store.now += 1
        assert store.store(number, 60_000)
    gone = sum(store.read(key_of(number)) is None for number in range((1 << 20) // span_bytes(1000)))
    assert store.counters.moves < 10, "of those that were just put, a few a place"
    assert gone * span_bytes(1000) <= 10 * span_bytes(60_000) + store.ring_bytes // 16
    store.check_invariants()


def test_a_place_that_no_hole_has_room_for_takes_one_scan_and_no_move_among_equally_cold_entries() -> None:
    store = filled(1 << 20, buckets=256, policy="hazard")
    scans = store.counters.scans
    for number in range(2000, 2030):
        store.now += 0.01
        assert store.store(number, 10_000)
    assert store.counters.scans - scans <= 30
    assert not store.counters.moves
    store.check_invariants()


def test_a_place_between_pins_is_found_where_none_is_for_later_places_of_its_size() -> None:
    store = filled(1 << 20, buckets=256, policy="hazard")
    for number in range(2000, 2020):
        assert store.store(number, 1900)
    rows = sorted(store.table.by_key.values(), key=store.table.offsets.__getitem__)
    for row in rows[::3]:
        store.spans.hold(row)
    found = [store.answers[1, store.ask([span_bytes(1900)], ahead=True)] for _ in range(10)]
    assert [len(answer.grants) for answer in found] == [1] * 10
    store.check_invariants()


def test_an_entry_that_moves_keeps_its_row_and_its_readers_keep_its_old_bytes() -> None:
    # An entry between two holes, of which neither is large enough.
    store = RoomStore(16 << 10)
    rows = [store.store(number, size) for number, size in enumerate([3000, 1000, 3000, 3000, 2000])]
    assert all(rows)
    store.spans.end([rows[0], rows[2]], "explicit")
    store.work()
    moved, old = rows[1], store.table.offsets[rows[1]]
    number = store.table.span_ids[moved]

    def reads() -> None:
        if len(store.runway.moves):
            assert all(store.spans.is_held(store.table.row_of(each)) for each in store.runway.moves.sources)
            store.pinned.add(number)

    store.during = [reads] * 6
    assert store.store(9, 5000)
    assert store.counters.moves and store.table.offsets[moved] != old
    assert store.read(key_of(1)) == key_of(1)[8:9] * 1000
    header = SpanHeader.unpack(store.ring[store.table.offsets[moved] :][:SPAN_HEADER_BYTES])
    assert (header.span_id, header.number) == (store.table.span_ids[moved], number)
    assert store.table.row_of(store.table.span_ids[moved]) == moved
    store.check_invariants()
    place = store.table.row_of(number)
    assert store.pinned and store.table.states[place] == ENDED and store.table.offsets[place] == old
    assert store.ring[old + SPAN_HEADER_BYTES :][:1000] == key_of(1)[8:9] * 1000
    store.pinned.clear()
    store.now += 10
    store.runway.tick(store.now)
    store.work()
    assert not store.spans.ended_bytes
    store.check_invariants()


def test_an_entry_that_ends_while_it_moves_leaves_nothing_behind() -> None:
    for copies in (True, False):
        store = RoomStore(16 << 10)
        rows = [store.store(number, size) for number, size in enumerate([3000, 1000, 3000, 3000, 2000])]
        store.spans.end([rows[0], rows[2]], "explicit")
        store.work()
        store.copies = copies
        ended: list[int] = []

        def ends(store: RoomStore = store, rows: list[int] = rows, ended: list[int] = ended) -> None:
            if len(store.runway.moves) and not ended and store.copies:
                store.spans.end([rows[1]], "explicit")
                ended.append(1)

        store.during = [ends] * 6
        assert store.store(9, 5000), store.refusals
        assert store.counters.moves == 0
        assert copies == bool(ended)
        store.check_invariants()


def test_pinned_entries_stay_and_a_place_that_cannot_be_made_costs_no_entry() -> None:
    store = filled()
    live = sorted(store.table.by_key.values())
    # Every fourth entry is in use: no gap is wider than three entries.
    store.pinned = {store.table.span_ids[row] for row in live[::4]}
    assert store.store(900, 3 * span_bytes(1000) - SPAN_HEADER_BYTES), "it lies between two pins"
    there = len(store.table.by_key)
    assert not store.store(901, 8000)
    assert isinstance(store.refusals[-1], StoreFull) and "(ring)" in str(store.refusals[-1])
    assert len(store.table.by_key) == there, "nothing was evicted in vain"
    pinned = [row for row in live[::4] if store.table.states[row] == LIVE]
    assert len(pinned) == len(live[::4])
    store.check_invariants()
    store.pinned = set()
    assert store.store(902, 8000)


def test_what_an_ended_entry_had_is_free_once_its_reader_lets_go() -> None:
    store = filled()
    row = next(iter(store.table.by_key.values()))
    store.pinned = {store.table.span_ids[row]}
    store.spans.end([row], "explicit")
    store.work()
    assert store.spans.waits_for_pins
    delays, timer = [], store.runway.next_timer()
    for _ in range(8):
        assert timer is not None
        delays.append(timer - store.now)
        store.now = timer
        store.runway.tick(store.now)
        store.work()
        timer = store.runway.next_timer()
    assert delays == sorted(delays) and delays[0] < delays[-1] == 2.0
    store.pinned = set()
    store.now += 2.0
    store.runway.tick(store.now)
    store.work()
    assert store.runway.next_timer() is None and not store.spans.ended_bytes


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [("max_entries", 7, "entries"), ("max_tokens", 25, "tokens")],
)
def test_a_lowered_limit_holds_soon(limit: str, value: int, reason: str) -> None:
    store, reasons = RoomStore(max_tokens=1000), set[str]()
    store.spans.gone.append(lambda rows, why: reasons.update(why))
    for number in range(40):
        assert store.store(number, 1000, tokens=5)
    setattr(store.budget, limit, value)
    store.work()
    tenants = store.tenants
    assert tenants.total_entries and reasons == {reason}
    assert tenants.total_entries <= store.budget.max_entries
    assert tenants.total_tokens <= (store.budget.max_tokens or 1000)
    store.check_invariants()
    assert store.store(100, 1000, tokens=5), "and puts go on"
    store.work()
    assert tenants.total_entries <= store.budget.max_entries


def test_a_put_needs_a_free_entry_too() -> None:
    store = RoomStore(max_entries=10)
    for number in range(100):
        assert store.store(number, 100), store.refusals
    assert not store.commits.refused
    assert 8 <= len(store.table.by_key) <= 10


def test_pages_that_the_system_gets_leave_no_room_and_cost_no_entry_by_themselves() -> None:
    store = filled()
    there = len(store.table.by_key)
    store.budget.resident_bytes_max = 20_000
    store.work()
    assert len(store.table.by_key) == there
    for row in list(store.table.by_key.values())[3:]:
        store.pinned.add(store.table.span_ids[row])
    assert not store.store(900, 1000)
    assert isinstance(store.refusals[-1], UnderPressure)


def test_a_chain_goes_from_its_end_and_makes_room_for_a_large_place() -> None:
    store = RoomStore()
    before = {}
    for number in range(55):
        assert store.store(number, 1000, parent=key_of(number - 1) if number % 11 else NO_KEY)
    assert store.store(900, 30_000), store.refusals
    for number in range(55):
        before[number] = store.read(key_of(number)) is not None
        assert number % 11 == 0 or not before[number] or before[number - 1], "no child without its parent"
    store.check_invariants()


def test_a_ring_that_grows_evicts_nothing_meanwhile() -> None:
    store = filled(max_bytes=128 << 10)
    there = len(store.table.by_key)
    store.runway.is_growing = True
    request = store.ask([span_bytes(5000)])
    assert (1, request) not in store.answers
    store.runway.grown(128 << 10, more=False)
    store.work()
    assert len(store.answers[1, request].grants) == 1
    assert len(store.table.by_key) == there


def test_a_read_that_was_not_processed_yet_saves_its_entry() -> None:
    store = filled()
    oldest = store.table.by_key[key_of(0)]
    store.during = [lambda: store.policy.used([oldest], store.now)]
    assert store.store(900, 1000)
    assert store.read(key_of(0)) is not None


def test_only_a_full_store_asks_whether_a_block_is_worth_its_room() -> None:
    store = RoomStore()
    store.policy.admits = lambda *facts: False  # type: ignore[method-assign]
    assert store.store(0, 1000) and store.store(1, 1000, parent=key_of(0)), "there is room"
    for number in range(100, 160):
        assert store.store(number, 1000)
    assert not store.store(2, 1000, parent=key_of(159))
    assert [each[2] for each in store.commits.refused] == [NOT_WORTH_IT]
    assert store.store(3, 1000), "an entry without a parent is always stored"
    store.spans.hide([*store.table.by_key.values()], "cleared")
    store.work()
    assert store.store(0, 1000) and store.store(1, 1000, parent=key_of(0)), "there is room again"
    store.check_invariants()


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_new_entries_cost_more_than_all_others(policy: str) -> None:
    store = RoomStore(128 << 10, policy=policy)
    for number in range(100):
        store.now += 1
        assert store.store(number, 1000)
    new = [store.table.by_key[key_of(number)] for number in range(96, 100)]
    old = [store.table.by_key[key_of(number)] for number in range(96)]
    for _ in range(4):
        store.now += 1
        store.policy.used(old, store.now)
    stretches = Stretches(store.table, store.holes, store.policy)
    way = stretches.to_evict(2 * span_bytes(1000), [*new, *old], lambda row: store.table.states[row] == LIVE)
    assert way is not None and not {*way.victims} & {*new} and way.price[0] == 0


def test_a_place_is_made_where_the_pins_leave_room_though_the_coldest_entries_lie_elsewhere() -> None:
    store = filled(128 << 10)
    live = sorted(store.table.by_key.values(), key=lambda row: store.table.offsets[row])
    store.pinned = {store.table.span_ids[row] for row in live[:80:2]}
    for row in live:
        # Blocks do not move.
        store.table.records[row] = 1
    assert store.store(900, 9000), store.refusals
    assert all(store.table.states[row] == LIVE for row in live[:80:2])


def test_the_bytes_of_an_entry_that_ended_stay_until_its_copy_has_ended() -> None:
    store = RoomStore(16 << 10)
    rows = [store.store(number, size) for number, size in enumerate([3000, 1000, 3000, 3000, 2000])]
    store.spans.end([rows[0], rows[2]], "explicit")
    store.work()
    store.ask([span_bytes(5000)], settle=False)
    while not len(store.runway.moves):
        store.carry_out(store.effects.popleft())
        store.work(settle=False)
    move = store.effects.popleft()
    store.spans.end([rows[1]], "explicit")
    store.work()
    assert store.table.states[rows[1]] == ENDED and store.spans.ended_bytes == span_bytes(1000)
    store.carry_out(move)
    store.now += 5
    store.runway.tick(store.now)
    store.work()
    assert not store.spans.ended_bytes
    store.check_invariants()


def test_room_is_made_although_many_of_the_coldest_entries_are_in_use() -> None:
    store = filled(256 << 10)
    # In the order in which they were put.
    live = [*store.table.by_key.values()]
    store.pinned = {store.table.span_ids[row] for row in live[: len(live) // 2]}
    for number in range(900, 900 + len(live) // 4):
        assert store.store(number, 1000), store.refusals
    assert all(store.table.states[row] == LIVE for row in live[: len(live) // 2])
    store.check_invariants()


def test_a_parent_stays_with_a_child_that_is_in_use() -> None:
    store = RoomStore(64 << 10)
    for number in range(8):
        assert store.store(number, 1000, parent=key_of(number - 1) if number else NO_KEY)
    assert store.store(100, 1000)
    rows = store.table.by_key
    store.spans.last_pinned = {store.table.span_ids[rows[key_of(7)]]}
    victims = store.policy.victims(9, None)
    assert len(victims) == 9
    assert store.spans.unpinned(victims) == [rows[key_of(100)]]
    assert not store.policy.victims(9, None), "the child is held, and the others have children"
    store.spans.release(rows[key_of(7)])
    assert len(store.policy.victims(9, None)) == 8


def test_a_request_ends_although_each_victim_turns_out_to_be_in_use() -> None:
    store = filled(256 << 10)
    scans, scanned = store.counters.scans, store.runway.scanned
    store.runway.scanned = lambda pinned, now: scanned(  # type: ignore[method-assign]
        {store.table.span_ids[row] for row in store.spans.hidden.values()}, now
    )
    assert not store.store(900, 5000)
    assert store.counters.scans - scans <= 4 and len(store.table.by_key) > 200
    store.check_invariants()


def test_pages_of_the_system_come_back_for_a_place_before_an_entry_goes() -> None:
    store = filled(64 << 10)
    host = HostMemory(
        store.table, store.holes, Details(store.table, store.slots, store.ring), store.spans, store.families,
        store.policy, store.budget, Remote(), StoreOutbox(store.counters), store.runway.places.join, page_bytes=64,
    )  # fmt: skip
    store.runway.pages = host
    store.runway.places._withdrawn = lambda: host.withdrawn.size_bytes
    # What the system leaves free is in small pieces.
    live = sorted(store.table.by_key.values(), key=lambda row: store.table.offsets[row])
    for row in live:
        # Blocks do not move.
        store.table.records[row] = 1
    store.spans.end([*live[20:36:2], *live[44:]], "explicit")
    store.work()

    def settle() -> None:
        for _ in range(20):
            host.reconcile(store.now)
            for effect in host._outbox.take():
                if isinstance(effect, Punch):
                    host.punched(effect.offset)
                elif isinstance(effect, Allocate):
                    host.allocated(effect.offset, None, store.now)
            store.work()

    store.budget.resident_bytes_max = 50_000
    host.press(Pressed(resident_bytes_max=50_000))
    settle()
    assert store.holes.largest_bytes < 6080 <= store.holes.total_bytes
    there, then = len(store.table.by_key), list[int]()
    send = store.lending._send

    def sent(client: int, answer: Answer) -> None:
        then.append(len(store.table.by_key))
        send(client, answer)

    store.lending._send = sent
    request = store.ask([6080], settle=False)
    settle()
    assert store.answers[1, request].grants and then == [there]
    assert host.residency.exchange_progress() == "none"
    store.check_invariants()
