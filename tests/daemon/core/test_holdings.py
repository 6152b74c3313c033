"""Who gives way when uids compete for a full ring: those over their share; and a uid alone may have all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.core.holdings import Capacity, Holding, Holdings
from tensord.daemon.policy.registry import POLICIES
from tensord.shm.layout import SPAN_HEADER_BYTES

from .stand import SPAN, Make, Stand, key
from .test_recovery import restart

ALICE, BOB, CAROL = 1001, 1002, 1003  # the uids of the clients 1, 2 and 3


def ring_of(make: Make, entries: int, **more: object) -> Stand:
    """A ring for so many entries, with clients of two uids."""
    stand = make(entries * SPAN, **more)
    stand.leave(3)
    return stand


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_flood_evicts_its_own_entries_and_not_those_of_a_uid_within_its_share(make: Make, policy: str) -> None:
    stand = ring_of(make, 100, policy=policy)
    for number in range(20):
        assert stand.put(number, client=2) == "stored"
    for number in range(1000, 1500):
        assert stand.put(number, client=1) == "stored"
    # Bob's are by far the coldest.
    assert set(range(20)) <= stand.stored()
    assert stand.store.by_uid()[ALICE]["entries"] == 80, "and the rest is Alice's"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_uid_under_its_share_gets_room_from_the_one_that_is_over(make: Make, policy: str) -> None:
    stand = ring_of(make, 100, policy=policy)
    for number in range(10):
        stand.put(number, client=2)
    for number in range(1000, 1090):
        stand.put(number, client=1)
    for number in range(10, 50):
        assert stand.put(number, client=2) == "stored"
    assert set(range(50)) <= stand.stored()
    assert stand.store.by_uid()[ALICE]["entries"] == 50
    # From here on Bob is over his share as well, and pays for what he puts.
    for number in range(50, 80):
        assert stand.put(number, client=2) == "stored"
    assert stand.store.by_uid()[ALICE]["entries"] == 50
    assert stand.store.by_uid()[BOB]["entries"] == 50


def test_a_uid_alone_may_have_all_and_so_may_one_beside_uids_whose_clients_have_left(make: Make) -> None:
    stand = ring_of(make, 50)
    for number in range(50):
        stand.put(number, client=2)
    stand.leave(2)
    for number in range(1000, 1050):
        assert stand.put(number, client=1) == "stored"
    assert stand.stored() == set(range(1000, 1050))


def test_the_share_of_entries_counts_as_the_share_of_bytes_does(make: Make) -> None:
    stand = ring_of(make, 1000, max_entries=40)
    for number in range(10):
        stand.put(number, 1000, client=2)
    for number in range(1000, 1200):
        assert stand.put(number, client=1) == "stored"
    assert set(range(10)) <= stand.stored()


def test_a_uid_over_its_share_whose_entries_are_pinned_is_refused_and_costs_nobody_an_entry(make: Make) -> None:
    stand = ring_of(make, 40)
    for number in range(10):
        stand.put(number, client=2)
    for number in range(1000, 1030):
        stand.put(number, client=1)
        stand.pin(number)
    before = stand.stored()
    assert stand.put(2000, client=1) == "StoreFull"
    assert stand.stored() == before
    refused = [answer for answer in stand.answers[1] if getattr(answer, "error", None)]
    assert f"uid {ALICE}, which has {30 * SPAN} bytes in 30 entries: 2 uids share" in refused[-1].error.text
    # Bob, who is within his share, gets room from his own, as nothing of Alice's may go.
    assert stand.put(50, client=2) == "stored"
    assert stand.find(key(0)) is None
    stand.views.clear()
    assert stand.put(2000, client=1) == "stored"


def test_a_large_put_of_a_uid_over_its_share_takes_a_window_of_its_own_entries(make: Make) -> None:
    stand = ring_of(make, 64)
    for number in range(8):
        stand.put(number, client=2)
    for number in range(1000, 1056):
        stand.put(number, client=1)
    assert stand.put(2000, 20 * SPAN - SPAN_HEADER_BYTES, client=1) == "stored"
    assert set(range(8)) <= stand.stored()


def test_a_large_put_over_many_small_entries_takes_several_rounds(make: Make) -> None:
    stand = ring_of(make, 1200, max_entries=2000)
    for number in range(8):
        stand.put(number, client=2)
    for number in range(1000, 2192):
        stand.put(number, client=1)
    assert stand.put(5000, 700 * SPAN - SPAN_HEADER_BYTES, client=1) == "stored"
    assert set(range(8)) <= stand.stored()


def test_the_holdings_of_a_uid_are_known_after_a_restart(make: Make) -> None:
    stand = ring_of(make, 40)
    for number in range(10):
        stand.put(number, client=2)
    for number in range(1000, 1030):
        stand.put(number, client=1)
    holdings = {uid: stand.store.memory.spans.holdings.of(uid) for uid in (ALICE, BOB)}
    restart(stand)
    assert {uid: stand.store.memory.spans.holdings.of(uid) for uid in (ALICE, BOB)} == holdings


@given(
    st.dictionaries(st.integers(0, 5), st.integers(1, 100), max_size=6),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 6),
    st.integers(1, 100),
)
def test_in_a_full_ring_entries_of_some_uid_are_always_evictable(
    had: dict[int, int], here: list[int], putter: int, wants: int
) -> None:
    holdings = Holdings()
    for uid, size in had.items():
        holdings.add(uid, size, 1)
    for uid in here:
        holdings.joined(uid)
    total = sum(had.values()) + wants - 1
    owners = holdings.evictable_uids(putter, Holding(wants, 1), Capacity(max(total, 1), 1000, None))
    if owners is None:
        assert set(here) <= {putter}
        return
    assert owners, "the ring is full, and nobody gives way"
    absent = set(had) - set(here) - {putter}
    assert absent <= owners
