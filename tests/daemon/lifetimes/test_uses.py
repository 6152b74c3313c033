"""Uses that a daemon with another number of rows had counted. What ends and what is used: tests/daemon/core."""

from __future__ import annotations

from .stand import LifetimesStand


def test_ids_of_a_daemon_with_another_number_of_rows_are_known() -> None:
    stand = LifetimesStand()
    row = stand.put(1)
    table = stand.rows.table
    table.span_ids[row] = 77
    table.strangers[77] = row
    stand.read(others=[77, 78, 77])
    assert stand.entry(1)["uses"] == 2
    assert stand.status()["hits_unknown"] == 1
