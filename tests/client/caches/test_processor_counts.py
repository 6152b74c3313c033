"""The counts of a processor cache."""

from __future__ import annotations

from tensord.client.caches.processor_counts import ItemCounts, Stats


def test_items_are_counted_by_outcome_and_by_reason() -> None:
    counts = ItemCounts()
    counts.sent(True, None)
    counts.sent(True, "gone")
    counts.sent(False, "late")
    counts.received(3, 2)
    assert counts.stats(delta=False) == Stats(4, 6, {"gone": 1, "late": 1})


def test_a_delta_has_only_what_was_counted_since_the_last_delta() -> None:
    counts = ItemCounts()
    counts.sent(False, "late")
    counts.sent(False, "full")
    assert counts.stats(delta=True) == counts.stats(delta=False) == Stats(0, 2, {"late": 1, "full": 1})
    counts.sent(False, "full")
    assert counts.stats(delta=True) == Stats(0, 1, {"full": 1})
    assert counts.stats(delta=True) == Stats()


def test_after_a_reset_nothing_is_counted_or_reported() -> None:
    counts = ItemCounts()
    counts.sent(False, "late")
    counts.stats(delta=True)
    counts.reset()
    assert counts.stats(delta=False) == counts.stats(delta=True) == Stats()
