"""What must stay is found in slices: a put that fits between many pins gets its place, one that does not is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.core import survey, unevictable
from tensord.daemon.core.entries import EntryState
from tensord.daemon.core.events import Scanned, Tick
from tensord.daemon.core.survey import Survey
from tensord.shm.layout import SPAN_HEADER_BYTES

from .stand import SPAN, Make, Stand, key

RING = 40


def span(offset: int, state: EntryState = EntryState.LIVE) -> Any:
    return SimpleNamespace(offset=offset, span_bytes=1, state=state, tokens=2)


@given(
    stays=st.sets(st.integers(0, RING - 1)),
    besides=st.sets(st.integers(0, RING - 1)),
    size=st.integers(1, RING),
)
def test_gaps_are_all_stretches_without_an_unevictable_span(stays: set[int], besides: set[int], size: int) -> None:
    found = Survey([*map(span, stays), None], lambda _: True, RING)
    while not found.done:
        found.advance()
    taken = stays | besides
    expected, low = [], 0
    for at in [*sorted(taken), RING]:
        if at - low >= size:
            expected.append((low, at))
        low = at + 1
    lows, highs = found.gaps(size, map(span, besides))
    assert list(zip(lows, highs, strict=True)) == expected
    assert (found.entries, found.tokens, found.size_bytes) == (len(stays), 2 * len(stays), len(stays))


def test_retired_spans_count_by_their_bytes_and_spans_being_filled_not_at_all() -> None:
    found = Survey([span(0), span(1, EntryState.RETIRED), span(2, EntryState.FILLING)], lambda _: True, RING)
    found.advance()
    assert (found.entries, found.size_bytes) == (1, 2)


def step(stand: Stand) -> None:
    """A scan is carried out, or time goes on. The scan's outcome may wait for the survey."""
    if stand.scans:
        stand.scans -= 1
        stand.do(Scanned({view.span_id for view in stand.views}))
    else:
        stand.do(Tick())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """A survey looks at four spans at a time, and is made in slices where there are more."""
    for module in (unevictable, survey):
        monkeypatch.setattr(module, "SURVEYED_MAX", 4)
    return 4


def test_one_event_looks_at_few_of_many_pins_and_the_put_is_refused_in_the_end(
    make: Make, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = make(40 * SPAN)
    for number in range(40):
        stand.put(number)
    for number in range(0, 40, 2):
        stand.pin(number)
    looks = 0
    kept = Survey._kept

    def counted(self: Survey, spans: Any) -> Any:
        nonlocal looks
        spans = list(spans)
        looks += len(spans)
        return kept(self, spans)

    monkeypatch.setattr(Survey, "_kept", counted)
    stand.commit(1, 1, key(100), 2 * SPAN)
    stand.part(1, 1, 2 * SPAN, last=True)
    while stand.outcome(1, 1) is None:
        before = looks
        step(stand)
        assert looks - before <= 2 * few
    assert looks >= 20
    assert stand.ended(1, 1) == "StoreFull"
    assert stand.stored() == set(range(40)), "a put that cannot fit costs nobody an entry"


def test_a_put_finds_the_one_gap_between_many_pins(make: Make, few: int) -> None:
    stand = make(40 * SPAN)
    for number in range(40):
        stand.put(number)
    for number in range(40):
        if number not in (20, 21, 22):
            stand.pin(number)
    stand.commit(1, 1, key(100), 3 * SPAN - SPAN_HEADER_BYTES)
    stand.part(1, 1, 3 * SPAN - SPAN_HEADER_BYTES, last=True)
    while not stand.copies:
        step(stand)
    stand.copy()
    assert stand.stored() == set(range(40)) - {20, 21, 22} | {100}
