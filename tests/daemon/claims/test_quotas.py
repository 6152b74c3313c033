"""A uid may have its share of what all share; root and the daemon's own uid may have all."""

from __future__ import annotations

from typing import get_args

import pytest

from tensord.daemon.claims.quotas import Kind, Quota, Quotas
from tensord.errors import LimitReached

OWN = 990
KINDS: tuple[Kind, ...] = get_args(Kind)


def quotas(total: int = 8, uid_max: int = 6) -> Quotas:
    rule = Quota("lanes", "limits.lanes_max", total, "quotas.limits_share_max", uid_max)
    return Quotas(dict.fromkeys(KINDS, rule), OWN)


def test_a_uid_gets_its_share_and_no_more() -> None:
    made = quotas()
    made.admit("lanes", 1000, 5)
    with pytest.raises(LimitReached) as refused:
        made.admit("lanes", 1000, 6)
    for named in ("uid 1000 has 6 lanes", "may have 6 (quotas.limits_share_max)", "limits.lanes_max = 8"):
        assert named in str(refused.value)
    assert made.refusals == {"lanes": 1}


@pytest.mark.parametrize("uid", [0, OWN])
def test_root_and_the_daemons_own_uid_may_have_all(uid: int) -> None:
    made = quotas()
    made.admit("lanes", uid, 7)
    assert not made.refusals


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_would_exceed_the_share_at_once_is_refused(kind: Kind) -> None:
    made = quotas(100, 75)
    made.admit(kind, 7, 70, 5)
    with pytest.raises(LimitReached, match="asks for 6 more"):
        made.admit(kind, 7, 70, 6)
    assert made.refusals == {kind: 1}
