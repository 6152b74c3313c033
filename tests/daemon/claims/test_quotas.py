"""A uid may have its share of what all share, and send at its rate; root and the daemon's own uid may have all."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.claims.quotas import BURST_S, Kind, Quota, Quotas
from tensord.errors import LimitReached

OWN = 990
KINDS: tuple[Kind, ...] = get_args(Kind)
RULES: dict[Kind, Quota] = dict.fromkeys(KINDS, Quota("lanes", "limits.lanes_max", 100, "quotas.limits_share_max", 75))


def quotas(per_s_max: float = 10.0, *uids: int) -> Quotas:
    """Of a daemon with clients of these uids."""
    made = Quotas(RULES, OWN, per_s_max)
    for uid in uids or (1, 2):
        made.rates.joined(uid)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_uid_gets_its_share_and_no_more(kind: Kind) -> None:
    made = quotas()
    made.admit(kind, 1000, 70, 5)
    with pytest.raises(LimitReached) as refused:
        made.admit(kind, 1000, 70, 6)
    for named in ("uid 1000 has 70 lanes", "6 more", "may have 75 (quotas.limits_share_max)", "limits.lanes_max = 100"):
        assert named in str(refused.value)
    assert made.refusals == {kind: 1}


@pytest.mark.parametrize("uid", [0, OWN])
def test_root_and_the_daemons_own_uid_may_have_all_and_never_wait(uid: int) -> None:
    made = quotas()
    made.admit("lanes", uid, 99)
    assert {made.rates.delay_s(uid, 0.0) for _ in range(1000)} == {0.0}
    assert not made.refusals and not made.rates.delayed


def test_a_burst_goes_through_and_what_follows_waits_its_turn_under_the_limit_of_its_time() -> None:
    made = quotas()
    rates = made.rates
    delays = [rates.delay_s(1, 100.0) for _ in range(14)]
    assert delays[:11] == [0.0] * 11
    assert delays[11:] == pytest.approx([0.1, 0.2, 0.3])
    assert rates.delay_s(2, 100.0) == 0.0, "another uid has a bucket of its own"
    assert rates.delayed == 3
    assert rates.delay_s(1, 103.0, 20.0) == 0.0, "time fills it up again"
    assert rates.delay_s(1, 103.0) == pytest.approx(1.0), "a request that costs more counts for more"
    made.change_limits(RULES, 1000.0)
    assert {rates.delay_s(2, 200.0) for _ in range(1000)} == {0.0}


def test_a_uid_that_is_alone_never_waits() -> None:
    rates = quotas(10.0, 1, 1).rates
    assert {rates.delay_s(1, 0.0) for _ in range(1000)} == {0.0}
    rates.joined(2)
    assert max(rates.delay_s(1, 0.0) for _ in range(20)) > 0
    rates.left(2)
    assert rates.delay_s(1, 0.0) == 0.0


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=200), st.integers(1, 50))
def test_a_sender_that_waits_as_required_stays_within_the_rate_and_one_burst(gaps: list[float], per_s: int) -> None:
    rates = quotas(float(per_s)).rates
    now, sent = 0.0, list[float]()
    for gap in gaps:
        now += gap
        # As a connection does: the next request is looked at once the one before was let through.
        now += rates.delay_s(1, now)
        sent.append(now)
    for first, start in enumerate(sent):
        for last in range(first, len(sent)):
            assert last - first + 1 <= per_s * (sent[last] - start + BURST_S) + 2
