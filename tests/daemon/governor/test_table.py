"""Rows of device entries: found by key, used again, summed exactly."""

from __future__ import annotations

import numpy as np

from tensord.daemon.governor.devices.table import USES_MAX, Table

from .registry import key


def filled(count: int, agent: str = "") -> Table:
    table = Table()
    for each in range(count):
        table.add(key(each), each % 3, 10 + each, each, agent, 1, float(each))
    return table


def test_a_key_is_found_whole_whatever_bytes_it_ends_in() -> None:
    table = Table()
    keys = [bytes(32), b"\1" + bytes(31), bytes(31) + b"\1", bytes(30) + b"\1\0"]
    for each in keys:
        table.add(each, 0, 1, 0, "", 1, 0.0)
    assert table.keys[table.rows(keys)].tolist() == keys
    assert table.rows([b"\2" * 32]).tolist() == [-1]
    table.check_invariants()


def test_an_agents_name_is_forgotten_with_its_last_entry() -> None:
    table = Table()
    for each in range(500):
        row = table.add(key(each), 0, 1, 0, f"request {each}", 1, 0.0)
        table.remove(np.array([row]))
    assert len(table.agents) == 0 and len(table.agents.names) <= 3
    row = table.add(key(1), 0, 1, 0, "a", 1, 0.0)
    table.replace(row, 1, 0, "a")
    table.replace(row, 1, 0, "b")
    assert table.agents.names[table.agent[row]] == "b" and len(table.agents) == 1
    table.replace(row, 1, 0, "")
    assert len(table.agents) == 0
    table.check_invariants()


def test_sums_are_exact_though_they_do_not_fit_into_64_bits() -> None:
    table = Table()
    most = (1 << 63) - 1
    rows = [table.add(key(each), 0, 1 << 48, most, "", 1, 0.0) for each in range(5)]
    assert table.all_tokens == 5 * most
    table.mark_ordered(np.array(rows), np.arange(1, 6))
    assert table.ordered_tokens == 5 * most
    table.remove(np.array(rows[1:]))
    assert (table.all_tokens, table.ordered_tokens, table.bytes) == (most, most, 1 << 48)
    table.check_invariants()


def test_counts_of_uses_do_not_overflow() -> None:
    table = Table()
    row = table.add(key(1), 0, 1, 0, "", (1 << 63) - 1, 0.0)
    table.use(np.array([row] * 1024), 5.0)
    assert table.uses[row] == USES_MAX and table.used_at[row] == 5.0
