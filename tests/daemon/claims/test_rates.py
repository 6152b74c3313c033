"""A uid's requests over its rate wait, as long as other uids have clients; nobody else's do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.claims.rates import BURST_S, Rates

OWN = 990


def rates(per_s_max: float = 10.0, *uids: int) -> Rates:
    made = Rates(per_s_max, OWN)
    for uid in uids or (1, 2):
        made.joined(uid)
    return made


def test_a_burst_goes_through_and_what_follows_waits_its_turn() -> None:
    made = rates()
    delays = [made.delay_s(1, 100.0) for _ in range(14)]
    assert delays[:11] == [0.0] * 11
    assert delays[11:] == pytest.approx([0.1, 0.2, 0.3])
    assert made.delay_s(2, 100.0) == 0.0, "another uid has a bucket of its own"
    assert made.delayed == 3
    assert made.delay_s(1, 103.0) == 0.0, "time fills it up again"


@pytest.mark.parametrize("uid", [0, OWN])
def test_root_and_the_daemons_own_uid_never_wait(uid: int) -> None:
    made = rates()
    assert {made.delay_s(uid, 0.0) for _ in range(1000)} == {0.0}


def test_a_uid_that_is_alone_never_waits() -> None:
    made = rates(10.0, 1, 1)
    assert {made.delay_s(1, 0.0) for _ in range(1000)} == {0.0}
    made.joined(2)
    assert max(made.delay_s(1, 0.0) for _ in range(20)) > 0
    made.left(2)
    assert made.delay_s(1, 0.0) == 0.0


def test_a_request_that_costs_more_counts_for_more() -> None:
    made = rates()
    assert made.delay_s(1, 0.0, 20.0) == 0.0
    assert made.delay_s(1, 0.0) == pytest.approx(1.0)


def test_a_new_limit_holds_for_what_comes_after() -> None:
    made = rates(1.0)
    made.change_limits(1000.0)
    assert {made.delay_s(1, 0.0) for _ in range(1000)} == {0.0}


def test_uids_that_come_and_go_leave_nothing() -> None:
    made = rates()
    for uid in range(10, 5000):
        made.joined(uid)
        made.delay_s(uid, float(uid))
        made.left(uid)
    assert len(made._used_until) < 50


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=200), st.integers(1, 50))
def test_a_sender_that_waits_as_required_stays_within_the_rate_and_one_burst(gaps: list[float], per_s: int) -> None:
    made = rates(float(per_s))
    now, sent = 0.0, list[float]()
    for gap in gaps:
        now += gap
        # As a connection does: the next request is looked at once the one before was let through.
        now += made.delay_s(1, now)
        sent.append(now)
    for first, start in enumerate(sent):
        for last in range(first, len(sent)):
            assert last - first + 1 <= per_s * (sent[last] - start + BURST_S) + 2
