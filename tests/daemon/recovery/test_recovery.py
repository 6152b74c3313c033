"""What a daemon finds of the one before it, and what it must not touch yet."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import pytest

from tensord.daemon.recovery.recovery import Recovery
from tensord.daemon.store.grants import LentGrant
from tensord.daemon.store.table import LIVE, WITHDRAWN
from tensord.shm.index.index import PLACE_UNVERIFIED
from tensord.shm.lanes.records import NO_KEY, RECORD
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, span_bytes

from ..store.rows import RowStore, key_of, reuse_word

SPAN = span_bytes(100)
OTHER = b"otherone"


def taken_over(
    store: RowStore,
    *,
    now: float = 10.0,
    missing: Iterable[tuple[int, int]] = (),
    past: Iterable[bytes] = (),
    **how: int,
) -> tuple[RowStore, Recovery]:
    """The store of the next daemon, after each step of its recovery."""
    after = store.restarted(**how)
    after.past.update(past)
    after.tenants.invalidated.update(key[:8] for key in after.past)
    found = after.recovery(now, missing)
    for _ in found.steps():
        pass
    after.check_invariants()
    return after, found


def stored(store: RowStore, numbers: Iterable[int] = range(40)) -> set[int]:
    """The numbers of the keys that a reader finds; the store knows the same."""
    found = {number for number in numbers if store.read(key_of(number)) is not None}
    assert found == {number for number in numbers if key_of(number) in store.table.by_key}
    return found


def finish(store: RowStore) -> None:
    """Nothing is left behind once everything has ended and no one pins anything."""
    store.pinned.clear()
    store.spans.end(sorted(store.table.by_key.values(), key=lambda row: -store.table.depths[row]), "cleared")
    for submitter in store.submitters.values():
        for grant in submitter.grants.values():
            store.grants.revoke(grant)
        submitter.grants.clear()
    for _ in range(3):
        store.scan()
    store.check_invariants()
    withdrawn = sum(store.table.sizes[row] for row in store.table.in_order() if store.table.states[row] == WITHDRAWN)
    assert store.holes.total_bytes + withdrawn == store.ring_bytes
    assert not any(store.slots.words[store.slots.at(slot) + 5] for slot in range(store.geometry.slot_count))
    assert sum(store.tenants.owned_bytes) == store.tenants.total_entries == store.tenants.total_tokens == 0


def test_entries_are_there_again_with_all_that_is_known_of_them() -> None:
    store = RowStore()
    store.put(key_of(1), tokens=3, cost=2.5, uid=7, now=1.0)
    store.put(key_of(2, OTHER), 200, ttl=10.0, now=2.0)
    before = [store.read(key) for key in (key_of(1), key_of(2, OTHER))]
    after, found = taken_over(store)
    table, tenants = after.table, after.tenants
    assert [after.read(key) for key in (key_of(1), key_of(2, OTHER))] == before
    row, timed = table.by_key[key_of(1)], table.by_key[key_of(2, OTHER)]
    assert (table.tokens[row], table.costs[row], tenants.uids[table.owners[row]]) == (3, 2.5, 7)
    assert tenants.bytes[tenants.number_of[OTHER]] == span_bytes(200) and tenants.total_tokens == 3
    assert found.corrupt == 0
    assert table.ends[row] == 0.0 and table.ends[timed] == pytest.approx(12.0)
    assert all(after.slots.words[after.slots.at(table.slots[each]) + 6] & PLACE_UNVERIFIED for each in (row, timed))
    assert after.put(key_of(1)) == 0 and after.commits.existed
    finish(after)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_was_no_entry_is_free_after_a_scan_that_finds_no_pin(pinned: bool) -> None:
    """A grant with an entry in it, an entry that ended, and one that was hidden."""
    store = RowStore(8 * SPAN)
    ended, hidden = store.put(key_of(1)), store.put(key_of(2))
    grant = store.lend(4 * SPAN)
    assert grant is not None
    pins = {grant.span_id, store.table.span_ids[ended], store.table.span_ids[hidden]}
    # A record in the middle of the grant.
    store.commits._grants.carve(grant, store.table.offsets[grant.pieces[0]] + SPAN, SPAN)
    store.spans.end([ended], "explicit")
    store.spans.hide([hidden], "capacity")
    after, found = taken_over(store)
    assert (stored(after), found.corrupt, after.holes.total_bytes) == (set(), 0, 2 * SPAN)
    assert after.spans.scan_due
    after.pinned = set(pins) if pinned else set()
    after.scan()
    assert after.holes.total_bytes == (2 if pinned else 8) * SPAN
    finish(after)


def flip(store: RowStore, row: int, at: int, value: int) -> None:
    struct.pack_into("Q", store.ring_memory, store.table.offsets[row] + at, value)


def two_of_one_id(store: RowStore, row: int) -> None:
    """A published slot, whose bytes are free, has the span id of another."""
    _liar(store, store.table.span_ids[row], 20 * SPAN)


def overlap(store: RowStore, row: int) -> None:
    """A published slot says bytes in the middle of an entry, with a header that agrees."""
    _liar(store, (1 << 48) + 900, store.table.offsets[row] + SPAN_HEADER_BYTES, header=True)


def _liar(store: RowStore, span_id: int, offset: int, *, header: bool = False) -> None:
    if header:
        made = store.header(store.table.by_key[key_of(2)])
        lie = type(made)(key_of(33), span_id, 64, 64, 0, 0, 1.0, 0.0, 0)
        store.ring[offset : offset + SPAN_HEADER_BYTES] = lie.pack()
    slot = store.slots.take(key_of(33), span_id, 64 << 48 | offset, 64)
    store.slots.publish(slot)


def elsewhere(store: RowStore, row: int) -> None:
    """The slot stands in a bucket that is none of its key's."""
    slots, slot = store.slots, store.table.slots[row]
    key = slots.key(slot)
    here = slots.at(slot)
    bucket = next(
        b for b in range(store.geometry.bucket_count) if b * 8 not in {slot // 8 * 8} and not _may(key, b, slots.mask)
    )
    there = slots.at(bucket * 8 + 7)
    slots.words[there : there + 8] = slots.words[here : here + 8]
    slots.words[here : here + 8] = memoryview(bytes(64)).cast("Q")


def _may(key: bytes, bucket: int, mask: int) -> bool:
    first, second = (int.from_bytes(key[at : at + 4], "little") & mask for at in (8, 12))
    return bucket in (first, second, second ^ 1)


def other_namespace(store: RowStore, row: int) -> None:
    """The header names a parent in another namespace."""
    store.ring[store.table.offsets[row] + 104 :][:32] = key_of(2, OTHER)
    store.ring[store.table.offsets[row] + 136] = 1


def set_word(word: int, value: int) -> Callable[[RowStore, int], None]:
    def damage(store: RowStore, row: int) -> None:
        store.slots.words[store.slots.at(store.table.slots[row]) + word] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda store, row: flip(store, row, 0, 3), {1}),
        (lambda store, row: flip(store, row, 8, 99), {1}),
        (lambda store, row: flip(store, row, 16, 99), {1}),
        (lambda store, row: flip(store, row, 48, 401), {1}),
        (lambda store, row: flip(store, row, 152, 3), {1}),
        (set_word(6, 64 << 48 | 1 << 40), {1}),
        (set_word(6, 64 << 48 | 3 * SPAN), {1}),
        (set_word(7, 1 << 60), {1}),
        (set_word(7, 0), {1}),
        (two_of_one_id, {33}),
        (overlap, {33}),
        (elsewhere, {1}),
        (other_namespace, {1}),
    ],
)
def test_what_does_not_agree_is_not_taken_over_and_costs_nothing_else(
    damage: Callable[[RowStore, int], None], lost: set[int]
) -> None:
    store = RowStore(40 * SPAN)
    for number in range(8):
        store.put(key_of(number), 400 if number == 1 else 100)
    damage(store, store.table.by_key[key_of(1)])
    after, found = taken_over(store)
    assert stored(after) == set(range(8)) - lost and found.corrupt == 1
    for number in range(8, 36):
        after.put(key_of(number))
        after.check_invariants()
    assert stored(after, range(33)) >= set(range(8)) - lost
    finish(after)


