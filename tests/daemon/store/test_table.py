"""Rows that change places: the order of offsets, and the span ids that say rows."""

from __future__ import annotations

import pytest

from tensord.daemon.store.holes import Holes
from tensord.daemon.store.table import ENDED, LIVE, RowTable


@pytest.mark.parametrize(("row", "place"), [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 4)])
def test_rows_that_change_places_keep_the_order_and_their_ids_say_which_is_which(row: int, place: int) -> None:
    table = RowTable(4, 1)
    holes = Holes(table, 64 * 12)
    rows = [holes.take(128, ENDED) for _ in range(5)]
    holes.free(rows.pop(2))
    rows.insert(2, holes.take(128, LIVE))
    assert rows == [1, 2, 3, 4, 5]
    pinned, copy = table.span_ids[row], table.next_id(row)
    offsets = table.offsets[row], table.offsets[place]
    holes.swapped(row, place)
    table.swap(row, place)
    assert (table.offsets[place], table.offsets[row]) == offsets
    assert table.span_ids[row] == copy and table.row_of(copy) == row
    assert table.row_of(pinned) == place
    table.by_key.clear()
    table.by_key[b"key"] = next(each for each in rows if table.states[each] == LIVE)
    table.check_invariants()
    holes.check_invariants()
