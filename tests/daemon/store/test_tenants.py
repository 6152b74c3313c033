"""The numbers of namespaces: as many as have entries, though each key may name another one."""

from __future__ import annotations

from hashlib import sha256

from tensord.shm.ring.layout import span_bytes

from ..room.room import RoomStore


def key_of_its_own(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()[:28] + bytes(4)


def test_keys_of_ever_new_namespaces_take_no_more_numbers_than_there_are_entries() -> None:
    store = RoomStore(64 << 10, buckets=64)
    for number in range(500):
        (grant,) = store.places([span_bytes(1000)])
        assert store.write(grant, key_of_its_own(number), 1000)
    tenants = store.tenants
    assert 20 < tenants.total_entries == sum(tenants.entries)
    assert len(tenants.tags) == len(tenants.number_of) < 4 * tenants.total_entries
    for key, row in store.table.by_key.items():
        assert tenants.number_of[key[:8]] == store.table.namespaces[row]
    store.check_invariants()