@pytest.mark.parametrize("at", [56, 64, 72, 88, 96, 144])
@pytest.mark.parametrize("value", [1 << 61, (1 << 64) - 1, 0x7FF8_0000_0000_0000])
def test_damage_that_only_the_scrub_finds_does_no_harm_until_then(at: int, value: int) -> None:
    store = RowStore(40 * SPAN, policy="hazard")
    for number in range(8):
        store.put(key_of(number), tokens=4)
    flip(store, store.table.by_key[key_of(1)], at, value)
    after, _ = taken_over(store)
    assert after.table.by_key.keys() == {key_of(number) for number in range(8)}
    assert after.evict(4) == 4 and len(after.table.by_key) == 4
    finish(after)


def test_a_slot_whose_seq_cannot_be_counted_up_any_further_is_taken_over() -> None:
    store = RowStore(40 * SPAN)
    for number in range(8):
        store.put(key_of(number))
    set_word(0, (1 << 64) - 2)(store, store.table.by_key[key_of(1)])
    after, found = taken_over(store)
    assert stored(after) == set(range(8)) and not found.corrupt
    assert after.evict(8) == 8 and not after.table.by_key
    for number in range(8):
        after.put(key_of(number))
    assert stored(after) == set(range(8))
    finish(after)


def test_entries_of_past_generations_are_not_published_again() -> None:
    store = RowStore()
    for number in range(4):
        store.put(key_of(number))
        store.put(key_of(number, OTHER))
    store.pinned = {store.table.span_ids[store.table.by_key[key_of(1)]]}
    after, found = taken_over(store, past=[key_of(0), key_of(1)])
    assert (stored(after), found.corrupt, len(after.table.by_key)) == ({2, 3}, 0, 6)
    after.pinned = store.pinned
    after.scan()
    assert after.ring_bytes - after.holes.total_bytes == 7 * SPAN, "somebody still looks"
    finish(after)


