"""Who gets a place of the ring, when, and why not."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.room import lending
from tensord.errors import LimitReached, ObjectTooLarge, StoreFull, TensordError, UnderPressure
from tensord.shm.ring.layout import span_bytes

from ..store.rows import key_of
from .room import RoomStore

SIZE = span_bytes(1000)


def full(ring_bytes: int = 64 << 10, client: int = 1, uid: int = 0, **how: Any) -> RoomStore:
    store = RoomStore(ring_bytes, **how)
    for number in range(2 * ring_bytes // SIZE):
        assert store.store(number, 1000, client, uid)
    return store


def test_the_first_place_waits_for_room_and_the_others_come_if_they_are_there() -> None:
    store = full(1 << 20, buckets=256)
    request = store.ask([100_000, SIZE], settle=False)
    assert (1, request) not in store.answers, "a place that large has to be made"
    store.work()
    answer = store.answers[1, request]
    assert answer.error is None and answer.grants[0][2] == 100_032
    number, offset, size, span_id, slot, seq = answer.grants[0]
    grant = store.submitters[1].grants[number]
    assert (grant.span_id.to_bytes(8, "little"), grant.slot, grant.seq.to_bytes(8, "little")) == (span_id, slot, seq)
    assert store.lending.is_lent(1, number, offset, size)
    assert not store.lending.is_lent(1, number, offset, size + 1) and not store.lending.is_lent(2, number, offset, size)
    store.check_invariants()


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ([70_000], ObjectTooLarge, "object_bytes_max is 65536"),
        ([65_600], ObjectTooLarge, "ring_bytes is 65536"),
        ([50_000], ObjectTooLarge, "max_bytes is 40000"),
    ],
)
def test_a_place_that_an_empty_store_has_no_room_for_is_refused(
    sizes: list[int], error: type[TensordError], text: str
) -> None:
    store = RoomStore(max_bytes=40_000)
    request = store.ask(sizes)
    assert store.answers[1, request].error is not None
    assert isinstance(store.refusals[0], error) and text in str(store.refusals[0])
    assert not store.answers[1, request].grants


def test_under_pressure_every_request_is_refused_also_those_that_wait() -> None:
    store = full()
    waits = store.ask([30_016], settle=False)
    store.lending.pressed("12 bytes are free")
    later = store.ask([SIZE])
    for request in (waits, later):
        assert store.answers[1, request].error is not None
    assert all(isinstance(error, UnderPressure) and "12 bytes" in str(error) for error in store.refusals)
    store.lending.pressed(None)
    assert store.store(900, 1000)


def test_a_client_has_a_share_ahead_of_need_and_another_for_puts_that_wait() -> None:
    store = RoomStore(1 << 20, buckets=256)
    # 1/64 of the ring: 13 places; 1/32: 26; 1/8: 104.
    for _ in range(40):
        store.ask([SIZE] * 10, ahead=True)
    assert store.grants.lent_bytes <= store.ring_bytes // lending.ALL_SHARE
    assert store.grants.lent_bytes > store.ring_bytes // lending.ALL_SHARE - 10 * SIZE
    assert store.lending.waiting == 0, "a request ahead of need is answered at once"
    for _ in range(200):
        store.ask([SIZE])
    assert store.grants.lent_bytes <= store.ring_bytes // lending.BUSY_SHARE + SIZE
    waiting = store.lending.waiting
    assert waiting
    # Another client still gets one place, and does not wait for the first one.
    assert len(store.places([SIZE] * 10, client=2)) == 1
    # What the first one writes lets its own requests go on.
    for number, grant in enumerate([*store.submitters[1].grants.values()]):
        store.write(grant, key_of(number), 1000)
    assert store.lending.waiting < waiting
    store.check_invariants()


def test_clients_and_uids_take_turns() -> None:
    store = full(client=9)
    for client, uid in ((1, 1), (1, 1), (2, 1), (3, 2)):
        store.ask([20_032], client, uid, settle=False)
    store.answers.clear()
    for _ in range(60):
        for each in [*store.submitters.values()]:
            store.lending.returned(each.client, [*each.grants])
        store.work()
    assert [client for client, _ in store.answers] == [1, 3, 2, 1]


def test_a_client_that_leaves_gives_its_places_back_once_they_are_not_pinned() -> None:
    store = full(client=1)
    grant, other = store.places([5056], client=2)[0], store.ask([60_032], client=2, settle=False)
    store.pinned = {grant.span_id}
    store.lending.left(2)
    store.work()
    assert not store.lending.waiting and (2, other) not in store.answers
    assert store.grants.revoked and store.runway.next_timer() is not None
    store.check_invariants()
    store.pinned = set()
    store.now += 5
    store.runway.tick(store.now)
    store.work()
    assert not store.grants.revoked
    store.check_invariants()


def test_uids_that_compete_have_equal_shares() -> None:
    store = full(256 << 10, client=1, uid=1)
    tenants = store.tenants
    for number in range(1000, 1400):
        assert store.store(number, 1000, client=2, uid=2)
        assert store.store(number + 1000, 1000, client=1, uid=1)
    first, second = (tenants.owned_bytes[tenants.owner(uid)] for uid in (1, 2))
    assert abs(first - second) < store.ring_bytes // 10
    # A uid over its share gets nothing while its own entries are in use.
    own, span_ids = tenants.owner(1), store.table.span_ids
    store.pinned = {span_ids[row] for row in store.table.by_key.values() if store.table.owners[row] == own}
    there = tenants.owned_entries[tenants.owner(2)]
    for number in range(5000, 5100):
        if not (row := store.store(number, 1000, client=1, uid=1)):
            break
        store.pinned.add(span_ids[row])
    assert isinstance(store.refusals[-1], StoreFull) and "of uid 1" in str(store.refusals[-1])
    assert tenants.owned_entries[tenants.owner(2)] == there
    store.check_invariants()


def test_the_daemon_asks_for_one_place_for_an_entry_of_a_uid() -> None:
    store, got = full(), list[int | TensordError]()
    store.lending.ask_own(SIZE, 7, got.append)
    store.lending.ask_own(1 << 20, 7, got.append)
    store.work()
    row, error = got
    assert isinstance(row, int) and isinstance(error, ObjectTooLarge)
    [grant] = store.lending.own.grants.values()
    assert grant.pieces == [row] and store.tenants.uids[store.table.owners[row]] == 7
    assert store.tenants.owned_bytes[store.tenants.owner(7)] == SIZE
    store.lending.give_back_own(grant)
    assert not store.lending.own.grants
    store.check_invariants()


def test_a_client_with_an_inbox_is_told_no_span() -> None:
    store = RoomStore()
    store.lending.joined(3, 5, in_place=False)
    answer = store.answers[3, store.ask([SIZE], client=3)]
    [(_, _, size, span_id, _, _)] = answer.grants
    assert (size, span_id) == (SIZE, bytes(8))


def test_small_payloads_in_a_large_place_are_stored_though_the_store_has_all_its_entries() -> None:
    store = RoomStore(1 << 20, max_entries=40)
    for number in range(40):
        assert store.store(number, 100)
    [grant] = store.places([20_000])
    for number in range(100, 130):
        assert store.write(grant, key_of(number), 100), store.commits.refused
    assert store.tenants.total_entries <= 40
    assert all(store.read(key_of(number)) for number in range(110, 130))
    store.check_invariants()


def test_only_so_many_requests_of_one_client_wait_and_hold_up_no_other_client() -> None:
    store = full(1 << 20, client=2, buckets=256)
    # The client has what it may have unused, and uses none of it.
    while not store.lending.waiting:
        store.ask([20_032])
    numbers = [store.ask([size], settle=bool(size % 3)) for size in range(1000, 1100)]
    store.work()
    assert store.lending.waiting == lending.WAITING_MAX
    refused = [number for number in numbers if (1, number) in store.answers]
    assert refused == numbers[lending.WAITING_MAX - 1 :], "the first ones wait"
    assert isinstance(store.refusals[-1], LimitReached) and "64 requests for places" in str(store.refusals[-1])
    for number in range(5000, 5100):
        assert store.store(number, 1000 + number, client=2)
    assert store.lending.waiting == lending.WAITING_MAX
    store.lending.left(1)
    assert not store.lending.waiting
    store.check_invariants()
