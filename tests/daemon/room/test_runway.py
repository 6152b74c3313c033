"""Room that is made: ahead of puts and for a large one, around pins and with moves; and limits that are lowered."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tensord.daemon.core.effects import Allocate, Punch
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.core.outbox import StoreOutbox
from tensord.daemon.host_memory.host_memory import HostMemory
from tensord.daemon.store.commit import NOT_WORTH_IT
from tensord.daemon.store.details import Details
from tensord.daemon.store.table import LIVE
from tensord.errors import StoreFull, UnderPressure
from tensord.ipc.messages.control import Answer
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, span_bytes

from ..host_memory.host import Remote
from ..store.rows import key_of
from .room import RoomStore


def filled(ring_bytes: int = 64 << 10, payload_bytes: int = 1000, **how: Any) -> RoomStore:
    """A store that is full of entries of one size, put in the order of their numbers."""
    store = RoomStore(ring_bytes, **how)
    for number in range(ring_bytes // span_bytes(payload_bytes)):
        assert store.store(number, payload_bytes)
    return store


@pytest.mark.parametrize("policy", ["lru", "hazard"])
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


@pytest.mark.parametrize("policy", ["lru", "hazard"])
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


def test_a_place_that_no_hole_has_room_for_takes_one_scan_and_no_move_among_equally_cold_entries() -> None:
    store = filled(1 << 20, buckets=256, policy="hazard")
    scans = store.counters.scans
    for number in range(2000, 2030):
        store.now += 0.01
        assert store.store(number, 10_000)
    assert store.counters.scans - scans <= 30
    assert not store.counters.moves
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


def test_a_place_is_made_where_the_pins_leave_room_though_the_coldest_entries_lie_elsewhere() -> None:
    store = filled(128 << 10)
    live = sorted(store.table.by_key.values(), key=lambda row: store.table.offsets[row])
    store.pinned = {store.table.span_ids[row] for row in live[:80:2]}
    for row in live:
        # Blocks do not move.
        store.table.records[row] = 1
    assert store.store(900, 9000), store.refusals
    assert all(store.table.states[row] == LIVE for row in live[:80:2])


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
