"""Entries that are views of one storage count it once between them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tensord.client.device.shares import _EXACT_MAX, SharedStorage, Shares

_serials = count(1)


@dataclass(eq=False)
class Entry:
    memory: Mapping[Hashable, int]
    key: bytes = b""
    serial: int = field(default_factory=_serials.__next__)
    held: tuple[SharedStorage, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(storage.share_bytes for storage in self.held)


def test_cleared_entries_are_freed_at_once_and_not_by_the_garbage_collector() -> None:
    shares = Shares()
    views = [Entry({"batch": 100, ("own", n): 7}) for n in range(3)]
    for view in views:
        shares.add(view)
    left = [weakref.ref(view) for view in views]
    gc.disable()
    try:
        shares.clear()
        views.clear()
        del view
        assert [each() for each in left] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("holders", [1000, 5000])
def test_many_views_of_one_storage_cost_few_reports_each(holders: int) -> None:
    """Such as blocks of an engine's KV memory. What was last reported is never off by more than an eighth."""
    shares, entries, reports = Shares(), [Entry({"kv": 1 << 40}) for _ in range(holders)], 0
    for entry in entries:
        reports += len(list(shares.add(entry)))
        (storage,) = entry.held
        assert abs(len(storage.holders) - storage.reported) * 8 <= storage.reported or storage.reported < _EXACT_MAX
    assert reports < 20 * holders
    for entry in entries:
        reports += len(list(shares.remove(entry)))
    assert reports < 40 * holders
    assert shares.bytes == 0


class SharesMachine(RuleBasedStateMachine):
    """Against a plain dict: the total is that of all storages that an entry holds."""

    entries: Any = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares()
        self.counted: set[Entry] = set()

    @rule(target=entries, storages=st.sets(st.integers(0, 5), min_size=1, max_size=3))
    def add(self, storages: set[int]) -> Entry:
        entry = Entry({number: 3 * number + 1 for number in storages})
        self.shares.add(entry)
        self.counted.add(entry)
        return entry

    @rule(entry=consumes(entries))
    def remove(self, entry: Entry) -> None:
        self.shares.remove(entry)
        self.counted.remove(entry)

    @invariant()
    def total_is_exact(self) -> None:
        storages = {number: size for entry in self.counted for number, size in entry.memory.items()}
        assert self.shares.bytes == sum(storages.values())
        self.shares.check_invariants(self.counted)


TestShares = SharesMachine.TestCase
TestShares.settings = settings(max_examples=40, deadline=None)
