"""Rows of device entries: found by key, used again, summed exactly."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.devices.table import ORDERED, USES_MAX, Owned, Table, exact_sum, runs

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


def test_the_table_grows_and_rows_of_entries_that_went_are_used_again() -> None:
    table = filled(1000)
    table.check_invariants()
    table.remove(np.arange(0, 1000, 2))
    for each in range(2000, 2500):
        table.add(key(each), 0, 1, 0, "", 1, 0.0)
    assert table.end == 1000 and len(table) == 1000
    table.check_invariants()
    table.remove(np.arange(1000))
    assert (len(table), table.end, table.bytes, table.all_tokens) == (0, 0, 0, 0)
    table.check_invariants()


def test_an_agents_name_is_forgotten_with_its_last_entry() -> None:
    table = Table()
    for each in range(5000):
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


def test_the_sums_of_each_owner_match_the_rows_after_any_change() -> None:
    table, other = filled(6), Table()
    table.replace(4, (1 << 53) + 1, 0, "")
    table.mark_ordered(np.array([0, 3, 4]), 7)
    table.take_back(np.array([3]), 60.0)
    assert table.owned(0) == Owned(2, 10 + 13, 1)
    assert table.owned(1) == Owned(2, 11 + (1 << 53) + 1, 1)
    other.copy(table, np.arange(6), 9, 1.0)
    assert other.owned(9) == Owned(6, table.bytes, 0)
    table.remove(np.array([0, 1, 2, 5]))
    assert [table.owned(owner) for owner in range(3)] == [Owned(1, 13, 0), Owned(1, (1 << 53) + 1, 1), Owned()]
    table.check_invariants()
    other.check_invariants()


def test_counts_of_uses_do_not_overflow() -> None:
    table = Table()
    row = table.add(key(1), 0, 1, 0, "", (1 << 63) - 1, 0.0)
    table.use(np.array([row] * 1024), 5.0)
    assert table.uses[row] == USES_MAX and table.used_at[row] == 5.0


def test_a_key_named_twice_in_one_message_is_used_twice() -> None:
    table = filled(3)
    table.use(np.array([1, 1, 2]), 9.0)
    assert table.uses[:3].tolist() == [1, 3, 2] and table.used_at[:3].tolist() == [0.0, 9.0, 9.0]


def test_replacing_an_ordered_entry_changes_the_ordered_sums_too() -> None:
    table = filled(4)
    table.mark_ordered(np.array([1, 2]), 7)
    table.replace(1, 100, 50, "a")
    assert (table.ordered_entries, table.ordered_bytes, table.ordered_tokens) == (2, 112, 52)
    table.take_back(np.array([1]), 60.0)
    assert (table.ordered_entries, table.ordered_bytes, table.bytes) == (1, 12, 10 + 100 + 12 + 13)
    assert table.where(owner=2, state=ORDERED).tolist() == [2]
    table.check_invariants()


def test_rows_of_one_table_are_copied_to_another_with_all_that_is_known_of_them() -> None:
    table, other = filled(200), Table()
    for each in range(100):
        table.replace(each, 5, each, f"agent {each % 7}")
    other.copy(table, np.arange(50, 200), 9, 77.0)
    other.check_invariants()
    assert len(other) == 150 and other.bytes == exact_sum(table.size_bytes[50:200])
    row = other.find(key(53))
    assert row is not None and other.agents.names[other.agent[row]] == f"agent {53 % 7}"
    assert (int(other.owner[row]), int(other.tokens[row]), float(other.used_at[row])) == (9, 53, 77.0)
    other.remove(other.rows([key(each) for each in range(50, 120)]))
    other.copy(table, np.arange(0, 30), 4, 78.0)
    other.check_invariants()
    assert len(set(other.serial[np.flatnonzero(other.state[: other.end])].tolist())) == len(other)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1 << 62), max_size=50))
def test_sums_and_counts_are_those_of_plain_integers(values: list[int]) -> None:
    column = np.array(values, np.int64)
    assert exact_sum(column) == sum(values)
    assert runs(column) == [(each, values.count(each)) for each in sorted(set(values))]
