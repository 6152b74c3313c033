"""What counts as a use, and where it is seen: by the policy, by readers, and by the next daemon."""

from __future__ import annotations

import numpy as np
import pytest

from tensord.daemon.replacement import POLICIES
from tensord.daemon.store.details import unpack_uses
from tensord.shm.index.index import REUSE_USES_MAX, IndexReader, IndexWriter

from ..store.rows import key_of
from .stand import SPAN, LifetimesStand


def index(stand: LifetimesStand) -> IndexWriter:
    return IndexWriter(stand.rows.index_memory, stand.rows.geometry)


def shown(stand: LifetimesStand, number: int) -> tuple[int, int]:
    """What readers see of an entry: its uses, and how many clients hold it."""
    reader = IndexReader(stand.rows.index_memory, stand.rows.geometry)  # type: ignore[arg-type]
    hit = reader.find(key_of(number))
    assert hit is not None
    return reader.reuse(hit[0])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_used_stays_and_is_shown(policy: str) -> None:
    stand = LifetimesStand(8 * SPAN, policy=policy)
    for number in range(8):
        stand.put(number)
    stand.now = 3.0
    for _ in range(3):
        stand.read(0, 5, 0, 0)
    assert (stand.entry(0)["uses"], stand.entry(5)["uses"], stand.entry(1)["uses"]) == (9, 3, 0)
    assert shown(stand, 0) == (9, 0)
    geometry, slot = stand.rows.geometry, stand.rows.table.slots[stand.row(0)]
    words = np.frombuffer(stand.rows.index_memory, "u8", geometry.slot_count, geometry.uses_at)
    uses, used_s = unpack_uses(words[[slot]])
    assert (uses.tolist(), used_s.tolist()) == ([9], [3.0])
    stand.uses.held([(stand.view(0), 2), (99, 7)])
    assert shown(stand, 0) == (9, 2)
    held = index(stand).held()
    assert dict(zip(*(each.tolist() for each in held), strict=True)) == {stand.view(0): 2}
    stand.read(0)
    assert shown(stand, 0) == (10, 2), "a use leaves the holders as they are"
    stand.rows.pinned.clear()
    for number in range(10, 16):
        stand.put(number)
    assert {0, 5} <= stand.stored()


def test_ids_that_are_no_entrys_are_unknown_hits() -> None:
    stand = LifetimesStand(2 * SPAN)
    stand.put(1)
    ended = stand.view(1)
    stand.rows.pinned.clear()
    grant = stand.rows.lend(SPAN)
    assert grant is not None
    stand.end(1)
    stand.read(others=[ended, grant.span_id, 0, 1 << 63], misses=2, lost=7)
    stand.rows.scan()
    stand.put(2)
    stand.read(2, others=[ended])
    status = stand.status()
    assert (status["hits"], status["hits_unknown"], status["misses"], status["log_lost"]) == (13, 5, 2, 7)
    assert stand.entry(2)["uses"] == 1


def test_ids_of_a_daemon_with_another_number_of_rows_are_known() -> None:
    stand = LifetimesStand()
    row = stand.put(1)
    table = stand.rows.table
    table.span_ids[row] = 77
    table.strangers[77] = row
    stand.read(others=[77, 78, 77])
    assert stand.entry(1)["uses"] == 2
    assert stand.status()["hits_unknown"] == 1


def test_uses_are_counted_up_to_a_limit_and_not_handed_on_to_the_next_entry_of_the_slot() -> None:
    stand = LifetimesStand(SPAN, buckets=1)
    stand.put(1)
    for _ in range(9):
        stand.read(*[1] * 8000)
    assert stand.entry(1)["uses"] == REUSE_USES_MAX
    stand.uses.held([(stand.view(1), 3)])
    stand.rows.pinned.clear()
    stand.end(1)
    stand.rows.scan()
    for number in range(2, 30):
        stand.put(number)
        assert (stand.entry(number)["uses"], index(stand).held()[0].tolist()) == (0, [])