def test_entries_without_their_parents_end_and_the_others_are_tied_again() -> None:
    store = RowStore()
    chains = {0: NO_KEY, 1: key_of(0), 2: key_of(1), 3: key_of(0), 10: NO_KEY, 11: key_of(10), 12: key_of(11)}
    for number, parent in chains.items():
        assert store.put(key_of(number), 100 + number, parent=parent)
    # The daemon was killed when it had unpublished 10, and not yet its descendants.
    store.slots.unpublish(store.table.slots[store.table.by_key[key_of(10)]])
    after, found = taken_over(store)
    table = after.table
    assert (stored(after), found.corrupt, after.families.linked) == ({0, 1, 2, 3}, 0, 3)
    rows = [table.by_key[key_of(number)] for number in range(4)]
    assert [table.depths[row] for row in rows] == [0, 1, 2, 1]
    assert table.befores[rows[2]] == table.sizes[rows[0]] + table.sizes[rows[1]]
    assert [table.children[row] for row in rows] == [2, 1, 0, 0]
    assert after.policy.victims(1)[0] in (rows[2], rows[3]), "a leaf"
    finish(after)


def test_victims_come_in_the_order_of_last_uses_and_a_use_is_newer_than_the_puts_before_it() -> None:
    store = RowStore(8 * SPAN)
    for number in (3, 1, 2):
        store.put(key_of(number), now=float(10 - number))
    used = store.table.slots[store.table.by_key[key_of(3)]]
    word = store.geometry.uses_at // 8 + used
    store.slots.words[word] = reuse_word(2, 8.5)
    for _ in range(2):
        store, found = taken_over(store, now=20.0)
        assert [store.slots.key(store.table.slots[row]) for row in found.rows.tolist()] == [
            key_of(n) for n in (2, 3, 1)
        ]
    assert store.policy.victims(1) == [store.table.by_key[key_of(2)]]
    finish(store)


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_what_was_just_put_stays_after_a_restart_though_others_were_read_since(policy: str) -> None:
    store = RowStore(128 * SPAN, policy=policy)
    rows = [store.put(key_of(number), now=number / 10, cost=1000.0) for number in range(128)]
    store.evict(1)
    last = store.put(key_of(1000), now=13.0, cost=0.001)
    for row in rows[40:]:
        store.slots.words[store.geometry.uses_at // 8 + store.table.slots[row]] = reuse_word(1, 14.0)
    after, _ = taken_over(store, now=15.0)
    after.evict(10)
    assert last and after.read(key_of(1000)) is not None
    finish(after)


def test_pages_that_are_not_in_memory_are_withdrawn() -> None:
    store = RowStore(64 << 10)
    for number in range(40):
        store.put(key_of(number), 832)
    span, page = span_bytes(832), 4096
    after, found = taken_over(store, missing=[(page, page), (5 * page, 2 * page), (60 << 10, page)])
    kept = {
        n
        for n in range(40)
        if all((n + 1) * span <= low or high <= n * span for low, high in ((4096, 8192), (20480, 28672)))
    }
    assert stored(after) == kept and found.corrupt == 40 - len(kept)
    withdrawn = [row for row in after.table.in_order() if after.table.states[row] == WITHDRAWN]
    assert [after.table.offsets[row] for row in withdrawn] == [page, 5 * page, 60 << 10]
    after.scan()
    finish(after)


def put_into(store: RowStore, grant: LentGrant, number: int, offset: int) -> int:
    """Puts an entry of SPAN bytes into a grant. Returns its row."""
    submitter = store.submitters[1]
    record = RECORD.pack(
        submitter.expected, key_of(number), offset, 100, 1, 0, NO_KEY, 1.0, 0.0, grant.number, 64, 0, 0, 0, 0
    )
    store.commits.take(submitter, memoryview(bytearray(record)), 1.0)
    return store.table.by_key[key_of(number)]


@pytest.mark.parametrize("which", [0, 1])
def test_a_place_that_was_lent_twice_is_free_once_neither_grant_is_pinned(which: int) -> None:
    """The first grant's place includes what has become an entry, which ended, and was lent again."""
    store = RowStore(4 * SPAN)
    first = store.lend(4 * SPAN)
    assert first is not None
    ended = put_into(store, first, 1, store.table.offsets[first.pieces[0]])
    store.spans.end([ended], "explicit")
    store.scan()
    again = store.lend(SPAN)
    assert again is not None
    after, _ = taken_over(store)
    after.scan([(first, again)[which].span_id])
    assert after.holes.total_bytes == 0
    after.scan([])
    assert after.holes.total_bytes == 4 * SPAN
    finish(after)


def test_a_client_writes_no_more_into_a_grant_of_the_daemon_before() -> None:
    store = RowStore(8 * SPAN)
    grant = store.lend(4 * SPAN)
    assert grant is not None
    after, _ = taken_over(store)
    seq = after.slots.words[after.slots.at(grant.slot)]
    assert seq != grant.seq, "a client that reads of it late, after the scan, would write"
    assert LIVE not in [after.table.states[row] for row in after.table.in_order()]
    assert after.put(key_of(1)) and after.put(key_of(2))
    after.scan()
    assert after.holes.total_bytes == 6 * SPAN
    finish(after)
